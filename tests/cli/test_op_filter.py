"""``--ops``, ``--modules``, ``--every`` and ``--skip``: one filter for all tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda import OpContext, Tool
from amanda.testing import loopback as lb
from amanda.tools.graph_tracing import GraphTracingTool
from amanda.tools.mapping import MappingTool
from amanda.tools.op_filter import OpFilter
from amanda_tools.count import CountTool
from tests.cli.conftest import Command

Script = Callable[..., Path]


def counted(op_filter: OpFilter, times: int = 1) -> dict[str, int]:
    """Executions that a counter sees of a net with two layers, by id."""
    net = lb.Sequential(lb.Linear([[1.0]]), lb.Sequential(lb.Linear([[2.0]])))
    tool = CountTool()
    with amanda.apply(tool, op_filter=op_filter):
        for _ in range(times):
            lb.relu(net(lb.tensor([[2.0]]))).backward()
    return {row["id"]: row["executions"] for row in tool.op_rows()}


def test_types_select_both_passes() -> None:
    """A type selects its operators and their backward operators; a name of its own too."""
    found = counted(OpFilter(ops=("linear",)))
    assert {i.partition("/grad")[0] for i in found} == {
        "Sequential.0/linear:0", "Sequential.1.0/linear:0",
    }  # fmt: skip
    assert len(found) > 2
    assert list(counted(OpFilter(ops=("ReluBackward",)))) == ["/relu:0/grad/ReluBackward:0"]


def test_modules_are_patterns() -> None:
    """A pattern of paths; what runs outside of modules has no path."""
    found = counted(OpFilter(modules=("1.*",)))
    assert {i.partition("/grad")[0] for i in found} == {"Sequential.1.0/linear:0"}
    assert not counted(OpFilter(modules=("1.*",), ops=("relu",)))


@pytest.mark.parametrize(
    ("every", "skip", "times", "seen"), [(1, 0, 5, 5), (2, 0, 5, 3), (1, 3, 5, 2), (3, 2, 9, 3)]
)
def test_executions_are_selected(every: int, skip: int, times: int, seen: int) -> None:
    """Each N-th execution after the first ones, of both passes alike."""
    found = counted(OpFilter(every=every, skip=skip), times)
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

    seen: list[Any] = []
    with amanda.apply(Negate(), op_filter=OpFilter(skip=1)):
        for _ in range(2):
            seen.append((lb.relu(lb.tensor([3.0])).data, lb.sum(lb.tensor([1.0, 2.0])).data))
            amanda.new_iteration()
    assert seen == [([3.0], [1.0, 2.0]), ([-3.0], [1.0, 2.0])]


def test_tools_that_others_depend_on_are_restricted_too() -> None:
    """All tools of the scope are, whoever has brought them."""
    tracing, first, second = GraphTracingTool(), Tool(), Tool()
    first.depends_on(tracing)
    second.depends_on(tracing)
    with amanda.apply(first, second, op_filter=OpFilter(ops=("relu",))):
        lb.sum(lb.relu(lb.tensor([1.0])))
    assert [op.id for op in tracing.graph.ops] == ["/relu:0"]


def test_a_filter_belongs_to_its_scope() -> None:
    """The same tool sees everything in another scope, without a trace of the filter."""
    tool = CountTool()
    before = dict(vars(tool))
    for op_filter in (OpFilter(ops=("relu",)), OpFilter(), None):
        with amanda.apply(tool, op_filter=op_filter):
            lb.sum(lb.relu(lb.tensor([1.0])))
            amanda.new_iteration()
    found = {row["id"]: row["executions"] for row in tool.op_rows()}
    assert found == {"/relu:0": 3, "/sum:0": 2}
    assert vars(tool).keys() == before.keys()
    assert vars(tool)["_analyses"] == before["_analyses"]


def test_a_filter_knows_the_types_of_all_tools() -> None:
    """Types come from the mapping rules, also for tools that do not depend on them."""

    class Renaming(MappingTool):
        @classmethod
        def standard(cls) -> MappingTool:
            return cls([["loopback", rename]])

    def rename(context: OpContext) -> None:
        context["op_type"] = {"relu": "rectify"}.get(context.get_op().__name__)

    class Filter(OpFilter):
        @property
        def dependencies(self) -> tuple[Tool, ...]:
            return (Renaming.standard(),)

    seen: list[str] = []
    tool = Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op_id()))
    with amanda.apply(tool, op_filter=Filter(ops=("rectify",))):
        lb.sum(lb.relu(lb.tensor([1.0])))
    assert seen == ["/relu:0"]


def test_an_operator_is_asked_about_once() -> None:
    """However many tools and points there are; once for each of its backward operators."""
    asked: list[str] = []

    class Asking(OpFilter):
        def selects(self, context: OpContext) -> bool:
            asked.append(context.get_backward_op_id() or context.get_op_id())
            return super().selects(context)

    tools = [CountTool(), CountTool(), GraphTracingTool()]
    with amanda.apply(*tools, op_filter=Asking(ops=("relu", "sum"))):
        for _ in range(2):
            lb.sum(lb.relu(lb.tensor([1.0], requires_grad=True))).backward()
            tools[0].reanalyse()
    assert len(asked) == len(set(asked)) > 2


def test_reanalysed_routines_count_anew() -> None:
    """A tool's routines that are recorded again are restricted again, those of others once."""
    first, second = Counting(), Counting()
    with amanda.apply(first, second, op_filter=OpFilter(skip=1)):
        for _ in range(3):
            lb.relu(lb.tensor([1.0]))
            amanda.new_iteration()
            first.reanalyse()
    assert (first.runs, second.runs) == (0, 2)


class Counting(Tool):
    """Counts executions of its routine."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self.count, inputs=[]))

    def count(self) -> None:
        self.runs += 1


@pytest.mark.parametrize("wrong", [{"every": 0}, {"skip": -1}])
def test_wrong_numbers(wrong: dict[str, int]) -> None:
    """Neither less than every execution nor a negative number of them."""
    with pytest.raises(ValueError, match=f"'{next(iter(wrong))}' must be >="):
        OpFilter(**wrong)


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

    op_filter = OpFilter(every=2)
    with (
        amanda.apply(Broken(), op_filter=op_filter),
        pytest.raises(RuntimeError, match="broken") as caught,
    ):
        lb.relu(lb.tensor([1.0]))
    assert any("Broken.break_it at op /relu:0" in note for note in caught.value.__notes__)


MINIGRAD = """
import minigrad as mg
a = mg.MiniTensor(2)
mg.mul(mg.add(a, a), a)
"""


def test_on_the_command_line(amanda: Command, script: Script, tmp_path: Path) -> None:
    """All tools of the run see the selection."""

    def rows_of(*selection: str) -> list[list[str]]:
        words = ["-t", "count,largest", "-o", "out", *selection]
        run = amanda("run", *words, str(script(MINIGRAD)))
        assert run.returncode == 0, run.stderr
        results = [tmp_path / f"out/{name}.json" for name in ("count", "largest")]
        return [[row["type"] for row in json.loads(r.read_text())["ops"]] for r in results]

    assert rows_of() == [["add", "mul"], ["add", "mul"]]
    assert rows_of("--ops", "mul") == [["mul"], ["mul"]]
    # Each operator runs once only; the analysis of the counter lists it with no execution.
    assert rows_of("--skip=1") == [["add", "mul"], []]
    words = ["--ops", "add+mull", "--modules", "(nobody|I).*", str(script(MINIGRAD))]
    mistaken = amanda("run", "-t", "count", *words)
    assert mistaken.returncode == 0
    complaint = "amanda: warning: {} matches no operator that the tools have seen"
    assert mistaken.stderr.splitlines() == [
        complaint.format("--ops mull") + "; there are add, mul",
        complaint.format("--modules (nobody|I).*"),
    ]


def test_a_single_name_is_a_list_of_one() -> None:
    """A text is not a list of its characters, which would select nothing."""
    assert OpFilter(ops="linear", modules="1.*") == OpFilter(ops=["linear"], modules=["1.*"])
    assert counted(OpFilter(ops="linear")) == counted(OpFilter(ops=["linear"]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ops": 3}, "takes names of operators and modules as texts, got 3"),
        ({"modules": [len]}, "takes names of operators and modules as texts, got"),
        ({"every": "2"}, "takes a whole number for every, got '2'"),
        ({"skip": 1.5}, "takes a whole number for skip, got 1.5"),
    ],
)
def test_an_argument_of_another_type_is_named(wrong: dict[str, Any], said: str) -> None:
    """What a filter takes, and what it got."""
    with pytest.raises(TypeError, match=said):
        OpFilter(**wrong)


def test_a_scope_takes_no_other_filter() -> None:
    """A dictionary of its arguments is none; the message has the right form."""
    with pytest.raises(TypeError, match=r"must be an amanda\.tools\.op_filter\.OpFilter"):
        amanda.apply(Tool(), op_filter={"ops": ["linear"]})  # type: ignore[arg-type]


def test_a_list_of_tools_is_answered_with_the_right_form() -> None:
    """Tools are arguments of their own."""
    with pytest.raises(TypeError, match=r"pass several one by one, as \*tools"):
        amanda.apply([Tool(), Tool()])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, 3, CountTool])
def test_a_tool_is_loaded_by_its_name(name: Any) -> None:
    """What is not text names none."""
    with pytest.raises(TypeError, match="takes the name of a tool, got"):
        amanda.tools.load(name)
