"""The samples of a step, and its tokens, over the layers of Keras and the ways to run a model."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.tools import keras_samples
from tests.tools.keras_process import run_on_pytorch
from tests.tools.keras_samples import BATCH, MODELS, WAYS, batches, check


@pytest.mark.parametrize("name", MODELS)
def test_each_step_of_fit_has_the_samples_of_its_batch(name: str) -> None:
    """In graphs that know the batch size, and in those that do not."""
    check(name, "fit", 8)
    if not ("static" in name or "stateful" in name):
        check(name, "fit", 10)


@pytest.mark.parametrize("name", ["lstm, static", "two inputs", "positions first"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "fit"])
def test_each_way_of_keras_has_the_samples_of_its_batches(way: str, name: str) -> None:
    """Evaluation and inference, too."""
    check(name, way, 8)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["lstm, static", "lstm", "attention"])
def test_loops_of_the_program_have_the_samples_of_their_batches(name: str, compiled: bool) -> None:
    """Training by a tape, in a function and eagerly."""

    def train(net: Any, x: Any, y: Any) -> None:
        optimizer = keras.optimizers.SGD(0.1)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x) - y) ** 2)
            weights = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        run = tf.function(step) if compiled else step
        for one, wanted in batches(x, y):
            run(tf.constant(one), tf.constant(wanted))

    check(name, train, 2 * BATCH)


def test_a_train_step_of_the_program_has_the_samples_of_its_batches() -> None:
    """A model that trains by a method of its own."""

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def train(net: Any, x: Any, y: Any) -> None:
        own = Own(net.layers)
        own.compile("sgd", "mse", jit_compile=False)
        own.fit(x, y, BATCH, verbose=0)

    check("lstm, static", train, 8)


def test_samples_of_keras_on_pytorch() -> None:
    """The same figures on the other backend."""
    run_on_pytorch("-m", keras_samples.__name__)
