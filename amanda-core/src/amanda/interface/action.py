"""Instrumentation points and actions.

``context.insert_before_op(routine, inputs=[0])`` records an :class:`Action` of the kind
``ActionKind.BEFORE_OP``; a plan contains the actions on an operator in running order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs


class InstPoint(enum.Enum):
    """The four points of an operator at which an analysis routine may run."""

    # Enum's own hash is written in Python; these are keys at every operator.
    __hash__ = object.__hash__

    BEFORE_FORWARD_OP = "before_forward_op"
    AFTER_FORWARD_OP = "after_forward_op"
    BEFORE_BACKWARD_OP = "before_backward_op"
    AFTER_BACKWARD_OP = "after_backward_op"

    @classmethod
    def of(cls, backward: bool, require_outputs: bool) -> InstPoint:
        """The point for two arguments of ``Tool.add_inst_for_op``."""
        if backward:
            return cls.AFTER_BACKWARD_OP if require_outputs else cls.BEFORE_BACKWARD_OP
        return cls.AFTER_FORWARD_OP if require_outputs else cls.BEFORE_FORWARD_OP

    @property
    def is_backward(self) -> bool:
        """True if the point belongs to a backward operator."""
        return self in (InstPoint.BEFORE_BACKWARD_OP, InstPoint.AFTER_BACKWARD_OP)


class ActionKind(enum.Enum):
    """The six kinds of actions (paper, Listing 3); the value is the API's name."""

    __hash__ = object.__hash__

    BEFORE_OP = "insert_before_op"
    AFTER_OP = "insert_after_op"
    REPLACE_OP = "replace_op"
    BEFORE_BACKWARD_OP = "insert_before_backward_op"
    AFTER_BACKWARD_OP = "insert_after_backward_op"
    REPLACE_BACKWARD_OP = "replace_backward_op"

    @property
    def selects(self) -> str:
        """The tensors that the selection of an action of this kind indexes."""
        return _SELECTS[self]


_SELECTS = {
    ActionKind.BEFORE_OP: "inputs",
    ActionKind.AFTER_OP: "outputs",
    ActionKind.REPLACE_OP: "inputs",
    ActionKind.BEFORE_BACKWARD_OP: "grad_outputs",
    ActionKind.AFTER_BACKWARD_OP: "grad_inputs",
    ActionKind.REPLACE_BACKWARD_OP: "grad_outputs",
}


class Owner(Protocol):
    """The part of a tool that its actions use."""

    @property
    def differentiable(self) -> bool:
        """True if its routines take part in AD by default."""

    @property
    def only_watches(self) -> bool:
        """True if it promises to change no value."""


class Filter(Protocol):
    """Restricts the tools of a scope; :class:`amanda.tools.op_filter.OpFilter` is one."""

    @property
    def dependencies(self) -> tuple[Any, ...]:
        """Tools that act first in a scope with this filter."""

    def selects(self, context: Any) -> bool:
        """True if the tools' analyses see an operator; called once for each record."""

    def restrict(self, action: Action) -> Action:
        """An action that tools have recorded, restricted to the selected executions.

        A restricted action is returned unchanged.
        """


@attrs.frozen(eq=False)
class Action:
    """One instrumentation routine, recorded by an analysis routine for one operator.

    Attributes:
        kind: kind of the action.
        tool: the tool whose analysis recorded it.
        func: the instrumentation routine.
        select: positions passed to the routine, negative ones from the end; None for all.
        kwargs: further keyword arguments of the routine.
        differentiable: True if the routine takes part in AD.
        op_id: id of the (forward or backward) operator.
    """

    kind: ActionKind
    tool: Owner
    func: Callable[..., Any]
    select: tuple[int, ...] | None
    kwargs: Mapping[str, Any]
    differentiable: bool
    op_id: str

    def positions(self, count: int) -> Sequence[int]:
        """The selected positions among `count` tensors, counted from the first one."""
        if self.select is None:
            return range(count)
        return [index + count if index < 0 else index for index in self.select]

    @property
    def routine(self) -> str:
        """The routine's name in messages, ``Tool.routine``."""
        name = getattr(self.func, "__qualname__", None) or repr(self.func)
        owner = type(self.tool).__name__
        return f"{owner}.{name.rpartition('.')[2]}"
