"""Programs of many kinds in ``tf.function``: calls, loops, branches, lists, custom gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

X = np.array([[0.5, -1.0], [2.0, 0.25]])


def differentiated(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function's value, and the gradient of its sum, by a tape around the call."""

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, tape.gradient(y, x)

    return run


@tf.function
def inner(x: Any) -> Any:
    return tf.tanh(x) * 2.0


@tf.custom_gradient
def clipped(x: Any) -> Any:
    def backward(gradient: Any) -> Any:
        return tf.clip_by_value(gradient, -0.5, 0.5) * tf.sigmoid(x)

    return tf.tanh(x), backward


def calls(x: Any) -> Any:
    return inner(inner(x) + x)


def loop(x: Any) -> Any:
    for _ in tf.range(3):
        x = tf.tanh(x) * 1.5
    return x


def branches(x: Any) -> Any:
    if tf.reduce_sum(x) > 0.0:
        return tf.tanh(x) * 3.0
    return tf.sin(x)


def nested_control_flow(x: Any) -> Any:
    for i in tf.range(4):
        x = tf.tanh(x) if i % 2 == 0 else inner(x)
    return x


def early_exit(x: Any) -> Any:
    i = 0
    while tf.reduce_sum(tf.abs(x)) > 1.0:
        x = tf.tanh(x)
        i += 1
        if i > 5:
            break
    return x


def arrays(x: Any) -> Any:
    results = tf.TensorArray(tf.float64, 0, dynamic_size=True)
    for i in tf.range(3):
        results = results.write(i, tf.tanh(x) * tf.cast(i, tf.float64))
    return results.stack()


def mapped(x: Any) -> Any:
    return tf.map_fn(tf.tanh, x) + tf.vectorized_map(tf.sin, x)


def cases(x: Any) -> Any:
    return tf.switch_case(tf.cast(x[1, 0], tf.int32), [lambda: x, lambda: -x, lambda: tf.tanh(x)])


def recomputed(x: Any) -> Any:
    return tf.recompute_grad(lambda y: tf.tanh(y) ** 2)(x)


def of_python(x: Any) -> Any:
    return tf.py_function(lambda y: tf.tanh(y) * 2.0, [x], tf.float64)


def swish(x: Any) -> Any:
    return tf.nn.swish(x) + clipped(x)


def lists(x: Any) -> Any:
    parts = tf.unstack(tf.concat([x, tf.tanh(x)], 0))
    left, right = tf.split(x, 2, 1)
    return tf.stack([*parts, tf.reshape(left * right, [-1])])


def strings(x: Any) -> Any:
    joined = tf.strings.join([tf.as_string(x), tf.constant("0")])
    return tf.strings.to_number(joined, tf.float64) * x


def sparse(x: Any) -> Any:
    matrix = tf.sparse.from_dense(tf.stop_gradient(x))
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1]), [1, 3])
    return tf.sparse.sparse_dense_matmul(matrix, x) + tf.reduce_sum(ragged, 1)


PROGRAMS = (
    calls, loop, branches, nested_control_flow, early_exit, arrays, mapped, cases, recomputed,
    of_python, swish, lists, strings, sparse,
)  # fmt: skip


def placed(program: Callable[[Any], Any], placement: str) -> Callable[[Any], Any]:
    """The program as a function of value and gradient, with the tape in or around it."""
    if placement == "inside":
        return tf.function(differentiated(tf.function(program)))
    return differentiated(tf.function(program))
