"""The samples of a step of Keras: those of what its model is given."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import amanda
from amanda_tensorflow.graphs.run_time_routines import PythonNode
from amanda_tools.flops import FlopsTool
from tests.tools import keras_samples
from tests.tools.keras_process import run_on_pytorch
from tests.tools.keras_samples import BATCH, MODELS, WAYS, batches, check


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
@pytest.mark.parametrize("name", ["dense", "positions first", "two inputs"])
def test_a_graph_has_the_samples_of_its_model(name: str, way: str) -> None:
    """Also of the last batch, which is smaller."""
    check(name, way, 2 * BATCH + 2)


def test_a_graph_of_known_shapes_has_its_samples_without_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those that the graph tells."""
    made = []
    monkeypatch.setattr(PythonNode, "insert", lambda *args: made.append(args))
    check("dense", lambda net, x, y: tf.function(net)(tf.constant(x)), BATCH)
    assert made == []


def test_a_graph_of_two_models_leaves_samples_out() -> None:
    """The option gives the samples of a step then."""
    build, data = MODELS["dense"]
    for given in 0, BATCH:
        nets, tool = [build(), build()], FlopsTool(samples=given)
        both = tf.function(lambda x, nets=nets: [net(x) for net in nets])
        with amanda.apply(tool):
            for _ in range(2):
                both(tf.constant(data(BATCH)))
                amanda.new_iteration()
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
