"""``quantize`` with learned ranges, and its sensitivity, on PyTorch."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools._values.tensors import arithmetic_of
from amanda_tools.quantize import QuantizeTool
from tests import models
from tests.tools.optimization.training import trained


class LearnedStep(torch.autograd.Function):
    """LSQ with its gradient spelled out, as in equations 2 to 5 of the paper."""

    @staticmethod
    def forward(ctx: Any, x: Any, step: Any, low: float, high: float, share: float) -> Any:
        ratio = x / step
        ctx.save_for_backward(ratio, step)
        ctx.bounds = low, high, share
        return ratio.clamp(low, high).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ratio, step = ctx.saved_tensors
        low, high, share = ctx.bounds
        inside = (ratio > low) & (ratio < high)
        of_step = torch.where(inside, ratio.round() - ratio, ratio.clamp(low, high))
        of_step = gradient * of_step * share
        axes = [i for i in range(gradient.dim()) if step.dim() <= i or step.shape[i] == 1]
        of_step = of_step.sum(axes, keepdim=True) if step.dim() > 1 else of_step.sum().view(1)
        return gradient * inside, of_step, None, None, None


class StepNet(nn.Module):
    """Two layers with LSQ written into them."""

    def __init__(self, one: nn.Linear, two: nn.Linear, x: Any) -> None:
        super().__init__()
        self.one, self.two = one, two
        hidden = one(x).relu()
        steps = {
            "x": 2 * x.abs().mean() / math.sqrt(127),
            "h": 2 * hidden.abs().mean() / math.sqrt(255),
            "one_w": 2 * one.weight.abs().mean(1, keepdim=True) / math.sqrt(127),
            "two_w": 2 * two.weight.abs().mean(1, keepdim=True) / math.sqrt(127),
        }
        for name, step in steps.items():
            step = step.detach().clone()
            setattr(self, name, nn.Parameter(step if step.dim() else step.view(1)))

    def forward(self, x: Any) -> Any:
        def lsq(value: Any, step: Any, low: int, high: int, count: int) -> Any:
            return LearnedStep.apply(value, step, low, high, 1 / math.sqrt(count * high))

        x = lsq(x, self.x, -127, 127, x.shape[1])
        weight = lsq(self.one.weight, self.one_w, -127, 127, self.one.weight.shape[1])
        h = F.linear(x, weight, self.one.bias).relu()
        h = lsq(h, self.h, 0, 255, h.shape[1])
        weight = lsq(self.two.weight, self.two_w, -127, 127, self.two.weight.shape[1])
        return F.linear(h, weight, self.two.bias)


def layers() -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), torch.randn(5, 6)


train = functools.partial(trained, steps=5, lr=0.02)


def test_learned_steps_train_as_the_paper_writes_them() -> None:
    """Weights, steps and outputs over five steps."""
    model, x = layers()
    twin = StepNet(copy.deepcopy(model[0]), copy.deepcopy(model[2]), x)
    tool = QuantizeTool(method="qat")
    with amanda.apply(tool):
        model(x)
        outputs = train(model, tool.parameters(), x)
    expected = train(twin, [], x)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    for a, b in ((model[0], twin.one), (model[2], twin.two)):
        assert torch.allclose(a.weight, b.weight, atol=1e-6)
    learned = [twin.x, twin.one_w, twin.h, twin.two_w]
    for a, b in zip(tool.parameters(), learned, strict=True):
        assert torch.allclose(a.flatten(), b.flatten(), atol=1e-6)


def test_the_tools_own_step_is_that_of_gradient_descent() -> None:
    """With the learning rate of the optimizer, the tool moves its values to the same bits."""
    found = []
    for rate in (0.0, 0.02):
        model, x = layers()
        tool = QuantizeTool(method="qat", learning_rate=rate)
        with amanda.apply(tool):
            model(x)
            given = [] if rate else tool.parameters()
            outputs = train(model, given, x)
        found.append([*outputs, *model.parameters(), *tool.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][4])


def test_the_tools_own_step_follows_partial_gradients() -> None:
    """``torch.autograd.grad`` of one weight moves the ranges on the way, once."""
    model, x = layers()
    tool = QuantizeTool(method="qat", learning_rate=0.1)
    with amanda.apply(tool):
        model(x)
        model(x)
        before = [value.detach().clone() for value in tool.parameters()]
        torch.autograd.grad(model(x).square().sum(), [model[2].weight])
    moved = [not torch.equal(a, b) for a, b in zip(tool.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]
    assert all(value.grad is None for value in tool.parameters())


def test_a_value_at_a_bound_is_not_clipped() -> None:
    """The gradient at a bound is the tensor's."""
    values = torch.tensor([0.0, -1.0, 0.5, 1.0, 2.0], requires_grad=True)
    clipped = arithmetic_of(values).clip(values, 0.0, 1.0)
    clipped.sum().backward()
    assert clipped.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt2"])
def test_real_models_train_with_what_is_learned(name: str) -> None:
    """Every learned step can move: all have gradients."""
    model, inputs = models.build(name)
    tool = QuantizeTool(method="qat")
    with amanda.apply(tool):
        model(**inputs)
        models.loss(model(**inputs)).backward()
    gradients = [value.grad for value in tool.parameters()]
    assert len(gradients) > 20
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert all(g.count_nonzero() for g in gradients if g is not None)


# -- sensitivity -----------------------------------------------------------------


def test_sensitivity_is_the_ratio_of_the_output_to_its_error() -> None:
    """Of each operator alone, on exact inputs."""
    model, x = layers()
    tool = QuantizeTool(weight_bits=3, activation_bits=0)
    found = {op.id: op for op in tool.sensitivity(lambda: model(x)).ops}
    inputs = {0: x, 2: model[:2](x)}
    for place, value in inputs.items():
        layer = model[place]
        scale = layer.weight.detach().abs().amax(1) / 3
        zero = torch.zeros(len(scale), dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(layer.weight, scale, zero, 0, -3, 3)
        exact = layer(value).detach().double()
        error = (F.linear(value, weight, layer.bias).detach().double() - exact).square().sum()
        expected = 10 * math.log10(float(exact.square().sum() / error))
        assert found[f"Sequential.{place}/linear:0"].sqnr == pytest.approx(expected, rel=1e-4)


def test_the_metric_is_that_of_a_model_with_one_operator_quantized() -> None:
    model, x = layers()
    golden = model(x).detach()

    def metric(output: Any) -> float:
        return -float((output.detach() - golden).abs().sum())

    options: dict[str, Any] = {"weight_bits": 2, "activation_bits": 4}
    found = QuantizeTool(**options).sensitivity(lambda: model(x), metric)
    assert found.baseline == 0
    assert [op.metric for op in found.ops] == sorted(op.metric for op in found.ops)
    ids = ["Sequential.0/linear:0", "Sequential.2/linear:0"]
    for alone, other in (ids, ids[::-1]):
        tool = QuantizeTool(**options, exclude=[other])
        with amanda.apply(tool):
            model(x)
            expected = metric(model(x))
        assert next(op.metric for op in found.ops if op.id == alone) == pytest.approx(expected)


def test_measuring_leaves_tool_and_model_as_they_were() -> None:
    model, x = layers()
    tool = QuantizeTool()
    before = model(x)
    tool.sensitivity(lambda: model(x), lambda y: float(y.detach().sum()))
    assert torch.equal(model(x), before)
    fresh = QuantizeTool()
    with amanda.apply(fresh):
        model(x)
        expected = model(x)
    with amanda.apply(tool):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["resnet18", "bert"])
def test_real_models_have_a_ranking(name: str) -> None:
    model, inputs = models.build(name, training=False)
    tool = QuantizeTool(ops=("conv2d", "linear", "attention"))
    with torch.no_grad():
        found = tool.sensitivity(lambda: model(**inputs))
    assert [op.sqnr for op in found.ops] == sorted(op.sqnr for op in found.ops)
    assert all(15 < op.sqnr < 60 for op in found.ops)
    assert len(found.ops) == len(tool.ops)


def test_sensitivity_of_nothing_or_of_learned_ranges_is_refused() -> None:
    model, x = layers()
    with pytest.raises(AmandaError, match="meets no op of the types conv3d"):
        QuantizeTool(ops=["conv3d"]).sensitivity(lambda: model(x))
    with pytest.raises(AmandaError, match="ranges that are not learned"):
        QuantizeTool(method="qat").sensitivity(lambda: model(x))
