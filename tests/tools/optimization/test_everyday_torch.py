"""The optimization tools in everyday training code: checkpoints, autocast, generation, together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_tools.inject import InjectTool
from amanda_tools.prune import PruneTool
from amanda_tools.quantize import QuantizeTool
from tests import models

Maker = Callable[[], Any]


class Net(nn.Module):
    """Two layers, of which the activations may be computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Any, again: bool = False) -> Any:
        def run(x: Any) -> Any:
            return self.two(self.one(x).relu())

        return checkpoint(run, x, use_reentrant=False) if again else run(x)


X = torch.rand(4, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PruneTool(method="nm"),
        lambda: PruneTool(sparsity=0.8, end=4),
        lambda: PruneTool(method="channel", ops=["linear"]),
        lambda: QuantizeTool(method="dynamic"),
        lambda: InjectTool(ops=["linear"], target="weights", fault="normal", std=0.1),
    ],
    ids=["nm", "scheduled", "channel", "dynamic", "inject"],
)
def test_checkpointing_changes_nothing(make: Maker) -> None:
    """Recomputation computes what the forward pass did, to the last bit."""
    found = []
    for again in (False, True):
        net, tool = Net(), make()
        with amanda.apply(tool):
            for _ in range(4):
                net.zero_grad()
                output = net(X, again)
                output.square().sum().backward()
        found.append([output, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "make",
    [lambda: PruneTool(method="channel", ops=["linear"]), lambda: QuantizeTool(method="qat")],
    ids=["channel", "lsq"],
)
def test_what_is_learned_under_autocast_is_kept_in_float32(make: Maker) -> None:
    net, tool = Net(), make()
    with amanda.apply(tool), torch.autocast("cpu", dtype=torch.bfloat16):
        net(X)
        net(X).float().square().sum().backward()
    assert tool.parameters()
    for value in tool.parameters():
        assert value.dtype == torch.float32
        assert torch.isfinite(value.grad).all()


@pytest.mark.parametrize(
    "make",
    [lambda: PruneTool(method="channel", ops=["linear"]), lambda: QuantizeTool(method="qat")],
    ids=["channel", "lsq"],
)
def test_what_is_made_in_inference_mode_can_be_trained(make: Maker) -> None:
    net, tool = Net(), make()
    with amanda.apply(tool):
        with torch.inference_mode():
            net(X)
        net(X).sum().backward()
    assert tool.parameters()
    assert all(value.grad is not None for value in tool.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: PruneTool(sparsity=0.5),
        lambda: PruneTool(method="nm"),
        lambda: PruneTool(method="attention"),
        lambda: QuantizeTool(),
        lambda: QuantizeTool(method="dynamic"),
        lambda: InjectTool(target="weights"),
    ],
    ids=["magnitude", "nm", "attention", "static", "dynamic", "inject"],
)
def test_constants_made_in_inference_mode_serve_in_training(make: Maker) -> None:
    """A mask or a scale that an evaluation has made does not end the training after it."""
    net = Net()
    found = []
    with amanda.apply(make()):
        with torch.inference_mode():
            net(X)
        for x in (X, -X):
            net.zero_grad()
            net(x).square().sum().backward()
            found.append([p.grad for p in net.parameters()])
    assert all(gradient is not None for step in found for gradient in step)


@pytest.mark.parametrize("given", [Net(), 3, None], ids=["the model", "a number", "nothing"])
@pytest.mark.parametrize(
    "call",
    [
        lambda prune, quantize, run: prune.bake(run),
        lambda prune, quantize, run: quantize.integer_weights(run),
        lambda prune, quantize, run: quantize.sensitivity(run),
        lambda prune, quantize, run: InjectTool().campaign(run, 2),
    ],
    ids=["bake", "integers", "sensitivity", "campaign"],
)
def test_what_runs_the_model_takes_no_arguments(call: Callable[..., Any], given: Any) -> None:
    """The model in place of a function that runs it is an error that says what is wanted."""
    prune, quantize = PruneTool(method="nm"), QuantizeTool(method="dynamic")
    net = Net()
    with amanda.apply(prune):
        net(X)
    with amanda.apply(quantize):
        net(X)
    with pytest.raises(TypeError) as caught:
        call(prune, quantize, given)
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("a function without arguments that runs the model" in line for line in said)


def test_pruned_weights_are_quantized_and_stay_pruned() -> None:
    """Two tools on the same weights, in the order of apply: rounding keeps zeros."""
    net, tool = Net(), PruneTool(method="nm")
    baked = copy.deepcopy(net)
    with amanda.apply(tool, QuantizeTool(method="dynamic", weight_bits=0)):
        output = net(X)
        output.sum().backward()
    tool.bake(lambda: baked(X))
    with amanda.apply(QuantizeTool(method="dynamic", weight_bits=0)):
        assert torch.equal(baked(X), output)
    for op_id, mask in tool.masks.items():
        layer = net.get_submodule(op_id.partition("/")[0].partition(".")[2])
        assert layer.weight.grad[~torch.from_numpy(mask)].count_nonzero() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: PruneTool(method="nm"),
        lambda: QuantizeTool(calibration=2),
        lambda: PruneTool(method="attention"),
        lambda: InjectTool(ops=["linear"], fault="normal", std=1e-3),
    ],
    ids=["prune", "quantize", "attention", "inject"],
)
def test_text_is_generated_under_a_tool(make: Maker) -> None:
    """Each token runs the same operators with a longer cache of keys."""
    model, _ = models.build("gpt2", training=False)
    tool = make()
    with amanda.apply(tool):
        tokens = model.generate(
            torch.ones(1, 4, dtype=torch.long), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    assert tokens.shape == (1, 9)
    assert tool.result()["summary"].get("not_calibrated", []) == []


def test_one_tool_in_several_scopes_keeps_what_it_has() -> None:
    net, tool = Net(), PruneTool()
    with amanda.apply(tool):
        first = net(X)
    with torch.no_grad():
        net.one.weight.mul_(torch.rand(16, 16))
        weight = net.one.weight.clone()
    with amanda.apply(tool):
        second = net(X)
    assert not torch.equal(first, second)
    mask = torch.from_numpy(tool.masks["Net.one/linear:0"])
    hidden = nn.functional.linear(X, weight * mask, net.one.bias).relu()
    mask = torch.from_numpy(tool.masks["Net.two/linear:0"])
    assert torch.equal(second, nn.functional.linear(hidden, net.two.weight * mask, net.two.bias))


@pytest.mark.parametrize("name", ["inject", "prune", "quantize", "remat"])
def test_names_that_select_nothing_are_listed(name: str) -> None:
    """A misspelt type or pattern is in the summary and a table; one of an operator that the
    tool leaves alone, and a default type, are not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    exclude = ("Sequential.1/*", "2", "layer2.*")
    tool = amanda.tools.load(name)(ops=("linear", "lineer"), exclude=exclude)
    default = amanda.tools.load(name)()
    for each in (tool, default):
        with amanda.apply(each):
            model(torch.rand(2, 4)).sum().backward()
    summary = tool.result()["summary"]
    assert (summary["ops_never_met"], summary["exclude_never_met"]) == (["lineer"], ["layer2.*"])
    titles = [table.title for table in tool.tables()]
    assert f"{name}: patterns of exclude= that match nothing" in titles
    assert f"{name}: types of ops= that no operator has" in titles
    assert not any("no operator has" in table.title for table in default.tables())
    assert default.result()["summary"]["ops_never_met"] == []
