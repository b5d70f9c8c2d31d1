"""Steps: the actions of a plan in a form that drivers and extensions can run.

Each action is lowered once, when the plan is made, by the routine that it runs::

    steps = lowered_all(plan.before)        # one step for each action, in order
    for step in steps:
        if step.kind == StepKind.COUNT:
            step.routine.count += 1
        ...

A routine of :mod:`amanda.inline` gives the step with its effect (:meth:`Inline.lowered`). Any other
routine, and one of a subclass, is a :attr:`StepKind.CALL`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import MethodType
from typing import Any


class StepKind(enum.IntEnum):
    """The kinds of steps. All but CALL stand for a routine of exactly the class named here."""

    CALL = 0
    """Call the action's function with the tensors that it selects, as code of a tool."""
    COUNT = 1
    """Add one to a ``Counter``."""
    CLOCK = 2
    """Start or stop a ``Timer``."""
    MEMORY = 3
    """Begin or end a ``MemoryChange`` of a plain ``MemoryUse``."""
    EXECUTION = 4
    """Call ``note_execution`` of a ``ShapeSum`` or a ``Check`` after the operator, see
    :func:`joined`."""
    SHAPE_SUM = 5
    """Give a ``ShapeSum`` all inputs, or all outputs or none."""
    CHECK = 6
    """Give a ``Check`` all inputs, or all outputs."""
    MARK = 7
    """Begin or end a ``Mark``."""


class Around(enum.IntEnum):
    """The kinds of support that actions on an operator need from a driver, in increasing order."""

    NOTHING = 0
    """There are none."""
    BLIND = 1
    """Routines around the operator of which none is given a tensor or takes part in AD."""
    TENSORS = 2
    """Routines around the operator of which some are given tensors, and none takes part in AD."""
    ALL = 3
    """Any actions: routines that take part in AD, on gradients as a whole, or a replacement."""


_HALVES = frozenset({StepKind.SHAPE_SUM, StepKind.CHECK})
_PAIRED = _HALVES | {StepKind.CLOCK, StepKind.MEMORY, StepKind.MARK}


class Step:
    """One action of a plan, lowered. It is not changed once it is made.

    Attributes:
        kind: what to do.
        action: the action (:class:`amanda.interface.action.Action`), whose errors name it.
        routine: the object of :mod:`amanda.inline` that the step acts on; None for CALL.
        ends: True for the second routine of a pair (``Timer.stop``, ``after``).
    """

    __slots__ = ("action", "ends", "kind", "routine")

    def __init__(
        self, kind: StepKind, action: Any, routine: Any = None, ends: bool = False
    ) -> None:
        self.kind = kind
        self.action = action
        self.routine = routine
        self.ends = ends

    def __repr__(self) -> str:
        return f"{self.kind.name}({self.action.func!r})"


class Inline:
    """The base of the routines in :mod:`amanda.inline`.

    A class with a pair of routines has ``STEP``: the kind, the first routine and the second one.
    """

    __slots__ = ()

    def lowered(self, action: Any, method: Any) -> Step:
        """The step that has the effect of an action without keywords.

        Args:
            action: runs this object, or a method of it.
            method: that method as a function; None if it is the object that is called.
        """
        # A subclass does not have it: its effect may differ.
        kind, *routines = vars(type(self)).get("STEP", (StepKind.CALL,))
        if method in routines and self._fits(action, method is routines[1]):
            return Step(kind, action, self, method is routines[1])
        return Step(StepKind.CALL, action)

    def _fits(self, action: Any, ends: bool) -> bool:
        """True if the step of a pair has the effect of an action, which runs the second one."""
        return not (action.select or action.differentiable)


def lowered(action: Any) -> Step:
    """The step that has the effect of an action."""
    function: Any = action.func
    owner, method = function, None
    if type(function) is MethodType:
        owner, method = function.__self__, function.__func__
    # These routines take no keywords: an action with keywords is an error, or calls a method of a
    # subclass.
    if not isinstance(owner, Inline) or action.kwargs:
        return Step(StepKind.CALL, action)
    return owner.lowered(action, method)


def lowered_all(actions: Sequence[Any]) -> tuple[Step, ...]:
    """The steps of the actions of one point, in order."""
    return tuple(map(lowered, actions))


def around(steps: Sequence[Step]) -> Around:
    """The support that the steps around an operator need from a driver."""
    found = Around.NOTHING
    # For each new operator: a generator would cost frames.
    for step in steps:
        action = step.action
        is_blind = action.select == ()
        if action.differentiable and not (is_blind and step.kind is StepKind.COUNT):
            return Around.ALL
        found = max(found, Around.BLIND if is_blind else Around.TENSORS)
    return found


def are_paired(before: Sequence[Step], after: Sequence[Step]) -> bool:
    """True if every routine of two halves begins before the operator and ends after it, once.

    It may also begin at one operator and end at another one: the steps of neither are paired then.
    """
    begun: list[Any] = []
    ended: list[Any] = []
    for steps, is_after in ((before, False), (after, True)):
        for step in steps:
            if step.kind in _PAIRED:
                if step.ends is not is_after:
                    return False
                (ended if is_after else begun).append(id(step.routine))
    return len(begun) == len(ended) == len({*begun}) and {*begun} == {*ended}


def joined(
    before: Sequence[Step], after: Sequence[Step]
) -> tuple[tuple[Step, ...], tuple[Step, ...]] | None:
    """The same steps, with one EXECUTION after the operator for each pair that is given tensors.

    They have the same effect around an operator that writes into none of its inputs.

    Returns:
        The steps before and after it; None if there is no such pair, and where a routine might
        change a value between the two halves of one.
    """
    kinds = {step.kind for step in (*before, *after)}
    if not kinds & _HALVES or StepKind.CALL in kinds or not are_paired(before, after):
        return None
    return (
        tuple([step for step in before if step.kind not in _HALVES]),
        tuple(
            [
                Step(StepKind.EXECUTION, step.action, step.routine, True)
                if step.kind in _HALVES
                else step
                for step in after
            ]
        ),
    )
