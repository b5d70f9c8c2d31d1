"""``coverage``: what module hooks, function modes and layers see; against the real ones."""

from __future__ import annotations

import collections
import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import amanda
from amanda_tools.coverage import CoverageTool
from tests import models
from tests.running import applied
from tests.torch.support import Cube

HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_with_kwargs",
    "_global_forward_hooks_always_called", "_global_backward_hooks",
)  # fmt: skip


def seen_by(tool: CoverageTool, name: str) -> dict[str, str]:
    """Types of the operators that a mechanism sees, by id."""
    return {row["id"]: row["type"] for row in tool.op_rows() if name in row["seen_by"]}


class Watching(TorchFunctionMode):
    """A real mode: of each call that it gets, the operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self._depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append([])
        self._depth += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._depth -= 1

    def analyse(self, context: amanda.OpContext) -> None:
        if self._depth:
            self.calls[-1].append(context.get_op_id())


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt2", "vit"])
def test_function_modes_see_what_a_real_one_sees(name: str) -> None:
    """The operators that run alone in a call that the mode gets."""
    model, inputs = models.build(name)
    tool = applied(CoverageTool(), lambda: model(**inputs))
    mode, watcher = Watching(), amanda.Tool()
    watcher.add_inst_for_op(mode.analyse)
    model, inputs = models.build(name)
    with amanda.apply(watcher), mode:
        model(**inputs)
    alone = {call[0] for call in mode.calls if len(call) == 1}
    found = set(seen_by(tool, "torch_function"))
    assert found == alone
    assert found


def test_functions_written_in_python() -> None:
    """A mode sees ``F.normalize``, not what it computes with; an operator that is alone in a
    function is seen, in a loop too, and one written by the user or run backward is not."""

    def run() -> None:
        x = torch.rand(2, 3, requires_grad=True)
        for _ in range(2):
            x = functional.relu(x)
        Cube.apply(functional.normalize(x)).sum().backward()

    tool = applied(CoverageTool(), run)
    assert set(seen_by(tool, "torch_function")) == {"/setup/rand:0", "/relu:0", "/relu:1", "/sum:0"}


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt2", "vit"])
def test_module_hooks_are_given_what_real_ones_are(name: str) -> None:
    """The operators whose inputs and outputs are those of a call that a forward hook gets."""
    model, inputs = models.build(name)
    tool = applied(CoverageTool(), lambda: model(**inputs))
    found = {op for op in seen_by(tool, "module_hooks") if "/grad/" not in op}
    # Of each running call the operators in it, and with it their tensors, so that ids stay theirs.
    calls: list[list[Any]] = []
    seen: set[str] = set()

    def look(context: amanda.OpContext) -> None:
        if calls:
            tensors = [context.get_inputs(), context.get_outputs()]
            calls[-1].append((context.get_op_id(), *tensors))

    def has_left(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        own = [*module.parameters(), *module.buffers()]
        given = set(map(id, [*own, *pytree.tree_leaves((args, kwargs))]))
        returned = set(map(id, pytree.tree_leaves(output)))
        for op_id, *tensors in calls.pop():
            data, results = ({id(t) for t in of if t is not None} for of in tensors)
            if results and data <= given and results <= returned:
                seen.add(op_id)

    model, inputs = models.build(name)
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: calls.append([]))
        module.register_forward_hook(has_left, with_kwargs=True)
    watcher = amanda.Tool()
    watcher.add_inst_for_op(look, require_outputs=True)
    with amanda.apply(watcher):
        model(**inputs)
    assert found == seen
    assert found


def test_module_hooks_see_the_borders_of_modules() -> None:
    """One operator is its module's; of several, none; parameters and buffers count as given."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, Any]:
            return {"y": [torch.addcmul(shift, self.norm(x), self.scale), torch.exp(x)]}

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) + 1

    model, two, x = Scale(), Two(), torch.rand(3, 4)
    tool = applied(CoverageTool(), lambda: (model(x, shift=x), two(x), torch.cos(x)))
    found = seen_by(tool, "module_hooks")
    # exp: from argument to result. addcmul: what it gets from norm is not its module's to see.
    assert set(found) == {"Scale.norm/batch_norm:0", "Scale/exp:0"}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_module_hooks_backward_are_those_of_full_backward_hooks() -> None:
    """The modules whose full backward hooks see the gradients on both sides of an operator.

    Where several operators lie between these gradients, the hooks see none of them.
    """
    model, inputs = models.build("vit")
    inputs["x"].requires_grad_()
    tool = applied(CoverageTool(), lambda: models.loss(model(**inputs)).backward())
    rows = {row["id"]: row for row in tool.op_rows()}
    backward = [rows[op_id] for op_id in seen_by(tool, "module_hooks") if "/grad/" in op_id]
    leaves = {
        row["module"]
        for row in rows.values()
        if row["direction"] == "forward" and "module_hooks" in row["seen_by"]
    }

    fired: list[str] = []
    model, inputs = models.build("vit")
    inputs["x"].requires_grad_()
    for path, module in model.named_modules():
        module.register_full_backward_hook(lambda *_, path=path: fired.append(path))
    models.loss(model(**inputs)).backward()
    nodes = collections.Counter(
        row["module"]
        for row in rows.values()
        if row["direction"] == "backward" and row["type"] not in ("accumulate_grad", "t_backward")
    )
    # Dropout with probability 0 is called and differentiates nothing.
    alone = {module for module, count in nodes.items() if count == 1}
    assert sorted(row["module"] for row in backward) == sorted(set(fired) & leaves & alone)
    assert {row["type"] for row in backward} >= {"conv2d_backward", "gelu_backward"}


def test_backward_operators_inside_of_a_module() -> None:
    """Of a linear layer the product is at the border, the transposed weight is not; the
    accumulation of gradients is never seen; a module that works in place is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    tool = applied(CoverageTool(), lambda: model(torch.rand(2, 4)).sum().backward())
    names = [op.rpartition("/")[2] for op in seen_by(tool, "module_hooks") if "/grad/" in op]
    assert sorted(names) == ["AddmmBackward0:0", "AddmmBackward0:0", "ReluBackward0:0"]
    assert not any("/grad/" in op_id for op_id in seen_by(tool, "torch_function"))


def test_figures_add_up() -> None:
    """Operators and executions, by mechanism, type and module."""
    model, inputs = models.build("resnet18")

    def run() -> None:
        for _ in range(2):
            models.loss(model(**inputs)).backward()

    tool = applied(CoverageTool(), run)
    rows, summary = tool.op_rows(), tool.summary()
    for name, figures in summary["mechanisms"].items():
        for way in ("forward", "backward"):
            own = [row for row in rows if row["direction"] == way]
            mine = [row for row in own if name in row["seen_by"]]
            found = figures[way]
            assert (found["ops"], found["of_ops"]) == (len(mine), len(own))
            assert found["executions"] == sum(row["executions"] for row in mine)
            assert found["share"] == len(mine) / len(own)
    assert {row["executions"] for row in rows if row["type"] == "conv2d"} == {2}
    # The paper, section 6.4: residual additions and accumulations are missed.
    convolutions = [r for r in rows if r["type"] == "conv2d"]
    assert len(convolutions) == 20
    assert all("module_hooks" in row["seen_by"] for row in convolutions)
    accumulations = [row for row in rows if row["type"] == "accumulate_grad"]
    assert len(accumulations) > 20
    assert all("module_hooks" not in row["seen_by"] for row in accumulations)
    additions = [r for r in rows if r["type"] == "add" and r["direction"] == "forward"]
    assert len(additions) >= 8
    assert all("module_hooks" not in row["seen_by"] for row in additions)


@pytest.mark.parametrize(("name", "training"), [("encoder", False), ("resnet18", True)])
def test_watching_changes_nothing(name: str, training: bool) -> None:
    """Fused paths are taken as ever, results and gradients keep their bits, and no hook stays."""
    before = {hooks: dict(getattr(nn.modules.module, hooks)) for hooks in HOOKS}

    def run(*tools: amanda.Tool) -> list[torch.Tensor]:
        model, inputs = models.build(name, training=training)
        torch.manual_seed(2)
        with contextlib.ExitStack() as stack:
            if tools:
                stack.enter_context(amanda.apply(*tools))
            with torch.set_grad_enabled(training):
                output = model(**inputs)
                if training:
                    models.loss(output).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [output, *gradients, torch.get_rng_state()]

    tool = CoverageTool()
    pairs = list(zip(run(), run(tool), strict=True))
    assert len(pairs) > (2 if training else 1)
    assert all(torch.equal(expected, found) for expected, found in pairs)
    assert {hooks: dict(getattr(nn.modules.module, hooks)) for hooks in HOOKS} == before
    if name == "encoder":
        fused = [r for r in tool.op_rows() if r["name"] == "_transformer_encoder_layer_fwd"]
        assert all("module_hooks" in row["seen_by"] for row in fused)
        assert fused


def test_a_module_that_fails() -> None:
    """What runs after a caught exception is assigned to the right module."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(torch.sin(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing = Failing()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.failing(x)
            except ValueError:
                return torch.cos(x)

    outer = Outer()
    tool = applied(CoverageTool(), lambda: outer(torch.rand(2)))
    assert set(seen_by(tool, "module_hooks")) == {"Outer/cos:0"}


def test_files_and_tables(tmp_path: Path) -> None:
    """A table of the rows, a bar chart, and the common result."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    tool = applied(
        CoverageTool(phases="all"), lambda: (model(torch.rand(1, 4)) + 1).sum().backward()
    )
    paths = tool.write_files(tmp_path, "coverage")
    assert [path.name for path in paths] == ["coverage.csv"]
    with paths[0].open(newline="") as file:
        assert {row["seen_by"] for row in csv.DictReader(file)} >= {"amanda module_hooks"}
    figures = tool.summary()["mechanisms"]["module_hooks"]["in_modules"]["forward"]
    assert (figures["ops"], figures["of_ops"]) == (2, 2)
    [chart] = tool.charts()
    assert {f"forward: {name}" for name in tool.summary()["mechanisms"]} < set(chart.labels)
    assert chart.values["seen"][:3] == [2, 2, 2]
    assert [a + b for a, b in zip(*chart.values.values(), strict=True)][:3] == [2, 2, 2]
    assert json.loads(json.dumps(tool.result())) == tool.result()
    overview, forward, _ = tool.tables()
    assert [row[0] for row in overview.rows[:3]] == [
        "amanda", "module_hooks (measured)", "torch_function (derived)",
    ]  # fmt: skip
    assert overview.rows[1][1:] == ("forward", 2, 33.3, 2, 100.0)
    assert {row[0] for row in forward.rows} >= {"linear", "relu", "add"}
    [outside] = applied(CoverageTool(), lambda: torch.rand(1)).charts()
    assert outside.values["seen"][0] == 1
    nothing = applied(CoverageTool(csv=False), lambda: torch.rand(1))
    assert list(nothing.write_files(tmp_path, "coverage")) == []
