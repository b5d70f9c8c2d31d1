"""The samples of a step of Keras: what a model is given where its layers run at once."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import amanda
from amanda_tools.flops import FlopsTool
from tests.tools import keras_samples
from tests.tools.keras_process import run_on_pytorch
from tests.tools.keras_samples import BATCH, MODELS, WAYS, batches, check, numbers


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_of_the_program_has_the_samples_of_its_batches(name: str) -> None:
    """Training by a tape, with the samples and tokens that the model is called with."""

    def train(net: Any, x: Any, y: Any) -> None:
        optimizer = keras.optimizers.SGD(0.1)
        for one, wanted in batches(x, y):
            with tf.GradientTape() as tape:
                given = tf.nest.map_structure(tf.constant, one)
                loss = tf.reduce_mean((net(given) - wanted) ** 2)
            weights = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    check(name, train, 2 * BATCH)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_leaves_samples_out(way: str) -> None:
    """Its model is called when the graph is built; the option gives the samples of a step."""
    build, data = MODELS["dense"]
    for given in 0, BATCH:
        net, tool = build(), FlopsTool(samples=given)
        net.compile("sgd", "mse", jit_compile=False)
        with amanda.apply(tool):
            WAYS[way](net, data(2 * BATCH), numbers(2 * BATCH, 2))
        summary = tool.result()["summary"]
        assert summary["batch"] is None
        if given:
            assert summary["per_sample"]["flops"] == summary["per_step"]["flops"] / BATCH
        else:
            assert summary["per_sample"] is None
            assert "samples" not in summary["per_step"]


def test_samples_of_keras_on_pytorch() -> None:
    """Its layers run at once, in all ways of Keras."""
    run_on_pytorch("-m", keras_samples.__name__)
