"""Cells: what is remembered of one operator at one place of the program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amanda.engine.plan import EMPTY_PLAN, ActionPlan

if TYPE_CHECKING:
    pass


Cell = list[Any]
"""``[count, plan, plan, ...]`` of one op type within one name scope. The plan of the
operator of number k is at ``k + 1``: None where nothing at all is to be done, and
:data:`READ` where the values of variables are to be followed and nothing else."""


Cells = dict[str, Cell]


UNKNOWN: Any = ActionPlan("not analysed yet")
"""Stands in a cell for a plan that has to be asked for."""


READ: Any = ActionPlan("reads a variable")
"""Stands in a cell for the empty plan of an operator that may read a variable."""


READ_AND_UNKNOWN: Any = ActionPlan("not analysed yet, reads a variable")
"""Stands in a cell for a plan that has to be asked for, of an operator that has to fall back."""


class FallingBack:
    """Holds in a cell the plan of an operator that always takes the slow path.

    Its caller passes it a variable: on the fast path the runtime would read that
    without notice, and the reading is an operator like any other.
    """

    __slots__ = ("plan",)

    is_claim = False

    def __init__(self, plan: ActionPlan) -> None:
        self.plan = plan


_NOTHING: Any = {}
"""No cells at all: every operator is looked at."""


def plan_in(cell: Cell) -> Any:
    """What a cell knows of the plan of its next operator; :data:`UNKNOWN` if nothing."""
    position = cell[0] + 1
    plan = cell[position] if position < len(cell) else UNKNOWN
    if plan is None or plan is READ:
        return EMPTY_PLAN
    if plan is READ_AND_UNKNOWN:
        return UNKNOWN
    return plan.plan if type(plan) is FallingBack else plan


def falls_back(cell: Cell) -> bool:
    """Whether the next operator of a cell always takes the slow path."""
    position = cell[0] + 1
    known = cell[position] if position < len(cell) else None
    return known is READ_AND_UNKNOWN or type(known) is FallingBack


def keep_plan(cell: Cell, position: int, plan: Any) -> None:
    """Let a cell know the plan of an operator."""
    if position >= len(cell):
        cell.extend([UNKNOWN] * (position + 1 - len(cell)))
    cell[position] = plan


class _Outside(dict[str, Cells]):
    """The cells of operators that are neither forward operators nor in a gradient function."""

    def __missing__(self, scope: str) -> Cells:
        cells: Cells = _NOTHING
        return cells


OUTSIDE: Any = _Outside()
