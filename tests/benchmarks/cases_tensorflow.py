"""The program of TensorFlow's eager mode that is benchmarked, and the peer beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

import amanda
from tests.benchmarks.timing import Step


@contextmanager
def check_numerics() -> Iterator[None]:
    """TensorFlow's own check, of every operator that is run or created in this scope."""
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


def perceptron(layers: int, width: int, *, training: bool) -> Step:
    """A step of a perceptron in eager mode: products, biases and ReLUs of small tensors."""
    generator = np.random.default_rng(0)
    weights = [
        tf.Variable(generator.standard_normal((width, width), dtype=np.float32) / width**0.5)
        for _ in range(layers)
    ]
    biases = [tf.Variable(tf.zeros([width])) for _ in range(layers)]
    x = tf.constant(generator.standard_normal((8, width), dtype=np.float32))

    def forward() -> Any:
        y = x
        for weight, bias in zip(weights, biases, strict=True):
            y = tf.nn.relu(tf.nn.bias_add(tf.matmul(y, weight), bias))
        return y

    def train() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward())
        return tape.gradient(loss, [*weights, *biases])

    def infer() -> Any:
        y = forward()
        # Neither a model nor a backward pass tells where the step ends.
        amanda.new_iteration()
        return y

    return train if training else infer
