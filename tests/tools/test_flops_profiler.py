"""``flops`` against TensorFlow's own profiler, which counts the operators of a graph.

It agrees on products and convolutions. It knows no formula of ``Einsum``, and counts additions
(``BiasAdd``, element by element), which are not part of our convention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from amanda_tools.flops import FlopsTool
from tests.running import applied

profiler = tf.compat.v1.profiler


def profiled(graph: Any) -> dict[str, int]:
    """Operations by type of operator, of a graph with known shapes."""
    builder = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation())
    found = profiler.profile(graph, options=builder.with_empty_output().build(), cmd="op")
    total: dict[str, int] = {}
    while found.children:
        [found] = found.children
        total[found.name] = found.float_ops
    return total


def weight(*shape: int) -> Any:
    return tf.constant(np.ones(shape, np.float32))


OPERATORS: dict[str, tuple[list[int], Callable[[Any], Any]]] = {
    "MatMul": ([5, 6], lambda x: tf.matmul(x, weight(6, 7))),
    "BatchMatMulV2": ([3, 5, 6], lambda x: tf.matmul(x, weight(3, 6, 7))),
    "Conv2D": ([2, 8, 8, 3], lambda x: tf.nn.conv2d(x, weight(3, 3, 3, 4), 2, "SAME")),
    "Conv3D": ([1, 5, 5, 5, 2], lambda x: tf.nn.conv3d(x, weight(3, 3, 3, 2, 4), [1] * 5, "VALID")),
    "DepthwiseConv2dNative": (
        [2, 8, 8, 3],
        lambda x: tf.nn.depthwise_conv2d(x, weight(3, 3, 3, 2), [1, 1, 1, 1], "SAME"),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_what_the_profiler_counts(name: str) -> None:
    """Strides, paddings and batches."""
    shape, build = OPERATORS[name]
    function = tf.function(build, input_signature=[tf.TensorSpec(shape)])
    expected = profiled(function.get_concrete_function().graph)
    assert applied(FlopsTool(), function, tf.ones(shape)).summary()["flops"] == expected[name] > 0


def test_a_network_is_what_the_profiler_counts() -> None:
    """All convolutions and products of MobileNet, small."""
    model = tf.keras.applications.MobileNet((32, 32, 3), 0.25, weights=None, classes=5)
    function = tf.function(
        lambda x: model(x, training=False), input_signature=[tf.TensorSpec([1, 32, 32, 3])]
    )
    by_type = profiled(function.get_concrete_function().graph)
    products = sum(by_type.get(name, 0) for name in OPERATORS)
    assert (
        applied(FlopsTool(), function, tf.ones((1, 32, 32, 3))).summary()["flops"]
        == products
        > 1_000_000
    )
