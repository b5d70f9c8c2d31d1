"""``memory``: against numbers by hand and against PyTorch's profiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_tools.memory import MemoryTool
from tests.running import applied, run_python

BATCH, IN, HIDDEN, OUT = 1000, 16, 64, 4
PARAMETERS = 4 * ((IN + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * OUT)
LAYER = 4 * BATCH * HIDDEN
"""Bytes of the parameters, and of the activations of a hidden layer."""

Optimizer = Callable[[Any], torch.optim.Optimizer]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    return nn.Sequential(*parts, nn.Linear(HIDDEN, OUT))


def train(
    optimizer: Optimizer, forward: Any = None, steps: int = 2, accumulate: int = 1
) -> dict[str, Any]:
    """The summary of training an MLP."""
    model = mlp()
    stepper = optimizer(model.parameters())

    def run() -> None:
        for _ in range(steps):
            stepper.zero_grad()
            for _ in range(accumulate):
                x = torch.rand(BATCH, IN)
                y = forward(model, x) if forward else model(x)
                y.square().mean().backward()
                del x, y
            stepper.step()

    summary: dict[str, Any] = applied(MemoryTool(), run).result()["summary"]
    assert sum(summary["by_kind"].values()) == summary["peak_bytes"]
    assert sum(summary["by_module"].values()) == summary["peak_bytes"]
    return summary


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


AT_PEAK = {
    "parameters": PARAMETERS,
    # Of the last layer alone: the peak is in the backward pass of the second tanh.
    "gradients": 4 * (HIDDEN + 1) * OUT,
    # Both layers, the output and the loss.
    "activations": 2 * LAYER + 4 * BATCH * OUT + 4,
    # What the second tanh is given and gives, and the gradient of the loss.
    "temporaries": 2 * LAYER + 4,
    "other": 4 * BATCH * IN,
}
"""By hand: of the first step, or without the state of the optimizer, of any."""


def test_kinds_of_an_mlp() -> None:
    """Parameters, gradients, activations and temporaries are those of the backward pass."""
    summary = train(sgd)
    assert summary["by_kind"] == AT_PEAK
    assert (summary["unfinished"], summary["unknown"], summary["steps"]) == (None, 0, 2)
    assert summary["by_module"]["1"] == LAYER
    assert summary["per_step"] == {
        "held_bytes": 2 * PARAMETERS,
        "peak_bytes": summary["peak_bytes"],
    }


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("cls", "options", "states", "scalars"),
    [(torch.optim.SGD, {"momentum": 0.9}, 1, 0), (torch.optim.Adam, {}, 2, 6)],
)
def test_the_state_of_an_optimizer(
    cls: Any, options: dict[str, Any], states: int, scalars: int, foreach: bool
) -> None:
    """Momentum is one copy of the parameters, Adam's moments are two, and a counter for each."""
    summary = train(lambda p: cls(p, lr=0.1, foreach=foreach, **options))
    assert summary["by_kind"]["optimizer state"] == states * PARAMETERS + 4 * scalars
    assert summary["by_kind"]["activations"] == AT_PEAK["activations"]
    assert summary["peak_step"] == 1


def test_a_checkpoint_keeps_less() -> None:
    """The activations of a checkpoint are computed again: fewer are held at the peak."""
    whole = lambda model, x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    found = [train(sgd, forward)["by_kind"] for forward in (None, whole)]
    assert found[0]["activations"] - found[1]["activations"] == LAYER


def test_accumulation_holds_all_gradients() -> None:
    """From the second batch on the gradients of all parameters are there during the backward
    pass."""
    summary = train(sgd, accumulate=3, steps=1)
    assert summary["by_kind"] == {**AT_PEAK, "gradients": PARAMETERS}


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_against_the_profiler(cls: Any) -> None:
    """The peak is that of PyTorch's allocator, which sees what operators keep for themselves, too:
    a layer norm two numbers a row."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*mlp()[:4], nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, OUT))
        return model, cls(model.parameters(), lr=0.1)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.rand(BATCH, IN)
            y = model(x)
            y.square().mean().backward()
            del x, y
            optimizer.step()

    tool = applied(MemoryTool(), run, *parts())
    model, optimizer = parts()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run(model, optimizer)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    before = sum(p.nbytes for p in model.parameters())
    expected = before + max(itertools.accumulate(sizes))
    assert tool.summary()["peak_bytes"] == expected - 4 * 2 * BATCH


def test_views_and_shared_memory_count_once() -> None:
    """Views have no memory of their own; tied parameters have one."""

    class Tied(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            y.view(100)[5:].reshape(5, 19).t().unsqueeze(0)
            return nn.functional.linear(y.detach(), self.weight) * self.mask

    layer = Tied(10, 10, bias=False)
    layer.register_buffer("mask", torch.ones(10, 10))
    summary = applied(MemoryTool(), lambda: layer(torch.rand(10, 10))).summary()
    kinds = {"parameters": 400, "activations": 3 * 400, "buffers": 400, "other": 400}
    assert summary["by_kind"] == kinds


def test_nothing_is_kept_alive() -> None:
    """What the program drops is freed, and no longer held; the record of it is dropped, too."""
    tool = MemoryTool()
    x = torch.ones(100)
    with amanda.apply(tool):
        for _ in range(5000):
            amanda.new_iteration()
            x = x + 1
        tool.ledger.settle()
        assert tool.ledger.bytes == 400
    assert tool.ledger.peak == 800
    assert len(tool.ledger.holdings) < 3000


def test_tensors_without_memory_that_is_seen() -> None:
    """Sparse tensors are counted as unknown."""
    summary = applied(MemoryTool(), lambda: torch.eye(3).to_sparse().coalesce()).summary()
    assert summary["unknown"] > 0
    assert summary["peak_bytes"] == 36


OUT_OF_MEMORY = """
import torch
from torch import nn

class Large(nn.Module):
    def forward(self, x):
        if x[0, 0] > 0:
            x[0, 0].expand(1 << 22, 1 << 24).contiguous()
        return x

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Large())
nn.init.eye_(model[0].weight), nn.init.zeros_(model[0].bias)
for i in range(2):
    model(torch.full((1, 4), float(i)))
"""


def test_out_of_memory(tmp_path: Path) -> None:
    """The result names the operator in which the memory was not enough, and what was held."""
    script = tmp_path / "large.py"
    script.write_text(OUT_OF_MEMORY)
    words = ("-m", "amanda", "run", "-t", "memory", "-o", "out", "--", str(script))
    run = run_python(*words, cwd=tmp_path)
    assert run.returncode == 1
    assert "can't allocate memory" in run.stderr
    assert "memory: Sequential.2/contiguous:0 did not end in step 1; " in run.stdout


def test_an_error_within_an_operator() -> None:
    """An operator that raises is named until others that have begun before it end."""
    tool = MemoryTool()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            raise MemoryError

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    with amanda.apply(tool):
        x = torch.ones(100) + 1
        with pytest.raises(MemoryError):
            Failing.apply(x)
        del x
        torch.ones(10)
    found = tool.summary()["unfinished"]
    assert (found["id"], found["bytes"]) == ("/Failing:0", 400)
    assert math.fsum(found["by_kind"].values()) == 400
