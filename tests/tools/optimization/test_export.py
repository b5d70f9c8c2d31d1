"""What ``quantize`` exports computes what it has simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F  # noqa: N812

import amanda
from amanda.errors import AmandaError
from amanda_tools.quantize import QuantizeTool
from tests.tools.optimization import test_prune_tensorflow

WEIGHTS_ONLY = {"activation_bits": 0}


class Net(nn.Module):
    """Two convolutions, and two products with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, stride=2, groups=2, bias=False)
        self.hidden = nn.Linear(6, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(F.relu(self.hidden(x.mean((2, 3)))))


def simulated(model: Any, x: Any, **options: Any) -> tuple[QuantizeTool, Any]:
    """The tool after its calibration, and the output under it."""
    tool = QuantizeTool(**options)
    with amanda.apply(tool), torch.no_grad():
        model(x)
        return tool, model(x)


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def images() -> Any:
    return torch.randn(4, 3, 9, 9)


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_integer_weights_in_torchao(
    net: Any, images: Any, bits: int, per_channel: bool, method: str
) -> None:
    """The exported model's output equals the simulation's, bit by bit."""
    options = {"method": method, "weight_bits": bits, "per_channel": per_channel}
    tool, output = simulated(net, images, **options, **WEIGHTS_ONLY)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = tool.to_torchao(net, lambda: net(images))
    with torch.no_grad():
        assert torch.equal(found.model(images), output)
        assert not torch.equal(net(images), output)
    assert found.is_complete
    assert {op.weight for op in found.ops} == {"IntxUnpackedToInt8Tensor"}
    assert found.model.head.weight.target_dtype == getattr(torch, f"int{bits}")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_groups_in_torchao_and_files(tmp_path: Path) -> None:
    """Block sizes of torchao; scales of the weight's shape in the file."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(5, 16)
    tool, output = simulated(model, x, group=8, weight_bits=4, **WEIGHTS_ONLY)
    found = tool.to_torchao(model, lambda: model(x))
    with torch.no_grad():
        assert torch.equal(found.model(x), output)
    assert found.model[0].weight.block_size == (1, 8)
    path = tool.export(tmp_path / "net.safetensors", lambda: model(x))
    with safe_open(path, "numpy") as file:
        names = ("integers", "scale")
        whole, scale = (file.get_tensor(f"Sequential.2/linear:0|1|{name}") for name in names)
    model[0].weight.data = found.model[0].weight.dequantize()
    model[2].weight.data = torch.tensor(whole * scale.repeat(8, 1))
    with torch.no_grad():
        assert torch.equal(model(x), output)


@pytest.mark.parametrize("number", ["e4m3", "e5m2"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_eight_bit_floats_in_torchao(net: Any, images: Any, number: str, per_channel: bool) -> None:
    """Products with weights: equal up to the order of sums; convolutions are said to be missing."""
    options = {"number": number, "per_channel": per_channel, "ops": "linear"}
    tool, output = simulated(net, images, **options, **WEIGHTS_ONLY)
    found = tool.to_torchao(net, lambda: net(images))
    with torch.no_grad():
        torch.testing.assert_close(found.model(images), output, rtol=1e-6, atol=1e-6)
    assert [op.weight for op in found.ops] == ["Float8Tensor"] * 2
    both, _ = simulated(net, images, number=number, **WEIGHTS_ONLY)
    reasons = [op.reason for op in both.to_torchao(net, lambda: net(images)).ops]
    assert [reason.startswith("torchao has no conv2d") for reason in reasons] == [True] * 2 + [
        False
    ] * 2


def test_learned_steps_in_torchao(net: Any, images: Any) -> None:
    """After training with learned steps: still the bits of the simulation."""
    tool = QuantizeTool(method="qat", weight_bits=4, **WEIGHTS_ONLY)
    with amanda.apply(tool):
        net(images)
        optimizer = torch.optim.SGD([*net.parameters(), *tool.parameters()], lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            net(images).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            output = net(images)
    found = tool.to_torchao(net, lambda: net(images))
    with torch.no_grad():
        assert torch.equal(found.model(images), output)


@pytest.mark.parametrize("shape", [(8, 16), (2, 5, 16)])
def test_static_activations_in_torchao(shape: tuple[int, ...]) -> None:
    """Products of integers: equal to the simulation up to the rounding of float32."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(shape)
    tool, output = simulated(model, x)
    found = tool.to_torchao(model, lambda: model(x))
    with torch.no_grad():
        torch.testing.assert_close(found.model(x), output, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(x), output, rtol=1e-5, atol=1e-5)
        other = torch.randn(shape)
        with amanda.apply(tool):
            expected = model(other)
        torch.testing.assert_close(found.model(other), expected, rtol=1e-5, atol=1e-5)
    assert [op.activation for op in found.ops] == ["static"] * 2
    assert found.is_complete


def test_what_stays_as_it_was_is_said(net: Any, images: Any) -> None:
    """Activations of convolutions and of other numbers than bytes stay exact, with a reason."""
    tool, _ = simulated(net, images)
    found = tool.to_torchao(net, lambda: net(images))
    assert [op.activation for op in found.ops] == ["", "", "static", "static"]
    assert [op.reason for op in found.ops] == ["its activation stays exact"] * 2 + [""] * 2
    assert not found.is_complete
    dynamic, _ = simulated(net, images, method="dynamic")
    ops = dynamic.to_torchao(net, lambda: net(images)).ops
    assert {op.activation for op in ops} == {""}
    assert {op.reason for op in ops} == {"its activation stays exact"}


def test_tied_weights() -> None:
    """A weight that an embedding shares stays exact there, and is refused where it cannot."""

    class Tied(nn.Module):
        def __init__(self, is_functional: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 8)
            self.head = nn.Linear(8, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.is_functional = is_functional

        def forward(self, x: Any) -> Any:
            x = self.embedding(x).tanh()
            return F.linear(x, self.embedding.weight) if self.is_functional else self.head(x)

    torch.manual_seed(0)
    x = torch.arange(7)
    model = Tied(is_functional=False)
    tool, output = simulated(model, x, **WEIGHTS_ONLY)
    with torch.no_grad():
        assert torch.equal(tool.to_torchao(model, lambda: model(x)).model(x), output)
    functional = Tied(is_functional=True)
    tool, _ = simulated(functional, x, **WEIGHTS_ONLY)
    with pytest.raises(AmandaError, match=r"Tied\.embedding/embedding:0 uses its weight in anoth"):
        tool.to_torchao(functional, lambda: functional(x))


def test_products_that_torchao_lacks() -> None:
    """A plain matrix product with a parameter cannot be exported; the error says why."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Any) -> Any:
            return torch.addmm(torch.zeros(3), x, self.weight)

    model, x = Plain(), torch.randn(2, 4)
    tool, _ = simulated(model, x, **WEIGHTS_ONLY)
    with pytest.raises(AmandaError, match="torchao has no addmm with a quantized weight"):
        tool.to_torchao(model, lambda: model(x))


def test_without_torchao(net: Any, images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing torchao is an error that says what to install."""
    tool, _ = simulated(net, images, **WEIGHTS_ONLY)

    def missing(name: str, *args: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(AmandaError, match=r"pip install 'torchao>=0.16'"):
        tool.to_torchao(net, lambda: net(images))


def test_before_the_calibration(net: Any, images: Any, tmp_path: Path) -> None:
    """What has not run cannot be exported, in any form."""
    tool = QuantizeTool(calibration=3)
    with pytest.raises(AmandaError, match="run the model under the tool"):
        tool.export(tmp_path / "a.safetensors")
    with amanda.apply(tool), torch.no_grad():
        net(images)
    with pytest.raises(AmandaError, match="is not calibrated"):
        tool.export(tmp_path / "a.safetensors")
    with pytest.raises(AmandaError, match="is not calibrated"):
        tool.to_torchao(net, lambda: net(images))


def rebuilt(path: Path) -> dict[str, Any]:
    """Op id to the weight that a file stands for, by numpy alone."""
    weights = {}
    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["amanda"])
        for op_id, quantizers in about["ops"].items():
            (weight,) = [q for q in quantizers if q["role"] == "weight"]
            part = [
                file.get_tensor(f"{op_id}|{weight['input']}|{n}")
                for n in ("integers", "scale", "zero_point")
            ]
            shape = [-1 if axis == weight["axis"] else 1 for axis in range(part[0].ndim)]
            scale, zero = part[1].reshape(shape), part[2].reshape(shape)
            weights[op_id] = (part[0] - zero).astype(np.float32) * scale
            assert weight["low"] <= part[0].min() <= part[0].max() <= weight["high"]
    return weights


@pytest.mark.parametrize("bits", [8, 4, 12])
def test_safetensors(net: Any, images: Any, bits: int, tmp_path: Path) -> None:
    """A model whose weights are rebuilt from the file computes what was simulated."""
    tool, output = simulated(net, images, weight_bits=bits, **WEIGHTS_ONLY)
    path = tool.export(tmp_path / "net.safetensors", lambda: net(images))
    weights = rebuilt(path)
    assert len(weights) == 4
    for name in ("first", "second", "hidden", "head"):
        (value,) = [v for op_id, v in weights.items() if f".{name}/" in op_id]
        getattr(net, name).weight.data = torch.tensor(value)
    with torch.no_grad():
        assert torch.equal(net(images), output)


@pytest.mark.parametrize("is_function", [False, True])
def test_safetensors_of_tensorflow(is_function: bool, tmp_path: Path) -> None:
    """A net whose weights are rebuilt from the file gives the simulation's output."""
    tf.random.set_seed(0)
    values, x = test_prune_tensorflow.weights(), test_prune_tensorflow.images()

    def run() -> Any:
        return test_prune_tensorflow.net(x, values)

    run = tf.function(run) if is_function else run
    tool = QuantizeTool(weight_bits=4, **WEIGHTS_ONLY)
    with amanda.apply(tool):
        output = run()
    found = rebuilt(tool.export(tmp_path / "net.safetensors", run))
    for variable, value in zip(values.values(), found.values(), strict=True):
        variable.assign(value)
    assert np.array_equal(run(), output)


def test_safetensors_of_activations_and_floats(net: Any, images: Any, tmp_path: Path) -> None:
    """Scales of activations are there; numbers that are not integers need no run."""
    tool, _ = simulated(net, images, number="e4m3")
    path = tool.export(tmp_path / "net.safetensors")
    with safe_open(path, "numpy") as file:
        names = set(file.keys())
        about = json.loads(file.metadata()["amanda"])
    for op_id, quantizers in about["ops"].items():
        assert {f"{op_id}|{q['input']}|scale" for q in quantizers} <= names
    assert not any(name.endswith("integers") for name in names)
    tool, _ = simulated(net, images)
    with pytest.raises(AmandaError, match="needs a run that gives them"):
        tool.export(tmp_path / "net.safetensors")
    with pytest.raises(OSError, match="cannot be written"):
        simulated(net, images, weight_bits=0)[0].export(tmp_path / "nowhere" / "net.safetensors")
