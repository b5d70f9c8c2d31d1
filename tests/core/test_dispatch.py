"""The dispatcher, records and plans, on the loopback driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

import amanda
from amanda.engine.dispatch import Dispatcher, create_driver
from amanda.errors import CapabilityError, SelectionError
from amanda.interface.action import Action, ActionKind
from amanda.interface.calls import OpCall
from amanda.interface.context import OpContext
from amanda.state import ATTACHED
from amanda.testing import loopback as lb


def dispatcher() -> Dispatcher:
    """The dispatcher of the attached loopback driver."""
    return ATTACHED[lb.LoopbackDriver].dispatcher


def tool(analysis: Any, **kind: bool) -> amanda.Tool:
    """A tool with one analysis."""
    made = amanda.Tool()
    made.add_inst_for_op(analysis, **kind)
    return made


def call(op_id: str = "/add:0", inputs: Sequence[Any] = ()) -> OpCall:
    """An execution of an op as a driver tells of it."""
    return OpCall(lb.add, op_id, inputs, ["input"] * len(inputs))


def test_an_analysis_that_registers_another() -> None:
    """An analysis that is registered while an operator is analysed runs at that operator if its
    tool's turn is yet to come."""
    seen: list[str] = []
    later = tool(lambda context: seen.append("known"))

    def analyse(context: OpContext) -> None:
        if not seen:
            seen.append("first")
            later.add_inst_for_op(lambda context: seen.append("added"))

    with amanda.apply(tool(analyse), later):
        lb.add(lb.tensor(1.0), lb.tensor(2.0))
    assert seen == ["first", "known", "added"]


def test_cacheable() -> None:
    """A plan may be kept unless the cache is off or a generator holds a scope."""

    def generator() -> Any:
        with amanda.apply(amanda.Tool()):
            yield dispatcher().is_cacheable()

    with amanda.apply(amanda.Tool()):
        assert dispatcher().is_cacheable()
        with amanda.cache_disabled():
            assert not dispatcher().is_cacheable()
        assert list(generator()) == [False]


def test_selection_checked_at_run_time() -> None:
    """A selection that the analysis could not check is checked when the routine runs."""
    action = Action(ActionKind.AFTER_OP, amanda.Tool(), print, (3,), {}, False, "/add:0")
    with (
        amanda.apply(amanda.Tool()),
        pytest.raises(SelectionError, match=r"Tool\.print: outputs=\[3\].*/add:0.*1 outputs"),
    ):
        dispatcher().run(action, [lb.tensor(1.0)])


@pytest.mark.parametrize("selection", [[1, 1], [-1, -1], [1, "other"], ["other", "other"]])
def test_no_tensor_is_selected_twice(selection: list[int | str]) -> None:
    """Two returned tensors cannot both replace it; a replacement's function may get it twice."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(print, inputs=selection))
    wanted = re.escape(f"inputs={selection} at op /add:0 selects a tensor twice")
    with amanda.apply(tool), pytest.raises(SelectionError, match=wanted):
        lb.add(lb.tensor(1.0), lb.tensor(2.0))
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.replace_op(lb.mul, inputs=selection))
    with amanda.apply(tool):
        assert lb.add(lb.tensor(1.0), lb.tensor(3.0)).tolist() == 9.0


def test_a_position_and_one_from_the_end_may_meet() -> None:
    """An operator with one input has its first and its last one; the routine's last result is in
    its place."""
    tool = amanda.Tool()
    seen: list[float] = []

    def double_both(first: lb.Tensor, last: lb.Tensor) -> list[lb.Tensor]:
        seen.extend((first.tolist(), last.tolist()))
        return [lb.add(first, first), lb.add(lb.add(last, last), last)]

    tool.add_inst_for_op(lambda context: context.insert_before_op(double_both, inputs=[0, -1]))
    with amanda.apply(tool):
        assert lb.relu(lb.tensor(4.0)).tolist() == 12.0
        assert lb.add(lb.tensor(1.0), lb.tensor(2.0)).tolist() == 8.0
    assert seen == [4.0, 4.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (print, "Tool.print"),
        (lambda: None, "Tool.<lambda>"),
        (amanda.Tool().reanalyse, "Tool.reanalyse"),
    ],
)
def test_routine_names(func: Any, name: str) -> None:
    """A routine is named after its tool's class and its function."""
    assert Action(ActionKind.AFTER_OP, amanda.Tool(), func, None, {}, False, "x").routine == name


def test_frozen_op_needs_a_capability() -> None:
    """A driver that cannot run a single op again says so, naming the capability."""
    with pytest.raises(CapabilityError, match=r"/add:0.*Capability\.REPLAY"):
        call().freeze()


def test_value_of_a_plain_call() -> None:
    """A driver that does not know values gives None."""
    assert call(inputs=[1]).value(0) is None


def test_quiet_backward() -> None:
    """Threads without a scope of their own follow a backward pass that is announced as quiet."""
    own = create_driver(lb.LoopbackDriver).dispatcher
    with own.quiet_backward():
        assert own.is_paused()
    assert not own.is_paused()


@pytest.mark.parametrize(("kind", "notes"), [(KeyboardInterrupt, 0), (ValueError, 1)])
def test_an_interrupt_is_not_put_down_to_a_tool(kind: type[BaseException], notes: int) -> None:
    """It hits a routine by chance; an error of a routine has a note."""

    def failing(*tensors: Any) -> None:
        raise kind

    with (
        pytest.raises(kind) as caught,
        amanda.apply(tool(lambda context: context.insert_before_op(failing))),
    ):
        lb.add(lb.tensor(1.0), 2.0)
    assert len(getattr(caught.value, "__notes__", ())) == notes


def test_specs_of_inputs_are_told_without_the_tensors() -> None:
    """A forward analysis and a backward one read the shapes of the forward inputs."""
    found: list[Any] = []
    looking = amanda.Tool()
    for backward in (False, True):
        looking.add_inst_for_op(
            lambda context: found.append(
                [spec and spec.shape for spec in context.get_input_specs()]
            ),
            backward=backward,
        )
    with amanda.apply(looking):
        lb.relu(lb.parameter([[1.0, -2.0]])).backward()
    # The operator, its gradient, and the accumulation of that.
    assert found == [[(1, 2)]] * 3


def test_a_negative_position_counts_from_the_end_at_each_execution() -> None:
    """outputs=[-1] is the last output also where an operator has others than when it was seen."""
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        if context.get_op().__name__ == "split":
            context.insert_after_op(lambda t: seen.append(t.tolist()), outputs=[-1])

    x = lb.tensor([[1.0], [2.0], [3.0], [4.0]])
    with amanda.apply(tool(analyse, require_outputs=True)):
        for sections in (2, 4, 1):
            lb.split(x, sections)
            amanda.new_iteration()
    assert seen == [[[3.0], [4.0]], [[4.0]], x.tolist()]
