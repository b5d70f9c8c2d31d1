"""``remat``: less memory for the backward pass, the same gradients."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import CapabilityError
from amanda.testing import loopback as lb
from amanda_tools.remat import RematTool
from tests.counting import no_collection
from tests.running import applied, run_python
from tests.tools.optimization.remat_support import (
    CASES,
    Alive,
    held,
    mlp,
    rematerialized,
    same,
    step,
)

PROGRAM = """
import torch
torch.manual_seed(0)
layers = [m for _ in range(8) for m in (torch.nn.Linear(16, 16), torch.nn.GELU())]
model, x = torch.nn.Sequential(*layers), torch.rand(32, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
print(f"loss {loss:.9f}")
"""


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_and_memory_is_less(name: str) -> None:
    """Half of the bytes: what is alive after the forward pass is within the budget."""
    torch.manual_seed(0)
    make, data = CASES[name]
    model, x = make(), data()
    vanilla, before = step(model, x), held(model, x)
    with rematerialized(model, x, budget=0.5) as tool:
        assert same(step(model, x), vanilla)
        after = held(model, x)
        assert same(step(model, x), vanilla)
        found = tool.result()["summary"]
    assert found["is_met"]
    assert found["is_applied"]
    given = x.untyped_storage().nbytes()
    assert after <= found["held_bytes"] <= found["peak_bytes"] <= found["budget_bytes"]
    assert found["saved_bytes"] - given <= before
    assert after <= 0.5 * (before + given)
    assert held(model, x) == before


def test_the_backward_pass_keeps_to_the_peak() -> None:
    """What is alive at any time of the backward pass is less than without the tool."""

    def peak(model: Any, x: Any) -> int:
        highest = 0
        with Alive() as alive:

            def look(*_: Any) -> None:
                nonlocal highest
                highest = max(highest, alive.bytes([*model.parameters()]))

            handles = [m.register_full_backward_hook(look) for m in model]
            model(x).square().mean().backward()
        for handle in handles:
            handle.remove()
        return highest

    torch.manual_seed(0)
    model, x = mlp(24), torch.randn(64, 32, requires_grad=True)
    vanilla = peak(model, x)
    with rematerialized(model, x, budget=0.4) as tool:
        peak(model, x)
        found = peak(model, x)
    assert tool.result()["summary"]["is_met"]
    # The gradients of the activations come on top, with and without it.
    assert found < 0.6 * vanilla


def test_a_budget_that_cannot_be_met() -> None:
    """The plan is the best there is, and the summary says so."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(64, 32)
    vanilla = step(model, x)
    with rematerialized(model, x, budget="1KiB") as tool:
        assert same(step(model, x), vanilla)
    found = tool.result()["summary"]
    assert found["budget_bytes"] == 1024
    assert not found["is_met"]
    assert found["peak_bytes"] == found["minimum_bytes"] < 0.5 * found["saved_bytes"]
    assert "cannot be met" in next(iter(tool.tables())).title


def test_a_plan_without_operators_is_applied() -> None:
    """All that the budget needs is to keep everything."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(64, 32)
    with rematerialized(model, x, budget=1.0) as tool:
        assert tool.summary()["recomputed"] == 0
        assert "0 ops are run again (applied)" in next(iter(tool.tables())).title


def test_planning_only() -> None:
    """apply=False measures and plans, and changes nothing."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(64, 32)
    before = held(model, x)
    with rematerialized(model, x, budget=0.5, apply=False) as tool:
        assert held(model, x) == before
    found = tool.result()
    assert not found["summary"]["is_applied"]
    assert found["summary"]["recomputed"] == sum(row["recompute"] for row in found["ops"]) > 0
    assert all(row["cost_us"] > 0 for row in found["ops"] if row["recompute"])


def test_a_graph_that_is_kept() -> None:
    """The backward pass may run twice, in parts, and be differentiated itself."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(16, 32)
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]

    def differentiate() -> list[Any]:
        loss = model(x).square().mean()
        first = torch.autograd.grad(loss, weights[-2:], retain_graph=True)
        loss.backward(retain_graph=True)
        second = torch.autograd.grad(loss, weights, create_graph=True)
        norm = sum(g.square().sum() for g in second)
        return [*first, *second, *torch.autograd.grad(norm, weights)]

    vanilla = differentiate()
    with rematerialized(model, x, budget=0.4) as tool:
        found = differentiate()
    assert tool.summary()["recomputed"] > 0
    assert all(map(torch.equal, found, vanilla))


def test_evaluation_before_training() -> None:
    """What ran without gradients first is measured when it runs with them."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(32, 32)
    vanilla, before = step(model, x), held(model, x)
    tool = RematTool(budget=0.5)
    with amanda.apply(tool):
        with torch.no_grad():
            model(x)
        for _ in range(3):
            assert same(step(model, x), vanilla)
        assert held(model, x) < 0.6 * before
        with torch.no_grad():
            assert torch.equal(model(x), vanilla[0])


def test_nothing_stays_alive() -> None:
    """A forward pass without a backward pass, and the end of the scope, leave nothing behind."""
    torch.manual_seed(0)
    model, x = mlp(6), torch.randn(32, 32)
    with rematerialized(model, x, budget=0.3), no_collection():
        with Alive() as alive:
            model(x)
            output = model(x).detach()
        parameters = [*model.parameters(), output, x]
        model(x).sum().backward()
        left = alive.bytes(parameters)
    assert left == 0
    assert step(model, x)[0].shape == output.shape


def test_a_scope_that_ends_with_a_forward_pass() -> None:
    """What that pass has kept goes with its graph, though the tool and the result stay."""
    torch.manual_seed(0)
    model, x = mlp(6), torch.randn(32, 32)
    with no_collection():
        with rematerialized(model, x, budget="1KiB") as tool, Alive() as alive:
            output = model(x).detach()
        assert alive.bytes([*model.parameters(), output, x]) == 0
    assert tool.summary()["is_applied"]


def test_from_the_command_line(tmp_path: Path) -> None:
    """A program that knows nothing of it prints the same loss, and the plan is in the file."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(*command: str) -> str:
        return run_python(*command, cwd=tmp_path, check=True).stdout

    vanilla = run("train.py")
    options = "remat:budget=0.6,exclude=8"
    printed = run("-m", "amanda", "run", "-t", options, "-o", "out", "--", "train.py")
    assert printed.splitlines()[0] == vanilla.strip()
    found = json.loads((tmp_path / "out/remat.json").read_text(encoding="utf-8"))
    assert found["summary"]["is_applied"]
    assert [row["recompute"] for row in found["ops"] if row["module"] == "8"] == [False]
    assert {row["reason"] for row in found["ops"] if row["module"] == "8"} == {"it is excluded"}


def test_a_chart_of_modules() -> None:
    """The page of a run shows what is kept of each module, and what is computed again."""
    torch.manual_seed(0)
    model, x = mlp(4), torch.randn(64, 32)
    with rematerialized(model, x, budget=0.6) as tool:
        pass
    (chart,) = tool.charts()
    total = sum(sum(values) for values in chart.values.values())
    rows = tool.op_rows()
    assert total == sum(row["saved_bytes"] for row in rows)
    assert sum(chart.values["computed again"]) > 0


def test_bad_options() -> None:
    """A budget is a size or a share."""
    for budget in ("many", "5 apples", "0", "-3"):
        with pytest.raises(ValueError, match="neither a size such as 512MiB nor a share"):
            RematTool(budget=budget)
    sizes = {"512MiB": 512 << 20, "2GB": 2 * 10**9, "1000": 1000, "0.25": 250}
    assert {b: RematTool(budget=b).options.to_bytes(1000) for b in sizes} == sizes


def test_operators_of_other_frameworks_are_left_alone() -> None:
    """They are skipped with the reason, and nothing of them counts as kept."""
    tool = applied(RematTool(), lambda: lb.relu(lb.tensor([1.0, -2.0])))
    summary = tool.result()["summary"]
    assert summary["saved_bytes"] == 0
    assert any("none of loopback" in row["reason"] for row in summary["skipped"])


def test_a_program_without_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what TensorFlow has instead."""
    monkeypatch.delitem(sys.modules, "torch")
    with (
        pytest.raises(CapabilityError, match=r"none of loopback.*tf\.recompute_grad"),
        amanda.apply(RematTool()),
    ):
        lb.relu(lb.tensor([1.0, -2.0]))


def test_a_program_that_evaluates_before_it_trains() -> None:
    """The first iteration with gradients is measured: neither the evaluation, whose operators are
    the same, nor the initialization and the update of parameters."""
    torch.manual_seed(0)
    tool = RematTool(budget=0.5)
    with amanda.apply(tool):
        model, x = mlp(4), torch.randn(64, 32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad():
            model(x).float().square().mean()
        for _ in range(3):
            step(model, x)
            optimizer.step()
        under = held(model, x)
    assert under <= 0.5 * held(model, x)
    found = tool.result()
    assert found["summary"]["is_met"]
    assert {row["phase"] for row in found["ops"]} == {"forward"}
