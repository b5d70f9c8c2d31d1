"""One tool reads the attributes of twin models of both frameworks, in all modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn import functional

import amanda
from amanda.tools import canonical, layouts
from amanda.tools.mapping import MappingTool
from tests.running import applied

tf1 = tf.compat.v1


class ReadAttributes(amanda.Tool):
    """Reads canonical attributes and weights, without a branch on the framework."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.weights: dict[str, Any] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Note an operator that has attributes."""
        if found := canonical.attributes(context):
            self.found.append((context["op_type"], found))
        weight = layouts.conversion(context, "weight")
        if weight is not None:
            value = context.get_value(context["weight_index"])
            converted = weight.to_canonical(value)
            assert tuple(weight.from_canonical(converted).shape) == tuple(value.shape)
            self.weights[f"{context['op_type']} {tuple(converted.shape)}"] = converted


RANDOM = np.random.default_rng(0)
KERNEL, DEPTHWISE, UP, MATRIX, TABLE = (
    RANDOM.random(shape, dtype="float32")
    for shape in ((3, 3, 4, 8), (3, 3, 4, 2), (3, 3, 4, 8), (4, 5), (7, 6))
)
DATA = RANDOM.random((2, 9, 9, 4), dtype="float32")
ROWS = RANDOM.random((3, 4), dtype="float32")


class Twin(torch.nn.Module):
    """The operators in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        arrays = {
            "kernel": KERNEL.transpose(3, 2, 0, 1),
            "depthwise": DEPTHWISE.transpose(2, 3, 0, 1).reshape(8, 1, 3, 3),
            "up": UP.transpose(3, 2, 0, 1),
            "matrix": MATRIX.T,
            "table": TABLE,
        }
        for name, array in arrays.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(array)))

    def forward(self, x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> None:
        z = functional.conv2d(x, self.kernel, None, 2, 1)
        functional.conv2d(x, self.kernel, dilation=2)
        functional.conv2d(x, self.depthwise, groups=4)
        functional.conv_transpose2d(z, self.up, stride=2, padding=1)
        functional.max_pool2d(x, 3, 2, 1)
        functional.avg_pool2d(x, 2)
        functional.linear(y, self.matrix)
        functional.embedding(i, self.table)
        (
            functional.softmax(y, -1),
            functional.log_softmax(y, 1),
            functional.leaky_relu(y, 0.2),
            functional.elu(y),
        )
        y.sum((0, 1), keepdim=True), y.mean(), y.amax(-1), y.argmax(1), y.cumsum(1)
        torch.cat([y, y], -1), torch.stack([y, y], 1), y.split(2, -1)
        (
            y.reshape(2, -1),
            y.permute(1, 0),
            functional.pad(y, (1, 2)),
            y[1:, ::2],
            y.index_select(1, i),
        )
        y[None, 0], y.unsqueeze(-1), y[:1].squeeze(0), y.to(torch.float64), y.flip(1)
        functional.pad(y, (1, 2))
        y.topk(2), functional.one_hot(i, 7)
        y.unbind(1), functional.pad(y, (1, 1), mode="constant", value=2.0)


def read_twin() -> ReadAttributes:
    """The attributes in PyTorch."""
    tool, model = ReadAttributes(), Twin()
    data = torch.tensor(DATA.transpose(0, 3, 1, 2))
    with amanda.apply(tool), torch.no_grad():
        model(data, torch.tensor(ROWS), torch.tensor([1, 2]))
    return tool


class Operators:
    """The operators in TensorFlow."""

    def __init__(self, variable: Callable[[Any], Any] = tf.Variable) -> None:
        arrays = (KERNEL, DEPTHWISE, UP, MATRIX, TABLE)
        self.kernel, self.depthwise, self.up, self.matrix, self.table = map(variable, arrays)

    def __call__(self, x: Any, y: Any, i: Any) -> list[Any]:
        z = tf.nn.conv2d(x, self.kernel, 2, "SAME")
        # A dilated DepthwiseConv2dNative runs on processors with AVX512 only (oneDNN, 2.21).
        return [
            tf.nn.conv2d(x, self.kernel, 1, "VALID", dilations=2),
            tf.nn.depthwise_conv2d(x, self.depthwise, [1] * 4, "VALID"),
            tf.nn.conv2d_transpose(z, self.up, tf.shape(x), 2),
            tf.nn.max_pool2d(x, 3, 2, "SAME"),
            tf.nn.avg_pool2d(x, 2, 2, "VALID"),
            tf.matmul(y, self.matrix),
            tf.nn.embedding_lookup(self.table, i),
            *(tf.nn.softmax(y), tf.nn.log_softmax(y), tf.nn.leaky_relu(y, 0.2), tf.nn.elu(y)),
            *(tf.reduce_sum(y, keepdims=True), tf.reduce_mean(y), tf.reduce_max(y, -1)),
            *(tf.argmax(y, 1), tf.cumsum(y, 1), tf.concat([y, y], -1), tf.stack([y, y], 1)),
            *(*tf.split(y, 2, -1), tf.reshape(y, (2, -1)), tf.transpose(y), y[1:, ::2]),
            *(tf.pad(y, [[0, 0], [1, 2]]), tf.gather(y, i, axis=1), y[None, 0]),
            *(tf.expand_dims(y, -1), tf.squeeze(y[:1], 0), tf.cast(y, tf.float64)),
            *(tf.reverse(y, [1]), *tf.math.top_k(y, 2), tf.one_hot(i, 7)),
            *tf.unstack(y, axis=1),
            tf.pad(y, [[0, 0], [1, 1]], constant_values=2.0),
        ]


def run_eager() -> None:
    Operators()(tf.constant(DATA), tf.constant(ROWS), tf.constant([1, 2]))


def run_function() -> None:
    tf.function(Operators())(tf.constant(DATA), tf.constant(ROWS), tf.constant([1, 2]))


def run_session() -> None:
    def variable(array: Any) -> Any:
        return tf1.Variable(array, use_resource=True)

    with tf1.Graph().as_default(), tf1.Session() as session:
        places = [tf1.placeholder(d, s) for d, s in (("float32", DATA.shape), ("float32", (3, 4)))]
        places.append(tf1.placeholder("int32", (2,)))
        found = Operators(variable)(*places)
        session.run(tf1.global_variables_initializer())
        session.run(found, dict(zip(places, (DATA, ROWS, [1, 2]), strict=True)))


@pytest.mark.parametrize("run", [run_eager, run_function, run_session])
def test_a_tool_reads_twin_models_without_a_branch(run: Callable[[], None]) -> None:
    """Attributes are equal in PyTorch and in all modes of TensorFlow, and weights in one layout."""
    expected, tool = read_twin(), ReadAttributes()
    with amanda.apply(tool):
        run()
    assert [entry for entry in expected.found if entry not in tool.found] == []
    assert len(expected.found) >= 30
    for name, weight in expected.weights.items():
        np.testing.assert_array_equal(weight.detach().numpy(), np.asarray(tool.weights[name]), name)


def test_what_a_graph_does_not_tell_is_missing() -> None:
    """Sizes and axes that are known at run time only have no attribute, and no wrong one."""

    @tf.function(input_signature=[tf.TensorSpec((None, None, None, 4)), tf.TensorSpec((), "int32")])
    def program(x: Any, n: Any) -> Any:
        return tf.nn.max_pool2d(x, 3, 2, "SAME"), tf.gather(x, [0], axis=n), tf.reduce_sum(x, n)

    tool = applied(ReadAttributes(), lambda: program(tf.ones((1, 4, 4, 4)), tf.constant(1)))
    found = dict(tool.found)
    window = {"kernel_size": (3, 3), "stride": (2, 2), "dilation": (1, 1), "ceil_mode": False}
    assert found["max_pool2d"] == window
    assert found["sum"] == {"keepdim": False}
    assert "index_select" not in found
