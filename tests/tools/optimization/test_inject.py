"""``inject``: faults against bits that were changed by hand."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda_tools.inject import InjectTool
from tests import models


def injected(run: Any, **options: Any) -> tuple[Any, InjectTool]:
    tool = InjectTool(**options)
    with amanda.apply(tool):
        return run(), tool


def bits_of(value: float, dtype: torch.dtype) -> int:
    """The bits of a number, from Python's own packing."""
    if dtype == torch.float32:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if dtype == torch.float16:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    if dtype == torch.bfloat16:
        return int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16
    return int(value) & 0xFF


WIDTHS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16, torch.int8: 8}


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_a_flip_inverts_exactly_the_bit_that_is_reported(dtype: torch.dtype) -> None:
    """One bit of one element of one output; the rest is untouched."""
    torch.manual_seed(0)
    x = (torch.randn(5, 7) * 30).to(dtype)
    seen = set()
    for seed in range(60):
        y, tool = injected(lambda: x + 0, ops=["add"], seed=seed)
        (fault,) = tool.faults
        changed = (y.view(torch.uint8) != x.view(torch.uint8)).view(5, 7, -1).any(-1).flatten()
        assert changed.nonzero().flatten().tolist() == [fault.position]
        before, after = x.flatten()[fault.position].item(), y.flatten()[fault.position].item()
        assert (fault.before, fault.after) == (before, pytest.approx(after, nan_ok=True))
        if np.isfinite(after):
            assert bits_of(before, dtype) ^ bits_of(after, dtype) == 1 << fault.bit
        seen.add(fault.bit)
    assert len(seen) > WIDTHS[dtype] / 2
    assert max(seen) < WIDTHS[dtype]


def test_a_chosen_bit_is_the_one_that_changes() -> None:
    x = torch.ones(4)
    y, tool = injected(lambda: x * 1, ops=["mul"], bit=31, count=2)
    assert sorted(y.tolist()) == [-1, -1, 1, 1]
    assert {fault.bit for fault in tool.faults} == {31}


@pytest.mark.parametrize(("fault", "expected"), [("stuck0", 1.0), ("stuck1", -1.0)])
def test_a_stuck_bit_has_its_value_in_every_execution(fault: str, expected: float) -> None:
    """At the same element each time, whatever was there."""
    fc = nn.Identity()

    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return fc(x) * 1

    net, tool = Net(), InjectTool(fault=fault, bit=31, ops=["mul"], seed=4)
    with amanda.apply(tool):
        plus, minus = net(torch.ones(9)), net(-torch.ones(9))
    position = tool.faults[0].position
    assert plus[position] == minus[position] == expected
    assert [f.position for f in tool.faults] == [position] * 2
    assert [f.execution for f in tool.faults] == [0, 1]
    assert int((plus != 1).sum() + (minus != -1).sum()) == 1


def test_faults_depend_on_the_seed_the_operator_and_its_execution_only() -> None:
    model, inputs = models.build("resnet18", training=False)

    def run() -> Any:
        return [model(**inputs), model(**inputs)]

    _, first = injected(run, ops=["conv2d"])
    _, same = injected(run, ops=["conv2d", "relu", "linear"])
    _, other = injected(run, ops=["conv2d"], seed=1)
    of_conv = [fault for fault in same.faults if "conv2d" in fault.op]
    place = [(f.op, f.execution, f.position, f.bit) for f in first.faults]
    assert place == [(f.op, f.execution, f.position, f.bit) for f in of_conv]
    assert place != [(f.op, f.execution, f.position, f.bit) for f in other.faults]
    assert len(place) == 40
    by_op = dict.fromkeys(f.op for f in first.faults)
    assert all(len({(f.position, f.bit) for f in first.faults if f.op == op}) == 2 for op in by_op)


def test_the_frameworks_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    injected(lambda: torch.ones(3) + 1, ops=["add"], fault="normal")
    assert torch.equal(torch.rand(3), expected)


def test_weights_are_faulty_for_the_operator_and_stay_whole_in_the_model() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4), torch.rand(3, 6)
    before = layer.weight.detach().clone()

    def run() -> Any:
        y = layer(x)
        y.sum().backward()
        return y

    y, tool = injected(run, target="weights", fault="value", value=5.0, count=3)
    weight = before.clone()
    for fault in tool.faults:
        assert weight.view(-1)[fault.position] == fault.before
        weight.view(-1)[fault.position] = 5.0
    assert torch.equal(y, F.linear(x, weight, layer.bias))
    assert torch.equal(layer.weight, before)
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(4, 6))


def test_gradients_are_hit_on_their_way_into_the_operator() -> None:
    x = torch.ones(5, requires_grad=True)
    _, tool = injected(
        lambda: (x * 2).sum().backward(), target="gradients", ops=["mul"], fault="value", value=9.0
    )
    expected = torch.full((5,), 2.0)
    expected[tool.faults[0].position] = 18.0
    assert torch.equal(x.grad, expected)


def test_the_gradient_passes_a_faulty_activation_unchanged() -> None:
    x = torch.ones(5, requires_grad=True)
    injected(lambda: (x * 2).exp().sum().backward(), ops=["mul"], fault="value", value=0.0)
    values = sorted(round(v, 4) for v in x.grad.tolist())
    assert values == [2.0, *[round(2 * np.exp(2.0), 4)] * 4]


def test_a_rate_is_a_probability_per_element() -> None:
    y, tool = injected(
        lambda: torch.zeros(200, 500) + 0, ops=["add"], rate=0.01, fault="value", value=1.0
    )
    assert 900 < int(y.sum()) < 1100
    assert tool.result()["summary"]["faults"] == int(y.sum())
    everything, _ = injected(lambda: torch.zeros(50) + 0, ops=["add"], rate=1.0, fault="value")
    assert torch.equal(everything, torch.zeros(50))


def test_a_rate_of_zero_hits_nothing() -> None:
    """An option that is given means what it says."""
    tensor, tool = injected(lambda: torch.zeros(50) + 0, ops=["add"], rate=0, fault="normal")
    assert tool.summary()["faults"] == 0
    assert not tensor.any()


def test_noise_has_the_distribution_that_was_asked_for() -> None:
    noisy, _ = injected(
        lambda: torch.full((40_000,), 5.0) + 0, ops=["add"], rate=1, fault="normal", std=0.5
    )
    assert abs(noisy.mean().item() - 5) < 0.02
    assert abs(noisy.std().item() - 0.5) < 0.02
    drawn, _ = injected(
        lambda: torch.zeros(40_000) + 0, ops=["add"], rate=1, fault="uniform", low=2, high=4
    )
    assert 2 <= drawn.min() < 2.01
    assert 3.99 < drawn.max() <= 4
    assert abs(drawn.mean().item() - 3) < 0.02


def test_the_order_in_memory_is_kept() -> None:
    """A convolution after it computes with the same kernel."""
    x = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    y, _ = injected(lambda: x * 1, ops=["mul"])
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("resnet18", "outputs"),
        ("bert", "weights"),
        ("gpt2", "gradients"),
        *(("lstm", target) for target in ("outputs", "weights", "gradients")),
    ],
)
def test_every_operator_of_real_models_can_be_hit(name: str, target: str) -> None:
    model, inputs = models.build(name)
    tool = InjectTool(
        target=target, ops=("conv2d", "linear", "attention", "lstm"), fault="normal", std=0.01
    )
    with amanda.apply(tool):
        models.loss(model(**inputs)).backward()
    rows = tool.result()["ops"]
    assert rows or (name, target) == ("lstm", "weights")
    assert all(row["faults"] == row["executions"] == 1 for row in rows)


def test_what_cannot_be_hit_is_listed_with_the_reason() -> None:
    x = torch.rand(4)
    _, tool = injected(lambda: (x > 0.5, x + 1), ops=["gt", "add", "conv3d"])
    summary = tool.result()["summary"]
    assert [(row["id"], row["reason"]) for row in summary["skipped"]] == [
        ("/gt:0", "elements of type torch.bool")
    ]
    assert summary["ops_never_met"] == ["conv3d"]
    _, tool = injected(lambda: x + 1, ops=["add"], target="weights")
    assert tool.result()["summary"]["skipped"][0]["reason"] == (
        "none of its inputs is known as its weight"
    )


def test_the_list_of_faults_is_limited_and_the_count_is_not() -> None:
    _, tool = injected(lambda: torch.zeros(100) + 1, ops=["add"], count=50, limit=7)
    summary = tool.result()["summary"]
    assert (summary["faults"], summary["faults_listed"], len(tool.faults)) == (50, 7, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fault": "flip"}, "fault=flip is not one of bitflip"),
        ({"target": "inputs"}, "target=inputs is not one of"),
        ({"count": 0}, "count=0"),
        ({"rate": 1.5}, "rate=1.5"),
        ({"bit": 64}, "bit=64"),
        ({"std": -1}, "std=-1.0"),
        ({"low": 2, "high": 1}, "low is above high"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InjectTool(**options)
