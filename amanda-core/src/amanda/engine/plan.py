"""Action plans: all actions on one operator, compiled from its records.

``compile_plan(op_id, scopes, actions)`` puts the recorded actions of all scopes into running order,
by kind, and lowers them to steps (``amanda.inline.steps``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from amanda.engine.records import Actions, OpRecord
from amanda.inline.steps import Around, Step, around, lowered_all
from amanda.interface.action import Action, ActionKind
from amanda.interface.context import replaced_twice
from amanda.state import LiveScope

_FIELDS = {
    ActionKind.BEFORE_OP: "before",
    ActionKind.AFTER_OP: "after",
    ActionKind.REPLACE_OP: "replace",
    ActionKind.BEFORE_BACKWARD_OP: "before_backward",
    ActionKind.AFTER_BACKWARD_OP: "after_backward",
    ActionKind.REPLACE_BACKWARD_OP: "replace_backward",
}
"""The field of an :class:`ActionPlan` that has the actions of a kind."""


@attrs.define(eq=False)
class ActionPlan:
    """All actions on one operator, of all tools of all active scopes, in running order.

    A plan is false if the operator runs vanilla.

    Attributes:
        op_id: the operator's id.
        before, after: routines around the forward op.
        steps_before, steps_after: the steps of these routines, one for each.
        replace: the action that replaces the operator, if any.
        before_backward, after_backward: routines on the whole operator's
            output gradients and input gradients.
        replace_backward: the whole operator's vector-Jacobian product, if any.
        claims: whether some tool analyses backward operators, so that the driver has
            to find the backward operators of this one.
        driver_data: an object of the driver, such as facts about the operator.
        around: requirements of its actions on the driver; false without actions.
        acts_on_gradients: whether an action acts on the gradients of the whole operator.
    """

    op_id: str
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    replace: Action | None = None
    before_backward: tuple[Action, ...] = ()
    after_backward: tuple[Action, ...] = ()
    replace_backward: Action | None = None
    claims: bool = False
    driver_data: Any = None
    steps_before: tuple[Step, ...] = attrs.field(init=False, default=())
    steps_after: tuple[Step, ...] = attrs.field(init=False, default=())
    acts_on_gradients: bool = attrs.field(init=False, default=False)
    around: Around = attrs.field(init=False, default=Around.NOTHING)

    def __attrs_post_init__(self) -> None:
        self.acts_on_gradients = bool(
            self.before_backward or self.after_backward or self.replace_backward
        )
        if self.before:
            self.steps_before = lowered_all(self.before)
        if self.after:
            self.steps_after = lowered_all(self.after)
        if self.replace is not None or self.acts_on_gradients:
            self.around = Around.ALL
        elif self.before or self.after:
            self.around = around((*self.steps_before, *self.steps_after))

    def __bool__(self) -> bool:
        return self.claims or bool(self.around)

    @property
    def is_blind(self) -> bool:
        """True if there are actions, and none of them gets a tensor: counters and timers."""
        return self.around is Around.BLIND


EMPTY_PLAN = ActionPlan("")


def find_replacement(records: Sequence[OpRecord], kind: ActionKind) -> Action | None:
    """The only replacement among the records; None without one.

    Raises:
        ReplacementConflictError: there are two.
    """
    return _only([action for record in records for action in record.actions(kind)])


def _only(replacements: Sequence[Action]) -> Action | None:
    if len(replacements) > 1:
        raise replaced_twice(*replacements[:2])
    return replacements[0] if replacements else None


def compile_plan(op_id: str, scopes: Sequence[LiveScope], actions: Iterable[Actions]) -> ActionPlan:
    """The plan of one operator.

    Args:
        actions: for each scope, outermost first, the actions of the operator's record.

    Raises:
        ReplacementConflictError: two of them replace the operator.
    """
    found: dict[str, Any] = {}
    for recorded in actions:
        # A copy is made in one step: another thread may analyse the operator.
        for kind, several in tuple(recorded.items()):
            if several:
                name = _FIELDS[kind]
                found[name] = (*found[name], *several) if name in found else several
    for name in found.keys() & {"replace", "replace_backward"}:
        found[name] = _only(found[name])
    claims = True in [scope.analyses_backward() for scope in scopes]
    return ActionPlan(op_id, claims=claims, **found)
