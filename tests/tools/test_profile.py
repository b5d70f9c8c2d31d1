"""``profile``: calls, time, memory; against PyTorch's profiler and hooks on saved tensors."""

from __future__ import annotations

import csv
import json
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import amanda
from amanda.inline import resident_bytes
from amanda_tools import profile
from amanda_tools.profile import ProfileTool
from amanda_tools.remat import RematTool
from tests import models
from tests.running import applied


def saved_by_torch(run: Callable[[], Any], model: nn.Module) -> int:
    """Bytes that PyTorch packs for the backward pass, each memory once, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            found[address] = max(found.get(address, 0), tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output is not None
    return sum(found.values())


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt2", "vit"])
def test_what_is_saved_is_what_torch_packs(name: str) -> None:
    """What all operators together keep for the backward pass, to the byte."""
    model, inputs = models.build(name)
    torch.manual_seed(1)
    expected = saved_by_torch(lambda: model(**inputs), model)
    model, inputs = models.build(name)
    torch.manual_seed(1)
    kept: list[Any] = []
    tool = applied(ProfileTool(), lambda: kept.append(model(**inputs)))
    assert tool.summary()["saved_bytes"] == pytest.approx(expected, rel=0.02)


def test_what_a_single_operator_saves() -> None:
    """A sigmoid its output, a product its factors, a linear layer its input, in place too, and
    under transforms."""
    layer, x = nn.Linear(10, 20), torch.rand(3, 10)
    kept: list[Any] = []

    def run() -> None:
        y = layer(x)
        kept.append((y.sigmoid() * y).tanh_())

    rows = {row["type"]: row for row in applied(ProfileTool(), run).op_rows()}
    assert rows["linear"]["saved_bytes"] == x.nbytes
    assert rows["sigmoid"]["saved_bytes"] == 3 * 20 * 4
    assert rows["mul"]["saved_bytes"] == 2 * 3 * 20 * 4
    assert rows["tanh"]["saved_bytes"] == 3 * 20 * 4
    assert rows["mul"]["output_bytes"] == 3 * 20 * 4
    y = layer(x).detach().requires_grad_()
    transforms = applied(ProfileTool(), lambda: kept.append(torch.vmap(torch.sigmoid)(y)))
    assert transforms.summary()["saved_bytes"] == 3 * 20 * 4


FILE: dict[int, Any] = {}


@pytest.mark.parametrize(
    ("hooks", "saved", "unknown"),
    [
        (torch.autograd.graph.save_on_cpu, 4 * (5 * 8 + 5 * 16), 0),
        # With the second weight, which is no parameter any more; what two nodes save, twice.
        (lambda: saved_tensors_hooks(lambda t: {"half": t.half()}, id), 2 * (40 + 160 + 64), 0),
        (lambda: saved_tensors_hooks(lambda t: FILE.setdefault(id(t), id(t)), FILE.pop), 0, 4),
    ],
)
def test_what_hooks_keep_counts_instead_of_the_tensors(
    hooks: Callable[[], Any], saved: int, unknown: int
) -> None:
    """The tensors that a hook has packed are kept; what it packs without tensors is a gap that
    tables show."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def run() -> None:
        with hooks():
            kept.append(model(torch.rand(5, 8)))

    kept: list[Any] = []
    tool, remat = applied(ProfileTool(), run), applied(RematTool(budget=0.9), run)
    summary, planned = tool.summary(), remat.result()["summary"]
    assert (summary["saved_bytes"], summary["saved_unknown"]) == (saved, unknown)
    assert (planned["saved_bytes"], sum(planned["not_seen"].values())) == (saved, unknown)
    table = next(iter(tool.tables()))
    [cell] = [row[table.columns.index("saved")] for row in table.rows if row[0] == "1/tanh"]
    assert cell.startswith("≥") == bool(unknown)


def test_nothing_is_saved_without_gradients() -> None:
    """An inference keeps nothing."""
    model, inputs = models.build("resnet18", training=False)

    def run() -> None:
        with torch.no_grad():
            model(**inputs)

    assert applied(ProfileTool(), run).summary()["saved_bytes"] == 0


def test_a_view_that_may_not_be_asked_saves_nothing() -> None:
    """A parameter's view that is changed under no_grad has no node to look at."""
    weight = nn.Parameter(torch.rand(4, 2))

    def run() -> None:
        with torch.no_grad():
            row = weight[0]
            row.fill_(0)
            with torch.enable_grad():
                row.detach()

    rows = {row["name"]: row for row in applied(ProfileTool(), run).op_rows()}
    assert rows["fill_"]["saved_bytes"] == 0


def test_calls_are_those_of_torch_profiler() -> None:
    """Forward and backward executions of the types that map one to one."""
    model, inputs = models.build("resnet18")

    def step() -> None:
        models.loss(model(**inputs)).backward()

    tool = applied(ProfileTool(), lambda: [step() for _ in range(2)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as reference:
        step()
    counted = {event.key: event.count for event in reference.key_averages()}
    found = {kind: group["calls"] for kind, group in tool.summary()["by_type"].items()}
    for kind, event in (
        ("conv2d", "aten::conv2d"),
        ("batch_norm", "aten::batch_norm"),
        ("conv2d_backward", "ConvolutionBackward0"),
        ("relu_backward", "ReluBackward0"),
        ("accumulate_grad", "torch::autograd::AccumulateGrad"),
    ):
        assert found[kind] == 2 * counted[event], kind


def test_time_is_that_of_the_operators() -> None:
    """A slow operator takes its time; a call is between the shortest and the longest."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.03)
            return gradient

    def run() -> None:
        for _ in range(3):
            Slow.apply(torch.ones(2, requires_grad=True)).sum().backward()
            amanda.new_iteration()

    start = time.perf_counter()
    tool = applied(ProfileTool(), run)
    elapsed = time.perf_counter() - start
    rows = {row["name"]: row for row in tool.op_rows()}
    assert rows["Slow"]["calls"] == 3
    assert rows["Slow"]["seconds"] >= 0.06
    assert rows["SlowBackward"]["seconds"] >= 0.09
    for row in rows.values():
        assert row["shortest"] <= row["mean"] <= row["longest"]
        assert row["mean"] * row["calls"] == pytest.approx(row["seconds"])
    summary = tool.summary()
    assert summary["seconds_forward"] + summary["seconds_backward"] <= elapsed
    table, *_ = tool.tables()
    model = [row for row in tool.op_rows() if row["phase"] in ("forward", "backward")]
    assert sorted(row[0] for row in table.rows) == sorted(row["id"] for row in model)
    # By the last step, as the table has it.
    times = [float(row[table.columns.index("ms")]) for row in table.rows]
    assert times == sorted(times, reverse=True)
    assert {row[0] for row in table.rows[:2]} == {"/Slow:0", "/Slow:0/grad/SlowBackward:0"}


def test_tables_by_type_and_module() -> None:
    """The table's groups and its order are options."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    for options, column in (({"by": "module"}, {"0-1", "2"}), ({"by": "type"}, {"linear"})):
        table, *_ = applied(ProfileTool(**options), lambda: model(torch.rand(1, 4))).tables()
        assert column <= {row[0] for row in table.rows}
    options = {"by": "type", "sort": "calls", "phases": "all"}
    table, *_ = applied(ProfileTool(**options), lambda: model(torch.rand(1, 4))).tables()
    calls = [row[1] for row in table.rows]
    assert calls == sorted(calls, reverse=True)


def test_files(tmp_path: Path) -> None:
    """A table and a timeline."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    tool = applied(ProfileTool(), lambda: model(torch.rand(1, 4)).sum().backward())
    paths = tool.write_files(tmp_path, "profile")
    assert [path.name for path in paths] == ["profile.csv", "profile.timeline.json"]
    with paths[0].open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [r["id"] for r in tool.op_rows()]
    assert json.loads(paths[1].read_text())["traceEvents"]
    assert json.loads(json.dumps(tool.result())) == tool.result()
    nothing = applied(ProfileTool(csv=False, limit=0), lambda: torch.rand(1))
    assert list(nothing.write_files(tmp_path, "profile")) == []


def test_the_memory_of_a_device_or_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much each execution changes that of the device, or without one of the process."""
    # Pages of a mapping of its own: allocators may have those of earlier tensors left.
    size = 64_000_000
    new = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    rows = applied(ProfileTool(), lambda: new.fill_(1).neg_()).op_rows()
    if resident_bytes():
        assert 0.9 * size < rows[0]["memory_delta"] < 1.1 * size
        assert abs(rows[1]["memory_delta"]) < 0.1 * size
    used = iter(range(1000, 10**9, 1000))
    monkeypatch.setattr(profile, "device_bytes", lambda: next(used))
    rows = applied(ProfileTool(), lambda: torch.rand(2).exp()).op_rows()
    assert [row["memory_delta"] for row in rows] == [1000, 1000]
    [row] = applied(ProfileTool(memory=False), lambda: torch.ones(2)).op_rows()
    assert row["memory_delta"] is None


def test_waiting_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sync`` waits before both looks at the clock."""
    waits: list[int] = []
    monkeypatch.setattr(profile, "synchronize", lambda: waits.append(1))
    applied(ProfileTool(sync=True), lambda: torch.rand(2))
    assert len(waits) == 2
