"""``summary`` of models of Keras, beside Keras' own figures."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import amanda
from tests.tools import keras_transformer
from tests.tools.keras_transformer import TOKENS
from tests.tutorial.documents import ROOT


def test_models_of_keras_in_tensorflow() -> None:
    """Eager, in a graph, and by the function: shapes, parameters and operations are right."""
    keras_transformer.main()


def test_models_of_keras_in_pytorch() -> None:
    """The same on the other backend."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.keras_transformer"],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_keras_prints_is_in_the_rows() -> None:
    """``Model.summary()``, line by line: layers, their shapes and their parameters."""
    import keras

    layers = keras.layers
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same", name="conv")(inputs)
    x = layers.Activation("relu", name="relu")(layers.BatchNormalization(name="norm")(x))
    x = layers.SeparableConv2D(6, 3, name="separable")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    network = keras.Model(inputs, layers.Dense(3, name="head")(x), name="cnn")
    for model, x in ((network, np.ones((2, 16, 16, 3))), (keras_transformer.build(), TOKENS)):
        printed = io.StringIO()
        model.summary(print_fn=functools.partial(print, file=printed))
        cells = [re.split("[|│]", line) for line in printed.getvalue().splitlines()]
        lines = [[cell.strip() for cell in line[1:4]] for line in cells if len(line) > 4]
        rows = {row["path"]: row for row in amanda.summary(model, x).modules}
        assert len(lines) == len(model.layers)
        for label, shape, parameters in lines:
            row = rows[f"{model.name}/{label.split(' ')[0]}"]
            assert f"({row['type']})" in label
            assert str((None, *row["output"][1:])) == shape
            assert f"{row['parameters']:,}" == parameters


def test_a_layer_that_is_not_built_calls_its_parts_once() -> None:
    """Keras calls them to learn their shapes, which is no part of the pass."""
    tool = amanda.tools.load("summary")()
    with amanda.apply(tool):
        keras_transformer.Block(8, name="block")(np.ones((4, 6, 8), "float32"))
    rows = {row["path"]: row for row in tool.modules()}
    assert {row["calls"] for row in rows.values()} == {1}
    assert rows["block"]["parameters"] == 4 * (8 * 8 + 8) + 16 + 2 * 8 * 32 + 40


def test_a_call_that_raises_is_no_pass() -> None:
    """And leaves nothing behind."""
    import keras

    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    tool = amanda.tools.load("summary")()
    with amanda.apply(tool):
        with pytest.raises(ValueError, match="expected axis"):
            layer(np.ones((2, 5), "float32"))
        layer(np.ones((2, 4), "float32"))
    assert [row["output"] for row in tool.modules()] == [[2, 3]]
