"""``diff`` between keras.applications' ResNet-50 and the same variant in PyTorch, whole."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import amanda
from amanda_tools.diff import DiffTool

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of units."""


def conv(entering: int, leaving: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(entering, leaving, kernel, stride, kernel // 2)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1.001e-5)


class Unit(nn.Module):
    """A bottleneck of the first variant: its first convolution strides, and all have biases."""

    def __init__(self, entering: int, width: int, stride: int, *, projects: bool) -> None:
        super().__init__()
        self.project: nn.Module = nn.Identity()
        if projects:
            last = 4 * width
            self.project = nn.Sequential(conv(entering, last, 1, stride), norm(last))
        self.conv1, self.norm1 = conv(entering, width, 1, stride), norm(width)
        self.conv2, self.norm2 = conv(width, width, 3), norm(width)
        self.conv3, self.norm3 = conv(width, 4 * width, 1), norm(4 * width)
        self.alpha = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self.project(x) if isinstance(self.project, nn.Sequential) else x
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(torch.add(shortcut, self.norm3(self.conv3(y)), alpha=self.alpha))


class ResNet50(nn.Module):
    """The network; it pads by hand, as Keras does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2), norm(64)
        units, entering = [], 64
        for stage, (width, depth) in enumerate(STAGES):
            for k in range(depth):
                stride = 2 if stage and not k else 1
                units.append(Unit(entering, width, stride, projects=not k))
                entering = 4 * width
        self.units, self.head = nn.Sequential(*units), nn.Linear(entering, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(nn.functional.pad(x, (3, 3, 3, 3)))))
        x = nn.functional.max_pool2d(nn.functional.pad(x, (1, 1, 1, 1)), 3, 2)
        return self.head(self.units(x).mean((2, 3))).softmax(-1)


def layers(net: ResNet50) -> Iterator[tuple[nn.Module, str]]:
    """Modules with parameters, and the names of Keras' layers."""
    yield from ((net.conv, "conv1_conv"), (net.norm, "conv1_bn"), (net.head, "predictions"))
    units = iter(net.units)
    for stage, (_, depth) in enumerate(STAGES, 2):
        for k in range(1, depth + 1):
            unit, name = next(units), f"conv{stage}_block{k}"
            found = [unit.conv1, unit.norm1, unit.conv2, unit.norm2, unit.conv3, unit.norm3]
            found += unit.project.children()
            kinds = [f"{name}_{n % 4}_{kind}" for n in (1, 2, 3, 4) for kind in ("conv", "bn")]
            yield from zip(found, kinds, strict=False)


def same_weights(net: ResNet50, model: Any) -> None:
    """Keras' weights, with biases and statistics that are not trivial, in both."""
    random = np.random.default_rng(0)

    def small(size: int, low: float = -0.2, high: float = 0.2) -> Any:
        return random.uniform(low, high, size).astype("f")

    for module, name in layers(net):
        layer = model.get_layer(name)
        if isinstance(module, nn.BatchNorm2d):
            n = module.num_features
            weights = [small(n, 0.5, 1.5), small(n), small(n), small(n, 0.5, 1.5)]
            layer.set_weights(weights)
            state = [*module.parameters(), module.running_mean, module.running_var]
        else:
            kernel = layer.get_weights()[0]
            weights = [kernel, small(kernel.shape[-1])]
            layer.set_weights(weights)
            weights[0] = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
            state = list(module.parameters())
        for tensor, value in zip(state, weights, strict=True):
            assert tensor is not None
            tensor.data.copy_(torch.from_numpy(value.copy()))


def recorded(run: Callable[[], Any], **options: Any) -> DiffTool:
    tool = DiffTool(tensors="activations", **options)
    with amanda.apply(tool), torch.no_grad():
        run()
    return tool


@pytest.fixture(scope="module")
def port() -> tuple[ResNet50, Any, torch.Tensor]:
    """The network, Keras' one with the same weights, and an image."""
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))
    model.compile()
    net = ResNet50().eval()
    same_weights(net, model)
    return net, model, torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


LIKE = {
    ("conv2d", "bias_add"): 53, ("batch_norm", "add"): 53, ("relu", "relu"): 49, ("add", "add"): 16,
    ("pad", "pad"): 2, ("max_pool2d", "max_pool2d"): 1, ("mean", "mean"): 1,
    ("linear", "bias_add"): 1, ("softmax", "softmax"): 1,
}  # fmt: skip
"""All of PyTorch's operators, and those at the end of what Keras computes for them."""


@pytest.mark.parametrize("mode", ["eager", "predict"])
def test_the_whole_network_against_its_port(mode: str, port: Any) -> None:
    """All operators agree, whatever either side composes."""
    net, model, image = port
    data = tf.constant(image.permute(0, 2, 3, 1).numpy())
    theirs = recorded(lambda: model(data) if mode == "eager" else model.predict(data, verbose=0))
    found = recorded(lambda: net(image), reference=theirs)
    assert found.summary()["first"] is None
    assert found.summary()["only_here"] == []
    assert Counter((p.record.type, p.reference.type) for p in found.pairs()) == LIKE
    assert all(pair.relative < 1e-5 for pair in found.pairs())


@pytest.mark.parametrize(
    ("op", "where", "layer"),
    [("add", "", "add"), ("batch_norm", ".norm3", "3_bn")],
)
def test_a_changed_operator_is_the_first_that_parts(
    op: str, where: str, layer: str, port: Any
) -> None:
    """Against Keras' network."""
    net, model, image = port
    theirs = recorded(lambda: model(tf.constant(image.permute(0, 2, 3, 1).numpy())))
    changed = copy.deepcopy(net)
    unit: Any = changed.units[3]
    with torch.no_grad():
        if where:
            unit.get_submodule(where[1:]).weight.view(-1)[0] += 0.5
        else:
            unit.alpha = 1.01
    first = recorded(lambda: changed(image), reference=theirs).summary()["first"]
    assert (first["type"], first["id"]) == (op, f"ResNet50.units.3{where}/{op}:0")
    assert f"/conv3_block1_{layer}" in first["reference"]


def test_the_port_against_a_changed_network(port: Any) -> None:
    """Of two branches it is named which one differs; from Keras' side it is its own operator."""
    net, model, image = port
    changed = copy.deepcopy(net)
    unit: Any = changed.units[3]
    with torch.no_grad():
        unit.project[0].weight.view(-1)[0] += 0.5
    data = tf.constant(image.permute(0, 2, 3, 1).numpy())
    reference = recorded(lambda: changed(image))
    tool = recorded(lambda: model(data), reference=reference)
    first = tool.summary()["first"]
    assert first["id"] == "resnet50/conv3_block1_0_conv/BiasAdd:0"
    assert first["reference"] == "ResNet50.units.3.project.0/conv2d:0"
    different = [pair.record.type for pair in tool.pairs() if not pair.agrees]
    assert different[:2] == ["bias_add", "add"]
