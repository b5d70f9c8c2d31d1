"""``memory`` with TensorFlow and Keras: against numbers by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from amanda_tools.memory import MemoryTool
from tests.running import applied

BATCH, IN, HIDDEN, OUT = 500, 16, 64, 4
PARAMETERS = 4 * ((IN + 1) * HIDDEN + (HIDDEN + 1) * OUT)


def mlp() -> Any:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((IN,)), dense(HIDDEN, activation="tanh"), dense(OUT)])


def test_kinds_of_a_keras_model() -> None:
    """Parameters and the state of the optimizer are its variables, and buffers that tensors share
    count once."""
    model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)

    def run() -> None:
        for _ in range(2):
            x = tf.random.uniform((BATCH, IN))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.reshape(model(x), (-1,))))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            del tape, loss, gradients, x

    summary = applied(MemoryTool(), run).summary()
    kinds = summary["by_kind"]
    assert sum(kinds.values()) == summary["peak_bytes"]
    layer = 4 * BATCH * HIDDEN
    assert kinds["parameters"] == PARAMETERS
    # Momentum, the count of iterations and the learning rate.
    assert kinds["optimizer state"] == PARAMETERS + 8 + 4
    # Of the second layer.
    assert kinds["gradients"] == 4 * (HIDDEN + 1) * OUT
    assert kinds["other"] == 4 * BATCH * IN
    # The tape has let go of the output; the loss is there.
    assert kinds["activations"] == layer + 4
    assert 2 * layer <= kinds["temporaries"] <= 2 * layer + 16
    assert (summary["graph_bytes"], summary["unfinished"]) == (0, None)


def test_a_graph_has_an_upper_bound() -> None:
    """In a function variables are known, and the results of all operators are a bound."""
    model = mlp()
    model.compile("adam", "mse")
    x, y = np.random.rand(64, IN), np.random.rand(64, OUT)
    tool = applied(MemoryTool(), lambda: model.fit(x, y, batch_size=32, verbose=0))
    summary = tool.summary()
    assert summary["by_kind"]["parameters"] == PARAMETERS
    assert summary["by_kind"]["optimizer state"] == 2 * PARAMETERS + 8 + 4
    assert summary["graph_bytes"] > 4 * 32 * HIDDEN * 2


def test_out_of_memory() -> None:
    """The operator that did not end is named."""

    def run() -> None:
        x = tf.ones((1, 4))
        with pytest.raises(tf.errors.ResourceExhaustedError):
            tf.zeros((1 << 20, 1 << 22)) + x

    found = applied(MemoryTool(), run).summary()["unfinished"]
    assert (found["id"], found["bytes"]) == ("/Fill:1", 16)
