"""Counts of an unmodified ResNet-50 of ``keras.applications``, per execution, in each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from tests.tensorflow.support import Counter, Watcher, assert_same_bits, tf1

SHAPE = (64, 64, 3)
CONVOLUTIONS = 53
TYPES = ("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput")


def resnet() -> Any:
    """A ResNet-50 with random weights and ten classes."""
    return keras.applications.ResNet50(weights=None, input_shape=SHAPE, classes=10)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that the functions and the eager mode share."""
    return resnet()


def images() -> Any:
    return np.random.default_rng(0).standard_normal((1, *SHAPE)).astype(np.float32)


def counted(run: Callable[[], Any], times: int = 1) -> tuple[int, int, int]:
    """Executions of convolutions, of their weights' gradients, of their inputs' gradients."""
    tool = Counter(TYPES)
    with amanda.apply(tool):
        for _ in range(times):
            run()
    _, filters, inputs = TYPES
    assert set(tool.forward) <= {"Conv2D"}
    return tool.forward["Conv2D"], tool.backward[filters], tool.backward[inputs]


def differentiated(model: Any, wanted: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that gives the gradients of what is wanted of (model, input)."""

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, wanted(x))

    return run


@pytest.mark.parametrize("placement", ["eager", "function"])
def test_forward(model: Any, placement: str) -> None:
    """53 convolutions at each execution."""
    function = tf.function(model) if placement == "function" else model
    x = tf.constant(images())
    assert counted(lambda: function(x), times=2) == (2 * CONVOLUTIONS, 0, 0)


@pytest.mark.parametrize("placement", ["eager", "tape inside", "tape outside"])
def test_gradients_of_the_weights(model: Any, placement: str) -> None:
    """53 gradients of weights, in all modes; that of the input is not needed."""
    x = tf.constant(images())
    function = tf.function(model) if placement == "tape outside" else model

    def weights(x: Any) -> Any:
        return model.trainable_variables

    run = differentiated(function, weights)
    run = tf.function(run) if placement == "tape inside" else run
    forward, filters, inputs = counted(lambda: run(x))
    assert (forward, filters) == (CONVOLUTIONS, CONVOLUTIONS)
    assert inputs in (CONVOLUTIONS - 1, CONVOLUTIONS)


@pytest.mark.slow
def test_watching(model: Any) -> None:
    """Every gradient of a function that is watched is bit-identical."""
    x = tf.constant(images())

    @tf.function
    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=False) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    expected = [tensor.numpy() for tensor in tf.nest.flatten(run(x))]
    tool = Watcher()
    with amanda.apply(tool):
        actual = [tensor.numpy() for tensor in tf.nest.flatten(run(x))]
    assert tool.seen > 1000
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(("placement", "filters"), [("eager", CONVOLUTIONS), ("function", 0)])
def test_gradients_of_the_input(model: Any, placement: str, filters: int) -> None:
    """A graph leaves out the gradients of weights that nobody wants; eager mode cannot."""
    x = tf.constant(images())
    run = differentiated(model, lambda x: x)
    run = tf.function(run) if placement == "function" else run
    assert counted(lambda: run(x)) == (CONVOLUTIONS, filters, CONVOLUTIONS)


@pytest.fixture(scope="module")
def session_model() -> dict[str, Any]:
    """The model in a graph, with its gradients and a training step."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, (1, *SHAPE))
        loss = tf.reduce_sum(resnet()(x, training=False))
        variables = tf1.trainable_variables()
        fetches = {
            "forward": loss,
            "input": tf.gradients(loss, x),
            "weights": tf1.train.GradientDescentOptimizer(0.01).minimize(loss, None, variables),
        }
        initialize = tf1.global_variables_initializer()
    session = tf1.Session(graph=graph)
    session.run(initialize)
    return {name: lambda f=f: session.run(f, {x: images()}) for name, f in fetches.items()}


@pytest.mark.parametrize(
    ("fetch", "expected"),
    [
        ("forward", (CONVOLUTIONS, 0, 0)),
        ("weights", (CONVOLUTIONS, CONVOLUTIONS, CONVOLUTIONS)),
        ("input", (CONVOLUTIONS, 0, CONVOLUTIONS)),
    ],
)
def test_session(session_model: Any, fetch: str, expected: tuple[int, int, int]) -> None:
    """A session runs what is fetched, and what is counted is what it runs."""
    forward, filters, inputs = counted(session_model[fetch])
    assert (forward, filters) == expected[:2]
    # Grappler leaves out the gradient of the images unless a routine wants to see it.
    assert inputs in (expected[2], expected[2] - (fetch == "weights"))
