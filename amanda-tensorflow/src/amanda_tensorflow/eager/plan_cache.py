"""What is done at each execution of an eager operator, and which path it takes.

TensorFlow runs an operator on the fast path, in C, or on the slow path, where Python has its inputs
as tensors and its attributes by name. :class:`Reason` lists all reasons for the slow path; what of
them follows from the operator's plan is decided once, by :func:`entry_of_plan`, and kept:

=====================================  =========================================================
plan                                   entry
=====================================  =========================================================
no action                              :data:`PLAIN`; an entry of its own where the output may be
                                       the value of a variable, or the plan has claims
counters and timers alone              ``is_inlined``: the driver updates them on the fast path
any other action                       ``reason`` is :attr:`Reason.ROUTINES`; ``stays`` on the fast
                                       path where all inputs are tensors, and no tape is to record
                                       it under a mark of ours; not a replaced operator
not known                              :data:`UNKNOWN`, whose reason is :attr:`Reason.ANALYSIS`
=====================================  =========================================================

Entries lie beside the counters that make the operators' ids. ``cells[scope][kind]`` is ``[count,
entry, entry, ...]``: how many operators of that type have run in that name scope in this iteration,
and the entry of each of them. The entry of operator number k is at ``k + 1``. An operator without
actions thus costs two dictionary lookups, and needs no id::

    cell = cells[scope][kind]
    entry = cell[cell[0] + 1]      # IndexError: met for the first time
    cell[0] += 1
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from amanda.engine.plan import EMPTY_PLAN, ActionPlan
from amanda.inline import Counter, Timer
from amanda.inline.steps import Step, StepKind, are_paired
from amanda.interface.action import Action

Cell = list[Any]
"""The count of the operators of one type in one name scope, followed by their entries."""

Cells = dict[str, Cell]
"""The cells of one name scope, by operator type."""


class Reason(enum.Enum):
    """Why an operator takes the slow path."""

    ANALYSIS = "a tool may have yet to analyse it"
    ROUTINES = "routines are called around it, or replace it"
    MARK = "tapes record it, and its executions do not share a mark yet"
    READINGS = "it is passed variables, whose readings are operators"
    REPLACEMENT = "tapes record it under the mark of the operator that it replaces"


class OperatorEntry:
    """What is done at each execution of an operator.

    Attributes:
        plan: the operator's plan; None if it has to be asked for.
        reason: why the operator takes the slow path whatever its arguments; None if it need not.
        stays: True if it runs between its routines on the fast path where its inputs are tensors
            and no tape records its mark.
        has_mark: True if a tape would record it under a mark of ours.
        is_inlined: True if the driver updates `counters` and `timers` in place of calling routines.
        counters: they count each execution that has ended.
        timers: they measure it, each with the action that would stop it.
        is_noted: True if the output may be the value of a variable, which the driver notes.
        marked: the attribute that marks all executions on tapes, a name and a value, or nothing;
            None as long as they do not share one.
    """

    def __init__(self, plan: Any, reason: Reason | None = None) -> None:
        self.plan = plan
        self.reason = reason
        self.stays = False
        self.has_mark = False
        self.is_inlined = False
        self.counters: Sequence[Counter] = ()
        self.timers: Sequence[tuple[Timer, Action]] = ()
        self.is_noted = False
        self.marked: tuple[Any, ...] | None = None if plan is not None and plan.claims else ()


PLAIN = OperatorEntry(EMPTY_PLAN)
"""Entry of an operator that is counted, and nothing else."""

UNKNOWN = OperatorEntry(None, Reason.ANALYSIS)
"""Entry of an operator whose plan has to be asked for."""


def entry_of_plan(plan: ActionPlan, is_noted: bool) -> OperatorEntry:
    """Return the entry of a forward operator with this plan.

    Args:
        is_noted: True if its output may be the value of a variable.
    """
    if not (plan or is_noted):
        return PLAIN
    inline = inlined(plan, plan.steps_before, plan.steps_after) if plan.is_blind else None
    reason = Reason.ROUTINES if plan.around else None
    entry = inline or OperatorEntry(plan, reason)
    entry.is_noted = is_noted
    entry.stays = reason is not None and plan.replace is None
    entry.has_mark = plan.claims or plan.acts_on_gradients
    return entry


def inlined(
    plan: ActionPlan, before: Sequence[Step], after: Sequence[Step]
) -> OperatorEntry | None:
    """Return the entry of an operator whose steps are counters after it and timers around it.

    None if the driver has to call one of them.

    Args:
        before, after: all steps of the plan, of which there is one at least.
    """
    counters: list[Counter] = []
    timers: list[tuple[Timer, Action]] = []
    for step in after:
        if step.kind is StepKind.CLOCK:
            timers.append((step.routine, step.action))
        elif step.kind is StepKind.COUNT:
            counters.append(step.routine)
        else:
            return None
    if not are_paired(before, after) or any(step.kind is not StepKind.CLOCK for step in before):
        return None
    entry = OperatorEntry(plan)
    entry.is_inlined, entry.counters, entry.timers = True, counters, timers
    return entry


def entry_of(cell: Cell) -> Any:
    """Return the entry of the next operator of a cell; :data:`UNKNOWN` if there is none."""
    position = cell[0] + 1
    return cell[position] if position < len(cell) else UNKNOWN


def keep(cell: Cell, number: int, entry: Any) -> None:
    """Set the entry of the operator of this number."""
    position = number + 1
    if position >= len(cell):
        cell.extend([UNKNOWN] * (position + 1 - len(cell)))
    cell[position] = entry


_MOST_SCOPES = 64
"""How many name scopes :class:`AnyScope` remembers, in case a program makes ever new ones."""


class AnyScope(dict[str, Cells]):
    """The same cells for every name scope: ids of backward operators have no scope.

    Args:
        cells: these cells.
    """

    __slots__ = ("cells",)

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self.cells = cells

    def __missing__(self, scope: str) -> Cells:
        if len(self) >= _MOST_SCOPES:
            self.clear()
        self[scope] = self.cells
        return self.cells


OUTSIDE: Any = AnyScope({})
"""Cells without any entry, for operators of a backward pass that no gradient function runs."""
