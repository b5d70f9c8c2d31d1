"""``quantize`` on PyTorch, against functions written by hand and PyTorch's own rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.quantize import QuantizeOptions, QuantizeTool
from amanda_tools.quantize.numbers import QuantGrid, fake_float, fake_quantize, integers
from tests import models
from tests.running import applied


class Net(nn.Module):
    """A convolution, a depthwise one, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.fc(self.depthwise(self.conv(x).relu()).mean((2, 3)))


def images(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return torch.randn(4, 3, 9, 9)


def rounded_weight(weight: Any, bits: int, per_channel: bool) -> Any:
    """Symmetric integers, with PyTorch's own rounding."""
    high = 2 ** (bits - 1) - 1
    if not per_channel:
        scale = (weight.abs().max() / high).item()
        return torch.fake_quantize_per_tensor_affine(weight, scale, 0, -high, high)
    scale = weight.detach().abs().flatten(1).amax(1) / high
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -high, high)


def rounded_activation(x: Any, low: float, high: float, bits: int, symmetric: bool) -> Any:
    """Integers with a zero point, or without, with PyTorch's own rounding."""
    low, high, top = min(low, 0.0), max(high, 0.0), 2 ** (bits - 1) - 1
    if symmetric:
        scale = max(-low, high) / top
        return torch.fake_quantize_per_tensor_affine(x, scale, 0, -top, top)
    scale = (high - low) / (2 * top + 1)
    zero = round(min(max(-top - 1 - low / scale, -top - 1), top))
    return torch.fake_quantize_per_tensor_affine(x, scale, zero, -top - 1, top)


def by_hand(net: Net, ranges: Any, x: Any, o: QuantizeOptions) -> Any:
    """The net with rounded weights and activations; `ranges` gives those of an activation."""

    def act(name: str, value: Any) -> Any:
        if not o.activation_bits:
            return value
        low, high = ranges(name, value)
        return rounded_activation(value, low, high, o.activation_bits, o.symmetric)

    def weight(layer: Any) -> Any:
        if not o.weight_bits:
            return layer.weight
        return rounded_weight(layer.weight, o.weight_bits, o.per_channel)

    x = F.conv2d(act("conv", x), weight(net.conv), net.conv.bias).relu()
    x = F.conv2d(act("depthwise", x), weight(net.depthwise), net.depthwise.bias, groups=8)
    return F.linear(act("fc", x.mean((2, 3))), weight(net.fc), net.fc.bias)


def observed(net: Net, x: Any) -> dict[str, tuple[float, float]]:
    """The range of the input of each layer."""
    found: dict[str, tuple[float, float]] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, name=name: found.update(
                {name: (args[0].min().item(), args[0].max().item())}
            )
        )
        for name, layer in net.named_children()
    ]
    net(x)
    for handle in handles:
        handle.remove()
    return found


CASES = [
    {},
    {"per_channel": False, "symmetric": True},
    {"weight_bits": 4, "activation_bits": 6},
    {"weight_bits": 0},
    {"activation_bits": 0, "weight_bits": 2},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_static_quantization_equals_a_model_changed_by_hand(options: dict[str, Any]) -> None:
    """Ranges come from the first batch; the second is another one."""
    net, first, second = Net(), images(1), images(2)
    tool = QuantizeTool(**options)
    with amanda.apply(tool):
        net(first)
        output = net(second)
    ranges = observed(net, first)
    expected = by_hand(net, lambda name, _: ranges[name], second, tool.options)
    assert torch.allclose(output, expected, atol=1e-6)
    assert tool.result()["summary"]["not_calibrated"] == []


def test_the_calibration_itself_runs_the_model_as_it_is() -> None:
    net, x = Net(), images()
    with torch.no_grad():
        expected = net(x)
    tool = QuantizeTool(calibration=2)
    with amanda.apply(tool), torch.no_grad():
        assert torch.equal(net(x), expected)
        assert tool.result()["summary"]["not_calibrated"]
        assert torch.equal(net(x), expected)
        assert not torch.equal(net(x), expected)


def test_the_range_is_that_of_all_calibration_batches() -> None:
    layer = nn.Linear(2, 2)
    tool = QuantizeTool(calibration=3)
    with amanda.apply(tool):
        for value in (1.0, -3.0, 2.0):
            layer(torch.tensor([[value, 0.0]]))
    row = tool.result()["ops"][0]["quantizers"][0]
    assert row["scale"] == pytest.approx(5 / 255)
    assert row["zero_point"] == round(-128 + 3 * 255 / 5)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_dynamic_quantization_equals_a_model_changed_by_hand(options: dict[str, Any]) -> None:
    net, x = Net(), images()
    tool = QuantizeTool(method="dynamic", **options)
    with amanda.apply(tool):
        output = net(x)
    expected = by_hand(net, lambda _, v: (v.min().item(), v.max().item()), x, tool.options)
    assert torch.allclose(output, expected, atol=1e-6)


@pytest.mark.parametrize("number", ["e4m3", "e5m2"])
@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_floating_point_numbers_of_8_bits(method: str, number: str) -> None:
    layer, x = nn.Linear(6, 5), torch.randn(7, 6)
    dtype = torch.float8_e4m3fn if number == "e4m3" else torch.float8_e5m2
    tool = QuantizeTool(method=method, number=number)
    with amanda.apply(tool):
        layer(x)
        output = layer(x)
    largest = torch.finfo(dtype).max
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / largest
    weight = (layer.weight / scale).clamp(-largest, largest).to(dtype).float() * scale
    step = x.abs().max() / largest
    rounded = (x / step).clamp(-largest, largest).to(dtype).float() * step
    assert torch.allclose(output, F.linear(rounded, weight, layer.bias), atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_the_rounding_is_pytorchs_bit_by_bit(bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(10_000) * 3
    grid = QuantGrid.of("int", bits, symmetric=False)
    scale, zero = grid.fitted(x.min().numpy(), x.max().numpy())
    found = fake_quantize(x, torch.tensor(scale), torch.tensor(zero), grid.low, grid.high)
    expected = torch.fake_quantize_per_tensor_affine(
        x, float(scale), int(zero), int(grid.low), int(grid.high)
    )
    assert torch.equal(found, expected)
    whole = integers(x.numpy(), scale, zero, grid)
    assert np.array_equal((whole - zero) * scale, expected.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_rounded_in_float32_and_stay(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(8, 4).to(dtype), torch.rand(3, 8).to(dtype)
    with amanda.apply(QuantizeTool()):
        layer(x)
        assert layer(x).dtype == dtype
    wide = fake_quantize(x.float(), torch.tensor(0.01), torch.tensor(0.0), -127, 127)
    assert torch.equal(
        fake_quantize(x, torch.tensor(0.01), torch.tensor(0.0), -127, 127).float(),
        wide.to(dtype).float(),
    )


def test_zeros_stay_zeros() -> None:
    """Zero is a number of every grid, and a tensor of zeros has a scale."""
    for number, bits in (("int", 4), ("int", 8), ("e4m3", 8)):
        grid = QuantGrid.of(number, bits, symmetric=number != "int")
        for low, high in ((-3.3, 7.1), (0.0, 0.0), (2.0, 5.0)):
            scale, zero = (torch.tensor(v) for v in grid.fitted(np.array(low), np.array(high)))
            x = torch.zeros(2)
            found = (
                fake_quantize(x, scale, zero, grid.low, grid.high)
                if number == "int"
                else fake_float(x, scale, number)
            )
            assert torch.equal(found, x)


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(12, 5), (3, 12)), (nn.Conv2d(8, 3, 2), (1, 8, 4, 4))], ids=str
)
def test_each_group_of_inputs_has_its_scale(layer: Any, shape: Any) -> None:
    """At each place of the other axes; a width that the group does not divide is refused."""
    tool, x = QuantizeTool(group=4, weight_bits=4, activation_bits=0), torch.randn(shape)
    with amanda.apply(tool):
        output = layer(x)
    blocks = layer.weight.detach().unflatten(1, (-1, 4)).movedim(2, -1)
    scale = tool.result()["ops"][0]["quantizers"][0]["scale"]
    assert np.allclose(scale, blocks.abs().amax(-1) / 7)
    for place in np.ndindex(*blocks.shape[:-1]):
        blocks[place] = rounded_weight(blocks[place], 4, per_channel=False)
    layer.weight.data = blocks.movedim(-1, 2).flatten(1, 2)
    assert torch.allclose(layer(x), output, atol=1e-6)
    other = applied(QuantizeTool(group=5), lambda: layer(x))
    reason = f"group=5 does not divide its {shape[1]} inputs"
    assert [row["reason"] for row in other.result()["summary"]["skipped"]] == [reason]


# -- observers -----------------------------------------------------------------


def test_percentiles_leave_the_outermost_values_out() -> None:
    x = torch.randn(1, 4000)
    layer = nn.Linear(4000, 2)
    tool = applied(QuantizeTool(observer="percentile", percentile=99), lambda: layer(x))
    activation, weight = tool.result()["ops"][0]["quantizers"]
    low, high = np.percentile(x.numpy(), [1, 99])
    assert activation["scale"] == pytest.approx((high - low) / 255, rel=1e-5)
    bound = np.percentile(np.abs(layer.weight.detach().numpy()), 99, axis=1)
    assert weight["scale"] == pytest.approx((bound / 127).tolist(), rel=1e-5)


def test_least_error_is_the_best_of_all_shares() -> None:
    """No other share of the full range has a smaller squared error."""
    torch.manual_seed(0)
    x = torch.randn(1, 3000)
    x[0, 0] = 12.0
    layer = nn.Linear(3000, 2)
    tool = applied(QuantizeTool(observer="mse", activation_bits=4), lambda: layer(x))
    row = tool.result()["ops"][0]["quantizers"][0]

    def error(share: float) -> float:
        low, high = x.min().item() * share, 12.0 * share
        return float((rounded_activation(x, low, high, 4, False) - x).square().sum())

    best = min(np.linspace(1.0, 0.2, 81), key=error)
    assert best < 0.9
    assert row["scale"] == pytest.approx((12.0 - x.min().item()) * best / 15, rel=1e-4)


def test_what_is_not_finite_does_not_widen_the_range() -> None:
    layer = nn.Linear(3, 2)
    tool = applied(QuantizeTool(), lambda: layer(torch.tensor([[1.0, float("inf"), float("nan")]])))
    assert tool.result()["ops"][0]["quantizers"][0]["scale"] == pytest.approx(1 / 255)


# -- other operators --------------------------------------------------------------


def test_products_of_activations_have_both_sides_rounded() -> None:
    q, k = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    tool = QuantizeTool(method="dynamic", ops=["matmul"])
    with amanda.apply(tool):
        output = q @ k.mT
    a, b = (rounded_activation(t, t.min().item(), t.max().item(), 8, False) for t in (q, k))
    assert torch.allclose(output, a @ b.mT, atol=1e-6)


def test_fused_attention_has_queries_keys_and_values_rounded() -> None:
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    tool = QuantizeTool(method="dynamic", ops=["attention"])
    with amanda.apply(tool):
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rounded = [rounded_activation(t, t.min().item(), t.max().item(), 8, False) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*rounded, attn_mask=mask)
    assert torch.allclose(output, expected, atol=1e-6)
    assert [q["input"] for q in tool.result()["ops"][0]["quantizers"]] == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"method": "dynamic", "number": "e4m3"}], ids=str)
@pytest.mark.parametrize("name", ["resnet18", "vit_timm", "bert", "gpt2", "llama"])
def test_real_models_stay_close(name: str, options: dict[str, Any]) -> None:
    """Eight bits change outputs by little, and not by nothing."""
    model, inputs = models.build(name, training=False)
    tool = QuantizeTool(ops=("conv2d", "linear", "matmul", "attention"), **options)
    with torch.no_grad():
        expected = next(models.tensors(model(**inputs)))
        with amanda.apply(tool):
            model(**inputs)
            output = next(models.tensors(model(**inputs)))
    ratio = (output - expected).norm() / expected.norm()
    assert 0 < ratio < 0.15
    assert len(tool.result()["ops"]) > 8


# -- what comes out ------------------------------------------------------------------


def test_what_is_written_is_what_was_simulated() -> None:
    """From the rows and the integers alone: the same output."""
    net, x = Net(), images()
    tool = QuantizeTool(weight_bits=4)
    with amanda.apply(tool), torch.no_grad():
        net(x)
        output = net(x)
    found = {row["id"]: row["quantizers"] for row in tool.result()["ops"]}
    whole = tool.integer_weights(lambda: net(x))
    assert all(w.dtype == np.int8 and np.abs(w).max() == 7 for w in whole.values())

    def layer(op_id: str, x: Any) -> tuple[Any, Any]:
        a, w = found[op_id]
        x = torch.clamp(torch.round(x * (1 / torch.tensor(a["scale"]))) + a["zero_point"],
                        a["low"], a["high"])  # fmt: skip
        x = (x - a["zero_point"]) * torch.tensor(a["scale"])
        integers = whole[f"{op_id}|1"]
        shape = [-1] + [1] * (integers.ndim - 1)
        return x, torch.tensor(integers).float() * torch.tensor(w["scale"]).view(shape)

    y = F.conv2d(*layer("Net.conv/conv2d:0", x), net.conv.bias).relu()
    y = F.conv2d(*layer("Net.depthwise/conv2d:0", y), net.depthwise.bias, groups=8)
    y = F.linear(*layer("Net.fc/linear:0", y.mean((2, 3))), net.fc.bias)
    assert torch.allclose(y, output, atol=1e-6)


def test_what_is_not_quantized_is_listed_with_the_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.fc(self.normed(x))

    tool = QuantizeTool(ops=["linear", "conv2d", "conv3d"], exclude=["fc"])
    with amanda.apply(tool):
        Odd()(torch.rand(2, 4))
    summary = tool.result()["summary"]
    assert {row["id"]: row["reason"] for row in summary["skipped"]} == {
        "Odd.normed/linear:0": "its weight is not a parameter: the program computes it",
        "Odd.fc/linear:0": "it is excluded",
    }
    assert summary["ops_never_met"] == ["conv2d", "conv3d"]
    with pytest.raises(AmandaError, match=r"op Odd\.normed/linear:0 is skipped: its weight is no"):
        tool.changes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "ptq"}, "method=ptq is not one of static, dynamic, qat"),
        ({"weight_bits": 1}, "weight_bits=1 is neither 0 nor from 2 to 16"),
        ({"weight_bits": 0, "activation_bits": 0}, "weight_bits=0 and activation_bits=0 leave"),
        ({"activation_bits": 32}, "activation_bits=32"),
        ({"number": "e4m3", "weight_bits": 4}, "number=e4m3 has 8 bits: weight_bits=4"),
        ({"number": "e4m3", "method": "qat"}, "number=e4m3 cannot be learned"),
        ({"number": "e5m2", "observer": "mse"}, "number=e5m2 has no observer=mse"),
        ({"percentile": 40}, "percentile=40.0"),
        ({"group": 1}, "group=1 is neither 0 nor above 1"),
        (
            {"group": 8, "per_channel": False},
            "group=8 has no effect: it is for weights per channel",
        ),
        ({"calibration": 0}, "calibration=0"),
        ({"per_token": True}, "it is for activations of method=dynamic"),
        ({"gptq": True, "number": "e4m3"}, "gptq=True has no effect"),
        ({"smooth": 0.5, "activation_bits": 0}, r"smooth=0\.5 has no effect"),
        ({"smooth": 1.5}, r"smooth=1\.5 is not from 0 to 1"),
        ({"keep": -1}, "keep=-1 is negative"),
        ({"keep": 1, "method": "qat"}, "keep=1 has no effect"),
        ({"learning_rate": 0.1}, "learning_rate is of method=qat only"),
        ({"method": "qat", "learning_rate": -0.1}, "is negative"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizeTool(**options)
