"""The plans of eager operators, kept beside the counters that make their ids.

``cells[scope][kind]`` is ``[count, entry, entry, ...]``: how many operators of that type have run
in that name scope in this iteration, and what is remembered of each of them. The entry of operator
number k is at ``k + 1``. An operator without actions thus costs two dictionary lookups, and needs
no id::

    cell = cells[scope][kind]
    entry = cell[cell[0] + 1]      # IndexError: met for the first time
    cell[0] += 1

An entry is one of:

* None: the operator runs vanilla;
* :data:`READ`: it runs vanilla, and the driver notes which variable its output was read from;
* a :class:`SlowPath`: it takes the slow path, with its plan;
* an :class:`Inlined`: it stays on the fast path, and the driver does what its routines would do;
* an :class:`~amanda.engine.plan.ActionPlan`: it can stay on the fast path, because its routines
  look at no tensor, or because only its backward operators are of interest;
* :data:`UNKNOWN` or :data:`READ_AND_UNKNOWN`: its plan has to be asked for.
"""

from __future__ import annotations

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

UNKNOWN: Any = ActionPlan("not analysed yet")
"""Entry of an operator whose plan has to be asked for."""

READ: Any = ActionPlan("reads a variable")
"""Entry of an operator without actions whose output may be the value of a variable."""

READ_AND_UNKNOWN: Any = ActionPlan("not analysed yet, reads a variable")
"""Entry of an operator whose plan has to be asked for and that was passed a variable."""


class SlowPath:
    """Entry of an operator that always takes the slow path.

    There its inputs are tensors and its attributes are named, whatever the caller passed.
    Operators with routines that look at tensors need that. So does an operator that is passed a
    variable: on the fast path the runtime would read the variable in C, and that reading, an
    operator like any other, would not be seen. Where neither the operator nor the readings have
    actions, it takes the fast path after all, and the readings are counted.

    Attributes:
        plan: the operator's plan.
        may_pass: whether it may take the fast path, as far as the plan tells.
    """

    __slots__ = ("may_pass", "plan")

    def __init__(self, plan: ActionPlan, may_pass: bool = False) -> None:
        self.plan = plan
        self.may_pass = may_pass


class Inlined:
    """Entry of an operator whose routines are counters after it, and timers around it.

    Attributes:
        plan: the operator's plan.
        counters: they count each execution that has ended.
        timers: they measure it, each with the action that would stop it.
    """

    __slots__ = ("counters", "plan", "timers")

    def __init__(
        self,
        plan: ActionPlan,
        counters: Sequence[Counter],
        timers: Sequence[tuple[Timer, Action]],
    ) -> None:
        self.plan = plan
        self.counters = counters
        self.timers = timers


def inlined(plan: ActionPlan, before: Sequence[Step], after: Sequence[Step]) -> Inlined | None:
    """The entry of an operator with these steps; None if the driver has to call one of them.

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
    are_clocks = all(step.kind is StepKind.CLOCK for step in before)
    return Inlined(plan, counters, timers) if are_clocks and are_paired(before, after) else None


def plan_of(entry: Any) -> Any:
    """The plan that an entry stands for; :data:`UNKNOWN` if it has to be asked for."""
    if entry is None or entry is READ:
        return EMPTY_PLAN
    if entry is READ_AND_UNKNOWN:
        return UNKNOWN
    return entry.plan if type(entry) in (SlowPath, Inlined) else entry


def entry_of(cell: Cell) -> Any:
    """The entry of the next operator of a cell; :data:`UNKNOWN` if there is none."""
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
