"""``--ops``, ``--modules``, ``--every`` and ``--skip``: one selection for all tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda import OpContext, Tool
from amanda.cli.selection import Selection
from amanda.testing import loopback as lb
from amanda.tools.graph_tracing import GraphTracingTool
from amanda_tools.count import CountTool
from tests.cli.conftest import Command

Script = Callable[..., Path]


def counted(selection: Selection, times: int = 1) -> dict[str, int]:
    """Executions that a counter sees of a net with two layers, by id."""
    net = lb.Sequential(lb.Linear([[1.0]]), lb.Sequential(lb.Linear([[2.0]])))
    tool = CountTool()
    selection.restrict(tool)
    with amanda.apply(tool):
        for _ in range(times):
            lb.relu(net(lb.tensor([[2.0]]))).backward()
    return {row["id"]: row["executions"] for row in tool.op_rows()}


def test_types_select_both_passes() -> None:
    """A type selects its operators and their backward operators; a name of its own too."""
    found = counted(Selection(ops=("linear",)))
    assert {i.partition("/grad")[0] for i in found} == {
        "Sequential.0/linear:0", "Sequential.1.0/linear:0",
    }  # fmt: skip
    assert len(found) > 2
    assert list(counted(Selection(ops=("ReluBackward",)))) == ["/relu:0/grad/ReluBackward:0"]


def test_modules_are_patterns() -> None:
    """A pattern of paths; what runs outside of modules has no path."""
    found = counted(Selection(modules=("1.*",)))
    assert {i.partition("/grad")[0] for i in found} == {"Sequential.1.0/linear:0"}
    assert not counted(Selection(modules=("1.*",), ops=("relu",)))


@pytest.mark.parametrize(
    ("every", "skip", "times", "seen"), [(1, 0, 5, 5), (2, 0, 5, 3), (1, 3, 5, 2), (3, 2, 9, 3)]
)
def test_executions_are_selected(every: int, skip: int, times: int, seen: int) -> None:
    """Each N-th execution after the first ones, of both passes alike."""
    found = counted(Selection(every=every, skip=skip), times)
    assert set(found.values()) == {seen}


def test_a_routine_that_is_left_out_changes_nothing() -> None:
    """Values of a routine enter at the selected executions only; a replacement always acts."""

    class Negate(Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: OpContext) -> None:
            if context.get_op().__name__ == "relu":
                context.insert_after_op(lambda y: lb.mul(y, -1.0))
            if context.get_op().__name__ == "sum":
                context.replace_op(lambda x: x)

    tool = Negate()
    Selection(skip=1).restrict(tool)
    seen: list[Any] = []
    with amanda.apply(tool):
        for _ in range(2):
            seen.append((lb.relu(lb.tensor([3.0])).data, lb.sum(lb.tensor([1.0, 2.0])).data))
            amanda.new_iteration()
    assert seen == [([3.0], [1.0, 2.0]), ([-3.0], [1.0, 2.0])]


def test_what_a_tool_depends_on_is_restricted_too() -> None:
    """Once, although two tools depend on it."""
    tracing, first, second = GraphTracingTool(), Tool(), Tool()
    first.depends_on(tracing)
    second.depends_on(tracing)
    Selection(ops=("relu",)).restrict(first, second)
    with amanda.apply(first, second):
        lb.sum(lb.relu(lb.tensor([1.0])))
    assert [op.id for op in tracing.graph.ops] == ["/relu:0"]


def test_no_selection_leaves_tools_alone() -> None:
    """Without any option a tool is what it was."""
    tool = CountTool()
    before = dict(vars(tool)["_analyses"])
    Selection().restrict(tool)
    assert vars(tool)["_analyses"] == before


def test_an_error_names_the_routine() -> None:
    """A gate does not hide whose routine failed."""

    class Broken(Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: OpContext) -> None:
            context.insert_before_op(self.break_it)

        def break_it(self, *inputs: Any) -> None:
            raise RuntimeError("broken")

    tool = Broken()
    Selection(every=2).restrict(tool)
    with amanda.apply(tool), pytest.raises(RuntimeError, match="broken") as caught:
        lb.relu(lb.tensor([1.0]))
    assert any("Broken.break_it at op /relu:0" in note for note in caught.value.__notes__)


MINIGRAD = """
import minigrad as mg
a = mg.Tensor(2)
mg.mul(mg.add(a, a), a)
"""


def test_on_the_command_line(amanda: Command, script: Script, tmp_path: Path) -> None:
    """All tools of the run see the selection; wrong numbers stop it before the program."""

    def rows_of(*selection: str) -> list[list[str]]:
        words = ["-t", "count:ops=add+mul,largest", "-o", "out", *selection]
        run = amanda("run", *words, str(script(MINIGRAD)))
        assert run.returncode == 0, run.stderr
        results = [tmp_path / f"out/{name}.json" for name in ("count", "largest")]
        return [[row["type"] for row in json.loads(r.read_text())["ops"]] for r in results]

    assert rows_of() == [["add", "mul"], ["add", "mul"]]
    assert rows_of("--ops", "mul") == [["mul"], ["mul"]]
    # Each operator runs once only; the analysis of the counter lists it with no execution.
    assert rows_of("--skip=1") == [["add", "mul"], []]
    words = ["--ops", "add+mull", "--modules", "nobody.*", str(script(MINIGRAD))]
    mistaken = amanda("run", "-t", "count", *words)
    assert mistaken.returncode == 0
    complaint = "amanda: warning: {} fits no operator that the tools have met"
    assert mistaken.stderr.splitlines() == [
        complaint.format("--ops mull"),
        complaint.format("--modules nobody.*"),
    ]
    for option in ("--every=0", "--skip=-1"):
        wrong = amanda("run", "-t", "count", option, str(script("print('ran')")))
        assert wrong.returncode == 2
        assert "--every takes a number from 1" in wrong.stderr
        assert wrong.stdout == ""
