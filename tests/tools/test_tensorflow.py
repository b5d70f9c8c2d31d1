"""The analysis tools on TensorFlow: the same tools, the same schema, the same figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn
from torch.nn import functional

from amanda_tools.dump import DumpTool
from amanda_tools.flops import FlopsTool
from amanda_tools.nan import NanTool
from tests.running import applied

MODES = {"eager": lambda run: run, "function": lambda run: tf.function(run)}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a function eagerly or as a graph."""
    return MODES[request.param]


class TorchNet(nn.Module):
    """Convolutions of all kinds, pooling and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.strided = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(x))
        x = functional.relu(self.depthwise(x))
        x = torch.tanh(self.strided(x))
        return self.head(x.mean((2, 3)))


def keras_port(net: TorchNet) -> Any:
    """The same architecture with the same weights."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same", use_bias=False, activation="relu"),
            layers.DepthwiseConv2D(3, padding="same", use_bias=False, activation="relu"),
            layers.Conv2D(16, 3, strides=2, use_bias=False, activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, use_bias=False),
        ]
    )
    model(tf.zeros((1, 9, 9, 3)))

    def weights(parameter: torch.Tensor, *axes: int) -> list[Any]:
        return [parameter.detach().numpy().transpose(axes)]

    model.layers[0].set_weights(weights(net.first.weight, 2, 3, 1, 0))
    model.layers[1].set_weights(weights(net.depthwise.weight, 2, 3, 0, 1))
    model.layers[2].set_weights(weights(net.strided.weight, 2, 3, 1, 0))
    model.layers[4].set_weights(weights(net.head.weight, 1, 0))
    return model


@pytest.fixture
def nets() -> tuple[TorchNet, Any, Any]:
    """A PyTorch model, its port, and an image in PyTorch's layout."""
    torch.manual_seed(0)
    net = TorchNet()
    return net, keras_port(net), torch.rand(2, 3, 9, 9)


def in_tensorflow(image: torch.Tensor) -> Any:
    return tf.constant(image.permute(0, 2, 3, 1).numpy())


@pytest.mark.slow
def test_resnet50_of_keras(mode: Any) -> None:
    """keras.applications' ResNet-50 (v1): 7.716 GFLOP, one image, in every mode."""
    model = tf.keras.applications.ResNet50(weights=None)
    image = tf.random.uniform((1, 224, 224, 3))
    tool = applied(FlopsTool(), mode(lambda x: model(x, training=False)), image)
    assert round(tool.summary()["flops"] / 1e9, 3) == 7.716
    assert tool.summary()["unknown_ops"] == {}


def test_one_architecture_has_equal_figures_in_both_frameworks(nets: Any, mode: Any) -> None:
    """Forward, backward and parameters, with layouts and depthwise operators of their own.

    The image's gradient is asked for too: TensorFlow's eager mode always computes it.
    """
    net, port, image = nets
    image.requires_grad_()
    theirs = applied(FlopsTool(), lambda: net(image).sum().backward()).summary()
    data = in_tensorflow(image.detach())

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(port(x))
        return tape.gradient(loss, [x, *port.trainable_variables]), loss

    ours = applied(FlopsTool(), mode(step), data).summary()
    for figure in ("flops", "flops_backward", "macs", "params"):
        assert ours[figure] == theirs[figure] > 0, figure
    assert ours["unknown_ops"] == theirs["unknown_ops"] == {}


def test_nan_names_the_operator_and_the_line() -> None:
    """In eager mode with the user's line, as on PyTorch."""

    def run() -> None:
        x = tf.constant([1.0, 2.0])
        x = x * 1e30
        x = x * 1e30  # overflows

    first = applied(NanTool(action="record"), run).summary()["first"]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    [line] = [i for i, text in enumerate(lines, 1) if text.endswith("# overflows")]
    assert (first["type"], first["kind"], first["direction"]) == ("mul", "inf", "forward")
    assert first["source"].endswith(f"test_tensorflow.py:{line}")


def test_nan_in_a_graph(mode: Any) -> None:
    """The producing operator is named in every mode, backward too."""
    tool = applied(NanTool(action="record"), mode(lambda x: tf.math.log(x) + 1), tf.zeros(3))
    assert tool.summary()["first"]["type"] == "log"

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x))
        return tape.gradient(y, x), y

    first = applied(NanTool(action="record"), mode(step), tf.zeros(3)).summary()["first"]
    assert (first["direction"], first["type"]) == ("backward", "sqrt_backward")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float8_e4m3fn"])
def test_dumps_keep_their_bits(dtype: str) -> None:
    """Also of types that numpy lacks, which are read as float32."""
    x = tf.cast(tf.constant([[1.5, -2.25], [3.0, 4.0]]), dtype)
    tool = applied(DumpTool(ops="reshape"), lambda: tf.reshape(x, (2, 2)))
    [entry] = tool.entries
    assert (entry.dtype, entry.shape) == (dtype, [2, 2])
    expected = tf.cast(x, "float32").numpy()
    assert np.array_equal(tool.load(entry).astype(np.float32), expected)
