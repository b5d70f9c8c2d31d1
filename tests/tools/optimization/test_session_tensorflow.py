"""The optimization tools on TensorFlow's Session: whole graphs with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.inject import InjectTool
from amanda_tools.prune import PruneTool
from amanda_tools.quantize import QuantizeTool

v1 = tf.compat.v1

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(5, 9, 9, 4)).astype(np.float32)
WEIGHTS = [
    (RANDOM.normal(size=shape) / 4).astype(np.float32)
    for shape in ((3, 3, 4, 8), (3, 3, 8, 8), (8, 6))
]


class Graph:
    """Convolutions of two sizes and a matrix product, with the gradients of their weights."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, (None, 9, 9, 4))
            self.weights = [
                v1.get_variable(f"w{i}", initializer=value, use_resource=True)
                for i, value in enumerate(WEIGHTS)
            ]
            one, two, three = self.weights
            h = tf.nn.relu(tf.nn.conv2d(self.x, one, 1, "SAME"))
            h = tf.nn.relu(tf.nn.conv2d(h, two, 2, "VALID"))
            self.y = tf.matmul(tf.reduce_mean(h, [1, 2]), three)
            self.gradients = v1.gradients(tf.reduce_sum(self.y * self.y), self.weights)

    def run(self, weights: list[Any], *tools: amanda.Tool, times: int = 2) -> tuple[Any, Any]:
        """Output and gradients of the last of some runs."""
        with v1.Session(graph=self.graph) as session:
            for variable, value in zip(self.weights, weights, strict=True):
                variable.load(value, session)
            if not tools:
                return session.run((self.y, self.gradients), {self.x: IMAGES})
            with amanda.apply(*tools):
                for _ in range(times):
                    found = session.run((self.y, self.gradients), {self.x: IMAGES})
        return found


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.7},
        {"method": "nm"},
        {"method": "tile", "tile": 3},
        {"sparsity": 0.8, "scope": "global"},
        {"sparsity": 0.9, "end": 3},
    ],
    ids=str,
)
def test_masks_act_as_on_weights_changed_by_hand(options: dict[str, Any]) -> None:
    graph, tool = Graph(), PruneTool(**options)
    output, gradients = graph.run(WEIGHTS, tool, times=6)
    masks = [mask.astype(np.float32) for mask in tool.masks.values()]
    assert len(masks) == 3
    expected, dense = graph.run([w * m for w, m in zip(WEIGHTS, masks, strict=True)])
    assert np.allclose(output, expected, atol=1e-6)
    for found, wanted, mask in zip(gradients, dense, masks, strict=True):
        assert np.allclose(found, wanted * mask, atol=1e-5)
    sparsity = tool.result()["summary"]["sparsity"]
    assert sparsity == pytest.approx(options.get("sparsity", 0.5), abs=0.01)


def test_masks_of_eager_mode_hold_in_a_session() -> None:
    """The methods give the same masks in both modes."""
    graph, tool, eager = Graph(), PruneTool(method="nm"), PruneTool(method="nm")
    graph.run(WEIGHTS, tool)
    with amanda.apply(eager):
        x, (one, two, three) = tf.constant(IMAGES), (tf.Variable(w) for w in WEIGHTS)
        h = tf.nn.relu(tf.nn.conv2d(x, one, 1, "SAME"))
        h = tf.nn.relu(tf.nn.conv2d(h, two, 2, "VALID"))
        tf.matmul(tf.reduce_mean(h, [1, 2]), three)
    for a, b in zip(tool.masks.values(), eager.masks.values(), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("method", ["channel", "activation"])
def test_gates_leave_the_users_graph_alone(method: str) -> None:
    graph, tool = Graph(), PruneTool(method=method, sparsity=0.25)
    names = [op.name for op in graph.graph.get_operations()]
    expected, _ = graph.run(WEIGHTS)
    output, gradients = graph.run(WEIGHTS, tool)
    assert not np.allclose(output, expected)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert len(tool.parameters()) == 4
    assert [op.name for op in graph.graph.get_operations()] == names


def test_quantization_equals_that_of_eager_mode() -> None:
    graph, tool, eager = Graph(), QuantizeTool(), QuantizeTool()
    output, _ = graph.run(WEIGHTS, tool)
    one, two, three = (tf.Variable(w) for w in WEIGHTS)
    with amanda.apply(eager):
        for _ in range(2):
            h = tf.nn.relu(tf.nn.conv2d(tf.constant(IMAGES), one, 1, "SAME"))
            h = tf.nn.relu(tf.nn.conv2d(h, two, 2, "VALID"))
            expected = tf.matmul(tf.reduce_mean(h, [1, 2]), three).numpy()
            amanda.new_iteration()
    exact, _ = graph.run(WEIGHTS)
    # A value at the middle between two numbers may be rounded to either.
    assert np.abs(output - expected).max() < 0.2 * np.abs(exact - expected).max()
    for a, b in zip(tool.quantizers.values(), eager.quantizers.values(), strict=True):
        for one_, other in zip(a, b, strict=True):
            assert np.allclose(one_.scale, other.scale, rtol=1e-5)


def test_faults_are_injected_in_every_run() -> None:
    graph, tool = Graph(), InjectTool(ops=["conv2d", "linear"], fault="value", value=50.0)
    output, _ = graph.run(WEIGHTS, tool, times=3)
    exact, _ = graph.run(WEIGHTS)
    assert not np.allclose(output, exact)
    assert tool.result()["summary"]["faults"] == 9
