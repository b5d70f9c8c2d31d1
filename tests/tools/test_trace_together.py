"""``trace`` beside each other tool: the edges of the program, as without that tool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch  # noqa: F401 - without it remat refuses a program
from tensorflow import keras

import amanda
from amanda.cli.run import create_tools
from amanda_tools.plugin import amanda_register_tools
from amanda_tools.trace import TraceTool

tf1 = tf.compat.v1
OTHERS = [*sorted(set(amanda_register_tools()) - {"trace", "steer"}), "steer:at=*,how=scale"]
TAKE_TENSORS = ["inject", "nan", "stats", "summary"]
"""Tools whose routines take tensors, and one that changes them."""

Program = Callable[[], Any]


def function() -> Program:
    """A function that trains a weight twice."""
    weight = tf.Variable(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(tf.nn.relu(x @ weight) @ weight + 1.0)
            loss = tf.reduce_sum(y * y)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return lambda: [step(tf.ones((2, 8))) for _ in range(2)]


def session() -> Program:
    """A session that trains a weight."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, (None, 8))
        weight = tf1.get_variable("w", initializer=tf.ones((8, 8)), use_resource=True)
        y = tf.nn.relu(x @ weight)
        loss = tf.reduce_sum(y * y)
        train = tf1.train.GradientDescentOptimizer(0.01).minimize(loss)
        initialize = tf1.global_variables_initializer()

    def run() -> None:
        with tf1.Session(graph=graph) as opened:
            opened.run(initialize)
            opened.run([train, loss], {x: np.ones((2, 8), np.float32)})

    return run


def fit() -> Program:
    """A model with convolution and normalisation, trained by Keras."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, activation="relu", name="conv"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(3, name="dense"),
    ]
    model = keras.Sequential(layers, name="net")
    model.compile(keras.optimizers.SGD(0.01, name="sgd"), "mse")
    x, y = np.ones((4, 8, 8, 3), np.float32), np.zeros((4, 3), np.float32)
    return lambda: model.fit(x, y, batch_size=2, verbose=0)


def eager() -> Program:
    """Operators that run at once."""
    weight = tf.Variable(tf.ones((8, 8)))

    def run() -> Any:
        y = tf.nn.relu(tf.ones((2, 8)) @ weight)
        return tf.reduce_sum(y * y)

    return run


def edges(program: Program, *names: str, last: bool = True) -> list[Any]:
    """The edges that ``trace`` records beside tools of these names."""
    trace = TraceTool()
    others = [named.tool for named in create_tools(names)]
    with amanda.apply(*others, trace) if last else amanda.apply(trace, *others):
        program()
    return trace.graph.edges


@functools.cache
def edges_alone(program: Callable[[], Program]) -> list[Any]:
    """The edges without another tool."""
    return edges(program())


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_edges_of_a_function_are_those_of_trace_alone(name: str) -> None:
    """The edges do not depend on the tool beside ``trace``, nor on their order."""
    alone = edges_alone(function)
    assert len(alone) > 8
    assert edges(function(), name) == alone
    assert edges(function(), name, last=False) == alone


@pytest.mark.parametrize("program", [session, fit, eager])
@pytest.mark.parametrize("name", TAKE_TENSORS)
def test_edges_in_other_modes_are_those_of_trace_alone(
    name: str, program: Callable[[], Program]
) -> None:
    """Nor do they in a session, in ``fit`` and in eager execution."""
    alone = edges_alone(program)
    assert len(alone) > 3
    assert edges(program(), name) == alone
