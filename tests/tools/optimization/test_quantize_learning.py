"""``quantize`` with ranges that the tool trains itself, in all modes of TensorFlow.

The reference has LSQ written into its source, with its gradients spelled out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CapabilityError
from amanda_tools.quantize import QuantizeTool
from tests.tools.optimization.test_prune_tensorflow import images, net, weights

v1 = tf.compat.v1

RATE = 0.01
STEPS = 5
BITS = 4  # of more bits some number would be at a tie, and the last bit of a sum decide on it
TOP = 2 ** (BITS - 1) - 1
Array = Any


def batches() -> list[Array]:
    random = np.random.default_rng(2)
    noise = random.normal(size=(STEPS, 5, 9, 9, 4)).astype(np.float32)
    return list(images().numpy() + 0.1 * noise)


def loss_of(y: Any) -> Any:
    return tf.reduce_mean(tf.square(y - 1.0))


# -- the reference ---------------------------------------------------------------


def learned_step(x: Any, step: Any, bounds: tuple[int, int], count: int) -> Any:
    """LSQ, equations 1 to 5 of the paper (Esser et al., ICLR 2020)."""
    low, high = bounds

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def rounded(x: Any, step: Any) -> Any:
        ratio = x / step

        def gradient(up: Any) -> Any:
            inside = tf.cast((ratio > low) & (ratio < high), x.dtype)
            at_bound = tf.clip_by_value(ratio, low, high)
            of_step = up * (inside * (tf.round(ratio) - ratio) + (1 - inside) * at_bound)
            axes = list(range(len(x.shape) - (1 if step.shape[-1] > 1 else 0)))
            total = tf.reshape(tf.reduce_sum(of_step, axes), [-1])
            return up * inside, total / math.sqrt(count * high)

        return tf.round(tf.clip_by_value(ratio, low, high)) * step, gradient

    return rounded(x, step)


class ByHand:
    """The net with quantization in its source, and its training. The first step is exact."""

    def __init__(self) -> None:
        self.weights = weights()
        self.steps: dict[str, Any] = {}
        self.bounds: dict[str, tuple[int, int]] = {}

    def activation(self, x: Any, name: str) -> Any:
        if name not in self.steps:
            value = x.numpy()
            self.bounds[name] = (-TOP, TOP) if value.min() < 0 else (0, 2 * TOP + 1)
            begin = 2 * np.abs(value).mean(dtype=np.float64) / math.sqrt(self.bounds[name][1])
            self.steps[name] = tf.Variable([np.float32(begin)])
            return x
        return learned_step(x, self.steps[name], self.bounds[name], math.prod(x.shape[1:]))

    def weight(self, name: str) -> Any:
        value, key = self.weights[name], f"{name} weight"
        if key not in self.steps:
            rows = np.abs(value.numpy()).reshape(-1, value.shape[-1])
            self.steps[key] = tf.Variable(
                np.float32(2 * rows.mean(0, dtype=np.float64) / math.sqrt(TOP))
            )
            return value
        count = math.prod(value.shape[:-1])
        return learned_step(value, self.steps[key], (-TOP, TOP), count)

    def loss(self, x: Any) -> Any:
        h = tf.nn.conv2d(self.activation(x, "x"), self.weight("conv"), 1, "SAME")
        h = self.activation(tf.nn.relu(h), "h")
        h = tf.nn.relu(tf.nn.conv2d(h, self.weight("strided"), 2, "VALID"))
        h = self.activation(tf.reduce_mean(h, [1, 2]), "pooled")
        return loss_of(tf.matmul(h, self.weight("dense")))

    def step(self, x: Any) -> float:
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        sources = [*self.weights.values(), *self.steps.values()]
        for variable, gradient in zip(sources, tape.gradient(loss, sources), strict=True):
            if gradient is not None:
                variable.assign_sub(RATE * gradient)
        return float(loss)


# -- the modes -------------------------------------------------------------------

Trained = tuple[list[float], list[Array]]
"""The losses of the steps, and the weights after them."""


def descend(w: dict[str, Any], gradients: Sequence[Any]) -> None:
    for variable, gradient in zip(w.values(), gradients, strict=True):
        variable.assign_sub(RATE * gradient)


def eager(data: Sequence[Array]) -> Trained:
    return _taped(data, lambda function: function)


def tape_inside(data: Sequence[Array]) -> Trained:
    return _taped(data, tf.function)


def _taped(data: Sequence[Array], function: Callable[..., Any]) -> Trained:
    w = weights()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(net(x, w))
        descend(w, tape.gradient(loss, list(w.values())))
        return loss

    step = function(step)
    losses = []
    for x in data:
        losses.append(float(step(tf.constant(x))))
        amanda.new_iteration()
    return losses, [value.numpy() for value in w.values()]


def tape_outside(data: Sequence[Array]) -> Trained:
    w = weights()
    forward = tf.function(lambda x: loss_of(net(x, w)))
    losses = []
    for x in data:
        with tf.GradientTape() as tape:
            loss = forward(tf.constant(x))
        descend(w, tape.gradient(loss, list(w.values())))
        losses.append(float(loss))
    return losses, [value.numpy() for value in w.values()]


def session(data: Sequence[Array]) -> Trained:
    given = [value.numpy() for value in weights().values()]
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (5, 9, 9, 4))
        names = ("conv", "strided", "dense")
        w = {
            name: v1.get_variable(name, initializer=value, use_resource=True)
            for name, value in zip(names, given, strict=True)
        }
        loss = loss_of(net(x, w))
        train = v1.train.GradientDescentOptimizer(RATE).minimize(loss)
        start = v1.global_variables_initializer()
    with v1.Session(graph=graph) as running:
        running.run(start)
        losses = [float(running.run((loss, train), {x: batch})[0]) for batch in data]
        return losses, running.run(list(w.values()))


def network() -> Any:
    """The net of Keras' layers."""
    keras = tf.keras
    conv, dense = keras.layers.Conv2D, keras.layers.Dense
    model = keras.Sequential(
        [
            keras.layers.Input((9, 9, 4)),
            conv(8, 3, padding="same", use_bias=False, activation="relu"),
            conv(8, 3, strides=2, use_bias=False, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            dense(6, use_bias=False),
        ]
    )
    model.set_weights([value.numpy() for value in weights().values()])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def fit(data: Sequence[Array]) -> Trained:
    model = network()
    losses: list[float] = []
    end = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(logs["loss"])
    )
    x = np.concatenate(data)
    y = np.ones((len(x), 6), np.float32)
    model.fit(x, y, batch_size=5, shuffle=False, verbose=0, callbacks=[end])
    # Keras shows the mean of the losses so far.
    sums = np.array(losses) * np.arange(1, len(data) + 1)
    return list(np.diff(sums, prepend=0)), model.get_weights()


MODES = {m.__name__: m for m in (eager, tape_inside, tape_outside, session, fit)}


@pytest.mark.parametrize("mode", MODES)
def test_training_is_that_of_a_model_changed_by_hand(mode: str) -> None:
    """Losses, weights and steps, in each mode; the loss goes down."""
    data, twin = batches(), ByHand()
    tool = QuantizeTool(method="qat", learning_rate=RATE, weight_bits=BITS, activation_bits=BITS)
    with amanda.apply(tool):
        losses, found = MODES[mode](data)
    expected = [twin.step(tf.constant(x)) for x in data]
    assert np.allclose(losses, expected, atol=1e-6)
    assert losses[-1] < losses[0]
    for a, b in zip(found, twin.weights.values(), strict=True):
        assert np.allclose(a, b.numpy(), atol=1e-6)
    assert len(tool.parameters()) == 6
    for a, b in zip(tool.parameters(), twin.steps.values(), strict=True):
        assert np.allclose(a.numpy(), b.numpy(), atol=1e-6)


def test_a_validation_rounds_as_the_training_has_learned() -> None:
    """Keras evaluates with a function of its own: its operators are the same to the tool."""
    data, twin = batches(), ByHand()
    tool = QuantizeTool(method="qat", learning_rate=RATE, weight_bits=BITS, activation_bits=BITS)
    x, y = np.concatenate(data), np.ones((5 * STEPS, 6), np.float32)
    with amanda.apply(tool):
        history = network().fit(
            x, y, batch_size=5, shuffle=False, verbose=0, validation_data=(data[0], y[:5])
        )
    for batch in data:
        twin.step(tf.constant(batch))
    expected = float(twin.loss(tf.constant(data[0])))
    assert history.history["val_loss"][0] == pytest.approx(expected, abs=1e-6)
    assert len(tool.quantizers) == 3
    assert len(tool.parameters()) == 6


def test_without_a_rate_graphs_are_refused() -> None:
    """No optimizer of the program could be given what the tool learns."""
    with (
        amanda.apply(QuantizeTool(method="qat")),
        pytest.raises(CapabilityError, match=r"quantize: op .*Conv2D.* learning_rate="),
    ):
        tape_inside(batches()[:1])
