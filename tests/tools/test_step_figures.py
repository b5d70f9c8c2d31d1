"""FLOPs of one step: the analytic figure, however many steps a script has trained."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda.cli.pages import ModuleTensors
from amanda_tools._operators.peaks import peak_of
from amanda_tools.count import CountTool
from amanda_tools.flops import FlopsTool
from amanda_tools.profile import ProfileTool
from tests import models
from tests.running import applied

# isort: split
import transformers


def eager(name: str) -> models.Built:
    """A model with attention for which FlopCounterMode has formulas."""
    model, inputs = models.build(name)
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")
    return model, inputs


@pytest.mark.parametrize("name", ["bert", "llama", "resnet50"])
def test_a_step_has_the_analytic_figure(name: str) -> None:
    """FLOPs of a step equal those that PyTorch's own counter finds, after one step and after three;
    what builds and initializes the model is not part of it."""
    with FlopCounterMode(display=False) as counter:
        models.train(lambda: eager(name), 1)
    for steps in 1, 3:
        run = functools.partial(models.train, lambda: eager(name), steps)
        found = applied(FlopsTool(), run).result()["summary"]
        step = found["per_step"]
        assert found["steps"] == steps
        assert step["flops"] + step["flops_backward"] == counter.get_total_flops()
        assert not {"min", "max"} & step.keys()
        assert found["flops"] == steps * step["flops"]
        assert found["phases"]["setup"]["ops"] > 0
        assert found["phases"]["setup"]["flops"] == found["phases"]["optimizer"]["flops"] == 0


class Asked(CountTool):
    """Notes how often its figures are asked for."""

    asked = 0

    def running_figures(self) -> dict[str, float]:
        """Counts the call."""
        self.asked += 1
        return super().running_figures()


def test_figures_are_asked_for_once_in_a_step() -> None:
    """Where a step begins as the last one ends, its figures begin with those of that end."""
    tool, cell, state = Asked(), nn.LSTMCell(4, 4), (torch.ones(1, 4), torch.ones(1, 4))
    with torch.no_grad(), amanda.apply(tool):
        for _ in range(10):
            state = cell(state[0], state)
    found = tool.figures_of_steps()
    assert (tool.steps, tool.asked) == (10, 11)
    assert [found[step]["forward"] for step in range(10)] == [found[0]["forward"]] * 10
    assert (
        sum(figures["forward"] for figures in found.values()) == tool.running_figures()["forward"]
    )


def test_steps_are_counted_over_all_scopes() -> None:
    """Those of a second scope go on, and are none that begin after evaluations."""
    tool = CountTool()
    for _ in range(2):
        applied(tool, functools.partial(models.train, lambda: eager("bert"), 2))
    assert tool.result()["summary"]["steps"] == len(tool.figures_of_steps()) == 4
    assert not tool.trains_late


def test_what_runs_between_steps_belongs_to_none() -> None:
    """Operators between the end of a step and the next one are in the figures of no step."""
    tool, model = Asked(), nn.Linear(4, 4)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 4)
    with amanda.apply(tool):
        for step in range(4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            for _ in range(step):
                (x @ x.T).relu()
    found = tool.figures_of_steps()
    # The first step creates what the optimizer keeps.
    assert found[1]["forward"] == found[2]["forward"] == found[3]["forward"]
    assert sum(figures["forward"] for figures in found.values()) < tool.running_figures()["forward"]


def test_figures_of_steps_are_lines_over_the_run() -> None:
    """A chart shows the operations of each step, if there are two at least."""
    for steps in 1, 3:
        tool, profile = FlopsTool(), ProfileTool(memory=False)
        with amanda.apply(tool, profile):
            models.train(models.bert, steps)
        found = [*tool.charts(), *profile.charts()]
        charts = {chart.title: chart for chart in found if chart.kind == "line"}
        if steps == 1:
            assert not charts
            continue
        figure = tool.result()["summary"]["per_step"]["flops"]
        assert list(charts["operations per step"].labels) == [0, 1, 2]
        assert charts["operations per step"].values["forward"] == [figure] * 3


@pytest.mark.parametrize("memory", [True, False])
def test_the_memory_of_steps_is_a_line_over_the_run(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory in use as each step ends, and the most that was in use within it."""
    in_use = 1
    # That of a device: what the process really uses depends on what its allocator gives back.
    monkeypatch.setattr("amanda_tools.profile.device_bytes", lambda: in_use)
    tool = ProfileTool(memory=memory)
    layer = nn.Linear(4, 4)

    def use(count: int) -> None:
        nonlocal in_use
        in_use = count

    def step(within: int, at_its_end: int) -> None:
        hidden = layer(torch.rand(2, 4))
        use(within)
        output = hidden.relu()
        use(at_its_end)
        output.sum().backward()

    with amanda.apply(tool):
        for within, at_its_end in [(10, 5), (900, 300), (310, 300)]:
            step(within, at_its_end)
    charts = {chart.title: chart for chart in tool.charts()}
    per_step = tool.result()["summary"]["per_step"]
    assert ("memory per step" in charts) is ("peak_bytes" in per_step) is memory
    if not memory:
        return
    lines = charts["memory per step"].values
    assert list(lines["at its end"]) == [5, 300, 300]
    assert list(lines["peak"]) == [10, 900, 310]
    assert per_step["memory_bytes"] == 300


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A10", 125.0),
        ("Some Device", 0.0),
    ],
)
def test_peaks_are_known_by_name(name: str, peak: float) -> None:
    """The longest part of a name that fits counts."""
    assert peak_of(name) == peak


def test_the_utilization_is_the_share_of_a_given_peak() -> None:
    """Operations of a step over those of the peak in the median duration of a step."""
    tool = applied(FlopsTool(peak=0.001), lambda: models.train(models.bert, 3))
    summary = tool.result()["summary"]
    step = summary["per_step"]
    done = step["flops"] + step["flops_backward"]
    assert summary["mfu"] == pytest.approx(done / (summary["step_seconds"] * 1e9))
    assert any("MFU" in row[0] for row in next(iter(tool.tables())).rows)
    first = applied(FlopsTool(), lambda: models.train(models.bert, 1))
    assert first.result()["summary"]["mfu"] is None


@pytest.mark.parametrize("evaluations", ["before", "between", "none"])
def test_shapes_and_batches_are_those_of_training(evaluations: str) -> None:
    """Shapes, bytes that are saved and the batch are those of a training step, also where a loop
    evaluates before it trains, or between its steps, with other samples."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tools, modules = (FlopsTool(), ProfileTool(limit=0)), ModuleTensors()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.rand(64, 8))

    with amanda.apply(*tools, modules):
        if evaluations == "before":
            evaluate()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(5, 8)).pow(2).mean().backward()
            optimizer.step()
            if evaluations == "between":
                evaluate()
    flops, profile = (tool.result() for tool in tools)
    assert flops["summary"]["batch"] == 5
    assert flops["summary"]["activation_bytes"] == 4 * 5 * (16 + 16 + 4)
    [last] = [row for row in flops["ops"] if row["id"] == "Sequential.2/linear:0"]
    assert last["outputs"][0]["shape"] == [5, 4]
    shapes = [(row["path"], row["inputs"][0]["shape"], row["outputs"][0]["shape"]) for row in
              modules.rows()]  # fmt: skip
    assert shapes == [
        ("Sequential.0", [5, 8], [5, 16]), ("Sequential.1", [5, 16], [5, 16]),
        ("Sequential.2", [5, 16], [5, 4]), ("Sequential", [5, 8], [5, 4]),
    ]  # fmt: skip
    [gelu] = [row for row in profile["ops"] if row["type"] == "gelu"]
    assert (gelu["saved_bytes"], gelu["outputs"][0]["shape"]) == (4 * 5 * 16, [5, 16])
