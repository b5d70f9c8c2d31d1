"""Lowering of actions into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda.inline import Check, Counter, Mark, MemoryChange, MemoryUse, Ring, ShapeSum, Timer
from amanda.inline.steps import Step, StepKind, are_paired, joined, lowered
from amanda.interface.action import Action, ActionKind

TOOL = amanda.Tool()


def action(func: Callable[..., Any], select: tuple[int, ...] | None = None, **facts: Any) -> Action:
    """An action before an operator."""
    kwargs, ad = facts.pop("kwargs", {}), facts.pop("differentiable", False)
    return Action(ActionKind.BEFORE_OP, TOOL, func, select, kwargs, ad, "/add:0")


def described(step: Step) -> tuple[str, Any, bool]:
    """The kind, the routine and the end of a step."""
    return step.kind.name, step.routine, step.ends


def check(overwrites: bool | None = None) -> Check:
    """A check for which all tensors are finite."""
    found = lambda inputs, outputs, was_finite: None  # noqa: E731
    return Check(lambda tensor: True, found, overwrites=overwrites)


def test_each_routine_says_what_it_lowers_to() -> None:
    """Counters, timers, marks, changes of memory, sums and checks have steps of their kinds, for
    both routines."""
    counter, timer = Counter(), Timer()
    change, total, finite = MemoryChange(MemoryUse()), ShapeSum(lambda shapes: 1), check()
    mark = Mark(Ring(2, int), 0)
    found = [
        described(lowered(action(func, select)))
        for func, select in (
            (counter, ()),
            (counter, None),
            (timer.start, ()),
            (timer.stop, None),
            (change.before, ()),
            (change.after, ()),
            (total.before, None),
            (total.after, None),
            (total.after, ()),
            (finite.before, None),
            (finite.after, None),
            (mark.before, ()),
            (mark.after, ()),
        )
    ]
    assert found == [
        ("COUNT", counter, False),
        ("COUNT", counter, False),
        ("CLOCK", timer, False),
        ("CLOCK", timer, True),
        ("MEMORY", change, False),
        ("MEMORY", change, True),
        ("SHAPE_SUM", total, False),
        ("SHAPE_SUM", total, True),
        ("SHAPE_SUM", total, True),
        ("CHECK", finite, False),
        ("CHECK", finite, True),
        ("MARK", mark, False),
        ("MARK", mark, True),
    ]


class OtherCounter(Counter):
    """It may do something else."""


class OtherTimer(Timer):
    """It may do something else, and may be called."""

    def __call__(self, *tensors: Any) -> None: ...


class OtherUse(MemoryUse):
    """It may read something else."""


@pytest.mark.parametrize(
    "made",
    [
        action(print),
        action(OtherCounter()),
        action(OtherTimer().start),
        action(OtherTimer()),
        action(MemoryChange(OtherUse()).before),
        action(Counter(), kwargs={"key": 1}),
        action(Counter(), (0,)),
        action(Counter().__call__),
        action(Timer().add),
        action(Timer().start, differentiable=True),
        action(check().before, (0,)),
        action(check(overwrites=True).before),
        action(ShapeSum(lambda shapes: 1).before, ()),
    ],
    ids=lambda made: made.routine,
)
def test_anything_else_is_called(made: Action) -> None:
    """Other functions, subclasses, keywords, other methods and other selections are calls."""
    step = lowered(made)
    assert described(step) == ("CALL", None, False)
    assert step.action is made


def test_a_differentiable_counter_counts() -> None:
    """A counter of a tool whose routines take part in AD is a COUNT: it looks at no tensor."""
    assert lowered(action(Counter(), differentiable=True)).kind is StepKind.COUNT


def test_pairs_around_an_operator() -> None:
    """Steps are paired if each routine begins before the operator and ends after it, once."""
    timer, other = Timer(), Timer()
    start, stop = lowered(action(timer.start)), lowered(action(timer.stop))
    counter = lowered(action(Counter()))
    assert are_paired([counter, start], [stop, counter])
    assert are_paired([counter], [])
    assert not are_paired([start], [])
    assert not are_paired([], [stop])
    assert not are_paired([stop], [start])
    assert not are_paired([start, start], [stop, stop])
    assert not are_paired([start], [lowered(action(other.stop))])


def test_pairs_that_are_given_tensors_are_joined() -> None:
    """A sum or a check around an operator comes down to one step after it, at the place of its
    second routine; other steps stay."""
    total, finite, timer = ShapeSum(lambda shapes: 1), check(), Timer()
    before = [lowered(action(one)) for one in (total.before, timer.start, finite.before)]
    after = [lowered(action(finite.after)), lowered(action(timer.stop))]
    after.append(lowered(action(total.after, ())))
    pairs = joined(before, after)
    assert pairs is not None
    assert list(pairs[0]) == [before[1]]
    assert [*map(described, pairs[1])] == [
        ("EXECUTION", finite, True),
        ("CLOCK", timer, True),
        ("EXECUTION", total, True),
    ]
    assert [step.action for step in pairs[1]] == [step.action for step in after]


def test_what_is_not_joined() -> None:
    """Steps stay as they are where a routine may change a value between the two halves, where a
    half is missing, and where none is given tensors."""
    total = ShapeSum(lambda shapes: 1)
    begin, end = lowered(action(total.before)), lowered(action(total.after))
    other = lowered(action(print))
    assert joined([begin], [end])
    assert joined([begin, other], [end]) is None
    assert joined([begin], [end, other]) is None
    assert joined([begin], []) is None
    assert joined([], [end]) is None
    assert joined([lowered(action(Counter()))], [lowered(action(Counter()))]) is None
