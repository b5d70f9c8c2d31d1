"""``coverage`` on TensorFlow: what Keras layers show, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.coverage import CoverageTool

MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda run: run, "function": tf.function}


def built() -> Any:
    """A model whose layers are one operator each, and one that has two."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(4, 3, use_bias=False),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3, use_bias=False),
            layers.Dense(2),
        ]
    )
    model(tf.zeros((1, 6, 6, 1)))
    return model


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_one_operator_are_seen(mode: str) -> None:
    """Not those of several, no reading of variables, and nothing of the backward pass."""
    model, data = built(), tf.random.uniform((2, 6, 6, 1))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables), loss

    run = MODES[mode](step)
    expected = step(data)
    tool = CoverageTool()
    with amanda.apply(tool):
        found = [run(data) for _ in range(2)]
    for tensor, other in zip(tf.nest.flatten(found[0]), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(tensor, other, rtol=1e-5)
    rows = tool.op_rows()
    seen = [row for row in rows if "keras_layers" in row["seen_by"]]
    types = [row["type"] for row in seen if row["type"] != "shape"]
    assert types == ["conv2d", "relu", "reshape", "linear"]
    assert {row["module"].rpartition("/")[2].rstrip("_0123456789") for row in seen} == {
        "conv2d", "re_lu", "flatten", "dense",
    }  # fmt: skip
    assert {row["direction"] for row in seen} == {"forward"}
    figures = tool.summary()["mechanisms"]
    assert figures["amanda"]["backward"]["of_ops"] > 5
    assert figures["keras_layers"]["backward"]["share"] == 0
    assert figures["keras_layers"]["how"] == "derived"
    assert set(figures) == {"amanda", "keras_layers"}


def test_a_session() -> None:
    """Name scopes stand for layers; what is in none is in no layer."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (2, 3))
        with tf1.name_scope("first"):
            y = tf.tanh(x)
        with tf1.name_scope("second"):
            y = tf.exp(y) * 2.0
        tf.reduce_sum(y, name="total")
    tool = CoverageTool()
    with amanda.apply(tool), tf1.Session(graph=graph) as session:
        for _ in range(3):
            session.run("total:0", {"Placeholder:0": np.ones((2, 3))})
    seen = {r["id"]: r["executions"] for r in tool.op_rows() if "keras_layers" in r["seen_by"]}
    assert seen == {"graph/first/Tanh": 3}
    assert {row["type"] for row in tool.op_rows()} >= {"tanh", "exp", "mul", "sum"}
