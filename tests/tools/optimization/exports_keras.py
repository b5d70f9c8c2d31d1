"""The models of Keras of ``python -m tests.tools.optimization.exports``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import amanda
from amanda.errors import UnsupportedProgramError
from tests.tools import keras_transformer

layers = keras.layers
MODELS = ("Keras CNN", "Keras transformer", "Keras MobileNetV2")
SUFFIXES = {".keras": ".keras", "SavedModel": "", ".tflite": ".tflite"}
APPLICATIONS = {
    "MobileNetV2": 32, "ResNet50": 32, "EfficientNetB0": 32, "DenseNet121": 32, "VGG16": 32,
    "Xception": 71, "InceptionV3": 75, "ConvNeXtTiny": 32, "MobileNetV3Small": 32,
}  # fmt: skip


def build(name: str) -> tuple[Any, Any]:
    """One of `MODELS`, or of Keras' applications, and its input."""
    keras.utils.set_random_seed(0)
    if name == "Keras transformer":
        return keras_transformer.build(), keras_transformer.TOKENS.astype("f")
    name = name.removeprefix("Keras ")
    size = APPLICATIONS.get(name, 16)
    images = np.random.default_rng(1).random((2, size, size, 3), np.float32)
    if name == "CNN":
        parts = [
            layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(),
            layers.DepthwiseConv2D(3), layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(), layers.Conv2DTranspose(4, 3), layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="gelu"), layers.Dropout(0.1), layers.Dense(3),
        ]  # fmt: skip
        return keras.Sequential([keras.Input(images.shape[1:]), *parts], name="cnn"), images
    options = {"weights": None, "input_shape": images.shape[1:], "classes": 10}
    return getattr(keras.applications, name)(**options), images


def difference(name: str, format: str) -> float:
    """The largest difference of a quantized model to the simulated one; NaN if it is refused."""
    model, inputs = build(name)
    tool = amanda.tools.load("quantize")(calibration=1)
    with amanda.apply(tool):
        model(inputs), model(inputs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = tool.export_model(model, inputs, f"{folder}/model{SUFFIXES[format]}")
        except UnsupportedProgramError:
            return float("nan")
    assert set(tool.ops) == set(found.ops)
    return float(found.difference)


def table(names: Sequence[str]) -> str:
    """The largest differences as a table of Markdown."""
    lines = [["model", *SUFFIXES], ["---"] * 4]
    for name in names:
        lines.append([name, *(f"{difference(name, format):.0e}" for format in SUFFIXES)])
        print(*lines[-1], file=sys.stderr, flush=True)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text.replace("0e+00", "0").replace(" nan ", " - ")
