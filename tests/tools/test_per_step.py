"""Figures of operators in the last step, beside those of the run."""

from __future__ import annotations

import copy
import csv
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.cli.last_line import last_line
from amanda.tools.reporting import ReportingTool, StepFigures
from amanda_tools._timelines.timeline import Total
from amanda_tools.count import CountTool
from amanda_tools.flops import FlopsTool
from amanda_tools.kernels import KernelsTool
from amanda_tools.profile import ProfileTool
from amanda_tools.summary import SummaryTool
from amanda_tools.trace import TraceTool
from tests.running import applied, in_threads

EXECUTED = dict.fromkeys(("count", "flops", "kernels"), "executions") | {"profile": "calls"}
TOOLS = [CountTool, FlopsTool, KernelsTool, ProfileTool]


def train(steps: int = 3, parts: int = 1, evaluations: int = 2) -> None:
    """Steps of training on batches of 4, each in `parts`, and evaluations on batches of 16."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(parts):
            model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for _ in range(evaluations):
            model(torch.rand(16, 8))


def linear(tool: ReportingTool[Any]) -> Mapping[str, Any]:
    """The row of the first layer's product."""
    [row] = [row for row in tool.op_rows() if row["id"] == "Sequential.0/linear:0"]
    return row


@pytest.mark.parametrize("cls", TOOLS, ids=lambda cls: cls.name)
def test_a_row_has_the_figures_of_the_last_step(cls: type[ReportingTool[Any]]) -> None:
    """Not those of an evaluation, which the sums of the run hold."""
    row = linear(applied(cls(), train))
    key = EXECUTED[cls.name]
    assert (row["per_step"][key], row[key]) == (1, 5)


@pytest.mark.parametrize("cls", TOOLS, ids=lambda cls: cls.name)
def test_a_first_step_of_several_passes_is_one(cls: type[ReportingTool[Any]]) -> None:
    """What looked like steps before the optimizer stepped has accumulated gradients."""
    row = linear(applied(cls(), lambda: train(steps=1, parts=3)))
    assert row["per_step"][EXECUTED[cls.name]] == 3


@pytest.mark.parametrize("cls", TOOLS, ids=lambda cls: cls.name)
def test_without_a_step_of_the_whole_there_is_none(cls: type[ReportingTool[Any]]) -> None:
    """Outside of modules a step begins with its backward pass, which is half of it."""
    tool = applied(cls(), lambda: torch.rand(4, 4, requires_grad=True).relu().sum().backward())
    assert tool.op_rows()
    assert not any("per_step" in row for row in tool.op_rows())


def test_rows_add_up_to_the_summary_of_the_step() -> None:
    """FLOPs of the operators in the last step are those that the summary tells of it."""
    tool = applied(FlopsTool(), train)
    step = tool.result()["summary"]["per_step"]
    for direction, key in ("forward", "flops"), ("backward", "flops_backward"):
        rows = [row for row in tool.op_rows() if row["direction"] == direction]
        assert sum(row["per_step"]["flops"] for row in rows) == step[key] > 0


def test_tables_show_a_step_and_the_run_beside_it() -> None:
    """The shares are those of a step."""
    tool = applied(FlopsTool(), train)
    totals, modules, *_ = tool.tables()
    amounts = dict(totals.rows)
    assert amounts["forward, the last of 3 steps"] == "1.28 kFLOP"
    assert amounts["forward, whole run"] == "14.1 kFLOP"
    assert (modules.columns[-1], modules.rows[0][:3]) == ("run", ("0", 1, "1.02 kFLOP"))
    count = applied(CountTool(), train)
    assert (
        next(iter(count.tables())).title == "count: 5 forward executions in a step (21 in the run)"
    )


def test_charts_are_of_a_step_and_have_the_run() -> None:
    """Where nothing ran in a step, as without one, they are of the run alone."""
    for steps in (3, 0):
        tool = applied(FlopsTool(), lambda steps=steps: train(steps))  # type: ignore[misc]
        [chart] = [chart for chart in tool.charts() if chart.title == "operations by module"]
        step, run = chart.values, chart.run
        assert sum(step["forward"]) > 0
        if steps:
            assert sum(run["forward"]) == 11 * sum(step["forward"])


def test_threads_that_train_have_steps_without_figures() -> None:
    """Steps of several threads overlap, and so do what one computes and the backward passes of
    another: these figures and their number are not known, and the others are sums."""

    both = threading.Barrier(2)

    def train() -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            result = model(torch.rand(5, 4))
            both.wait()
            result.sum().backward()
            optimizer.step()

    with amanda.apply(tool := FlopsTool()) as scope:
        in_threads(train, train)
    assert " in at least " in last_line(scope.statistics, 1)
    summary = tool.result()["summary"]
    assert [summary[k] for k in ("steps", "per_step", "flops_recomputed")] == [None, {}, None]
    assert summary["flops"] == 4 * 2 * 5 * 12


@pytest.mark.parametrize("copies", [False, True], ids=["the model", "a copy"])
def test_threads_in_turn_have_steps_with_figures(copies: bool) -> None:
    """An evaluation in a thread that waits for it, or an epoch in a thread of its own, overlaps
    with no step, also if the thread goes on to wait for the next one."""
    model = nn.Linear(4, 3)
    evaluated = copy.deepcopy(model).eval() if copies else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def epoch() -> None:
        for _ in range(2):
            model(torch.rand(5, 4)).sum().backward()
            optimizer.step()

    def evaluate() -> None:
        with torch.no_grad():
            evaluated(torch.rand(50, 4))

    with ThreadPoolExecutor(1) as pool, amanda.apply(tool := FlopsTool()) as scope:
        for _ in range(2):
            in_threads(epoch)
            pool.submit(evaluate).result()
            epoch()
            in_threads(evaluate)
    assert " in 8 steps" in last_line(scope.statistics, 1)
    assert [step["flops"] for step in tool.figures_of_steps().values()] == [2 * 5 * 12] * 8


def test_a_step_that_optimizers_make_in_hooks_has_the_whole_backward_pass() -> None:
    """Its iteration ends with the pass, not where the first of them has stepped."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for p in model.parameters():
        step = torch.optim.SGD([p], 0.1).step
        p.register_post_accumulate_grad_hook(lambda _, step=step: step())  # type: ignore[misc]

    def run() -> None:
        for _ in range(3):
            model(torch.rand(5, 4)).sum().backward()

    steps = applied(FlopsTool(), run).figures_of_steps().values()
    assert [step["flops_backward"] for step in steps] == [3 * 2 * 5 * 16] * 3


def test_a_timeline_that_is_full_does_not_hide_the_step() -> None:
    """Calls and times are counted where spans are not kept, and the same as where they are."""
    for limit in 5, 0:
        row = linear(applied(ProfileTool(limit=limit), train))
        assert (row["per_step"]["calls"], row["calls"]) == (1, 5)
        assert 0 < row["per_step"]["seconds"] < row["seconds"]


def test_the_time_of_a_step_is_the_median_of_the_last_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One delay changes the spread that is shown beside it, and no figure; the first step and those
    with another number of calls do not count."""
    tool = applied(ProfileTool(), lambda: train(6))
    assert len(tool.times_of_steps) == 5
    row = linear(tool)
    steps = iter([(1, 7), (1, 5), (2, 12), (1, 6), (1, 9000)])

    def between(begin: float, end: float) -> Any:
        calls, nanoseconds = next(steps)
        return SimpleNamespace(totals={row["id"]: Total(calls, nanoseconds)})

    monkeypatch.setattr(tool.timeline, "between", between)
    monkeypatch.setattr(tool, "_steps", ([], []))
    assert linear(tool)["per_step"] == {
        "calls": 1, "seconds": pytest.approx(6.5e-9), "seconds_min": pytest.approx(5e-9),
        "seconds_max": pytest.approx(9e-6),
    }  # fmt: skip
    table = next(iter(tool.tables()))
    [line] = [line for line in table.rows if line[0] == "0/linear"]
    assert line[table.columns.index("ms of steps")] == "0.000 to 0.009"


def test_the_last_step_is_a_chart_over_time() -> None:
    """Each execution in it, where it begins and how long it takes, by module and direction."""
    tool = applied(ProfileTool(), train)
    [chart] = [chart for chart in tool.charts() if chart.kind == "spans"]
    rows = [row for row in tool.op_rows() if row["per_step"]["calls"]]
    assert len(chart.labels) == sum(row["per_step"]["calls"] for row in rows)
    assert list(chart.values) == ["forward", "backward", "optimizer"]
    assert list(chart.starts) == sorted(chart.starts)
    assert chart.starts[0] >= 0
    given = [sum(values[i] is not None for values in chart.values.values()) for i in range(9)]
    assert given == 9 * [1]
    assert {"0", "1", "2"} <= set(chart.labels)


def test_traces_tell_the_time_of_a_step() -> None:
    """The milliseconds of the last step, and those of the run beside them."""
    table, *_ = applied(TraceTool(), train).tables()
    assert table.columns == ("type", "ops", "ms", "ms in the run")
    assert all(float(row[2]) < float(row[3]) for row in table.rows)


def test_csv_files_have_them_as_columns(tmp_path: Path) -> None:
    """``calls_per_step`` stands for the ``calls`` of ``per_step``."""
    path, *_ = applied(ProfileTool(), train).write_files(tmp_path, "profile")
    with path.open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert rows["Sequential.0/linear:0"]["calls_per_step"] == "1"


def test_the_summary_is_of_the_pass_of_a_step() -> None:
    """Shapes and activations of an evaluation after training are not the model's."""
    [top, *_] = applied(SummaryTool(), train).modules()
    assert (top["output"], top["flops"]) == ([4, 2], 1280)
    [top, *_] = applied(SummaryTool(), lambda: train(steps=0)).modules()
    assert top["output"] == [16, 2]


def test_counts_that_a_step_did_not_begin_with_are_unknown() -> None:
    """Operators that came within it began with none."""
    steps = StepFigures()
    steps.begin(0, {}, {"calls": [3]}, 1.0)
    steps.end(0, {}, {}, {"calls": [5, 1], "seconds": [9.0, 2.0]}, 3.0)
    assert (steps.counts_of_last(), steps.times_of) == ({"calls": [2, 1]}, {0: (1.0, 3.0)})
    steps.end(1, {}, {}, {"calls": [6, 2]}, 4.0)
    assert (steps.counts_of_last(), steps.times_of.get(1)) == ({}, None)


def test_steps_of_equal_figures_count_in_the_ranges() -> None:
    """Also where the last of them goes on after what looked like its end, with other figures."""
    steps = StepFigures()
    for number, so_far in enumerate([1, 3, 5]):
        steps.begin(number, {"calls": so_far - 1 if number == 0 else so_far - 2})
        steps.end(number, {"calls": so_far}, {})
    assert steps.last() == {"calls": 2, "min": {"calls": 1}, "max": {"calls": 2}}
    steps.end(2, {"calls": 12}, {})
    steps.end(2, {"calls": 11}, {})
    assert steps.last() == {"calls": 8, "min": {"calls": 1}, "max": {"calls": 8}}
    steps.begin(3, {"calls": 11})
    steps.end(3, {"calls": 14}, {})
    assert steps.last() == {"calls": 3, "min": {"calls": 1}, "max": {"calls": 8}}


def test_steps_of_inference_follow_one_another() -> None:
    """Each lasts from its begin to its end, and none begins before the last one has ended."""
    tool, model = CountTool(), nn.Linear(4, 4)
    with amanda.apply(tool), torch.no_grad():
        times = []
        for _ in range(4):
            model(torch.ones(2, 4))
            times.append(tool.step_times)
    # Of a step it is known once the next one has begun.
    pairs = [pair for pair in (*times[1:], tool.step_times) if pair is not None]
    assert len(pairs) == 4
    moments = [moment for pair in pairs for moment in pair]
    assert moments == sorted(moments)


class FailingFigures(CountTool):
    """Its figures fail at the end of the second step, once."""

    has_failed = False

    def running_figures(self) -> dict[str, float]:
        if self.steps == 1 and not self.has_failed:
            self.has_failed = True
            raise LookupError("no figures")
        return super().running_figures()


def test_an_error_between_steps_names_the_tool() -> None:
    """It reaches the program, and tells the routine and the point."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with amanda.apply(FailingFigures()), torch.no_grad():
        model(x)
        model(x)
        with pytest.raises(LookupError) as raised:
            model(x)
    [told] = raised.value.__notes__
    assert "FailingFigures." in told
    assert "iteration_end" in told
