"""The tools' figures of a TensorFlow model beside those of a tape and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.dump import DumpTool
from amanda_tools.sparsity import SparsityTool
from amanda_tools.stats import StatsTool

KINDS = ("activations", "weights", "gradients")
STEPS = 2


Key = tuple[str, str, tuple[int, ...]]


def oracle(model: Any, data: Any) -> dict[Key, Any]:
    """Outputs, weights and gradients, by type, tensor and shape, from a persistent tape."""
    conv, _, _, head = model.layers
    with tf.GradientTape(persistent=True) as tape:
        h = tf.nn.convolution(data, conv.kernel)
        a = tf.nn.relu(h)
        y = tf.reshape(a, (2, -1)) @ head.kernel
        loss = tf.reduce_sum(y * y)
    flat = tf.reshape(tape.gradient(loss, a), (2, -1))
    values = [
        ("conv2d", "output0", h),
        ("conv2d", "weight", conv.kernel),
        ("relu", "output0", a),
        ("linear", "output0", y),
        ("linear", "weight", head.kernel),
        ("linear_backward", "grad0", flat),
        ("linear_backward", "grad0", tape.gradient(loss, head.kernel)),
        ("relu_backward", "grad0", tape.gradient(loss, h)),
        ("conv2d_backward", "grad0", tape.gradient(loss, conv.kernel)),
    ]
    return {(kind, name, tuple(v.shape)): np.asarray(v) for kind, name, v in values}


@pytest.fixture(params=["eager", "function"])
def watched(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[Key, Any]]:
    """Tools after a few training steps without updates, and what the oracle says of one step."""
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((6, 6, 4)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3, use_bias=False),
        ]
    )
    kernel = model.layers[3].get_weights()[0]
    kernel[::2] = 0
    model.layers[3].set_weights([kernel])
    data = tf.random.normal((2, 6, 6, 4))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, model.trainable_variables)

    run = tf.function(step) if request.param == "function" else step
    tools = {
        "stats": StatsTool(tensors=KINDS),
        "sparsity": SparsityTool(tensors=KINDS),
        "dump": DumpTool(tensors=KINDS),
    }
    with amanda.apply(*tools.values()):
        for _ in range(STEPS):
            run(data)
            amanda.new_iteration()
    return tools, oracle(model, data)


def test_values_of_a_training_step(watched: Any) -> None:
    """Tensors, their moments and their zeros, of all steps."""
    tools, expected = watched
    dumped: dict[Key, list[Any]] = {}
    for entry in tools["dump"].entries:
        key = entry.row["type"], entry.tensor, tuple(entry.shape)
        dumped.setdefault(key, []).append(entry)
    rows = {
        name: {(row["id"], row["tensor"]): row for row in tools[name].op_rows()}
        for name in ("stats", "sparsity")
    }
    for key, value in expected.items():
        taken = dumped[key]
        assert [entry.step for entry in taken] == [*range(STEPS)], key
        for entry in taken:
            np.testing.assert_allclose(tools["dump"].load(entry), value, rtol=1e-4, atol=1e-5)
        place = taken[0].row["id"], taken[0].tensor
        row = rows["stats"][place]
        assert row["executions"] == STEPS
        zeros = np.count_nonzero(value == 0)
        assert row["zeros"] == STEPS * zeros, key
        exact = value.astype(np.float64)
        for figure in ("mean", "std", "min", "max"):
            assert row[figure] == pytest.approx(getattr(exact, figure)(), rel=1e-5, abs=1e-6), key
        assert rows["sparsity"][place]["sparsity"] == pytest.approx(zeros / value.size)
    # Every other input of the product is zero: two of four along them.
    shares = {
        row["type"]: row["pattern_share"]
        for row in rows["sparsity"].values()
        if row["tensor"] == "weight"
    }
    assert shares == {"linear": 1, "conv2d": 0}
