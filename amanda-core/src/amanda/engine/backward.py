"""Backward operators: what a driver's gradient hooks call, and what leads them to it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda.engine.plan import only_one
from amanda.engine.records import OpRecord
from amanda.errors import RoutineResultError, described
from amanda.interface.action import Action, ActionKind, InstPoint
from amanda.state import STATE, TOOL_LOCK

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher
    from amanda.interface.calls import BackwardCall
    from amanda.scope.scope import Scope


class OpHandle:
    """Leads from the hooks of a past execution to what is recorded of its operator.

    It holds scopes and tensors weakly, so that a graph that outlives the scope
    keeps nothing alive and runs vanilla.

    Attributes:
        op_id: the forward operator's id.
        inputs, outputs: callables that give the forward tensors or None.
    """

    __slots__ = ("inputs", "op_id", "outputs", "scopes")

    def __init__(
        self,
        op_id: str,
        scopes: Sequence[Scope],
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
    ) -> None:
        self.op_id = op_id
        self.scopes = tuple(weakref.ref(scope) for scope in scopes)
        self.inputs = inputs
        self.outputs = outputs

    def records(self) -> list[tuple[Scope, OpRecord]]:
        """The operator's records in the scopes that have not ended."""
        found = []
        for reference in self.scopes:
            scope = reference()
            if scope is not None and scope.alive:
                record = scope.cache.get(self.op_id)
                if record is not None:
                    found.append((scope, record))
        return found


class BackwardExecution:
    """Executions of one backward operator: what a driver's gradient hooks call."""

    __slots__ = ("_dispatcher", "_handle", "call")

    def __init__(self, dispatcher: Dispatcher, handle: OpHandle, call: BackwardCall) -> None:
        self._dispatcher = dispatcher
        self._handle = handle
        self.call = call

    def needed(self) -> tuple[bool, bool]:
        """Whether something is to be done before and after the backward operator."""
        before, after, _ = backward_needs(self._handle, self.call.op_id)
        return before, after

    def before(self, grad_outputs: list[Any]) -> list[Any]:
        """Analyses and routines before the backward op; the gradients it consumes."""
        if self._dispatcher.is_paused():
            return grad_outputs
        children = self._children(InstPoint.BEFORE_BACKWARD_OP, grad_outputs, None)
        for child in children:
            for action in child.actions(ActionKind.BEFORE_BACKWARD_OP):
                grad_outputs = self._dispatcher.run(action, grad_outputs)
        return grad_outputs

    def after(self, grad_inputs: list[Any], grad_outputs: list[Any]) -> list[Any]:
        """Analyses and routines after the backward op; the gradients it produces."""
        if self._dispatcher.is_paused():
            return grad_inputs
        children = self._children(InstPoint.AFTER_BACKWARD_OP, grad_outputs, grad_inputs)
        replacement = only_one(children, ActionKind.REPLACE_BACKWARD_OP)
        if replacement is not None:
            grad_inputs = replaced_gradients(
                self._dispatcher, replacement, grad_outputs, grad_inputs
            )
        for child in children:
            for action in child.actions(ActionKind.AFTER_BACKWARD_OP):
                grad_inputs = self._dispatcher.run(action, grad_inputs)
        return grad_inputs

    def _children(
        self, point: InstPoint, grad_outputs: list[Any], grad_inputs: list[Any] | None
    ) -> list[OpRecord]:
        records = self._handle.records()
        known = [record.children.get(self.call.op_id) for _, record in records]
        if STATE.cache and not any(c is None or c.pending(point) for c in known):
            return known  # type: ignore[return-value]
        children = []
        with TOOL_LOCK:
            for scope, record in records:
                # Without the cache a new record is made where the op is first analysed.
                first = point is InstPoint.BEFORE_BACKWARD_OP or not scope.analyses_at(
                    InstPoint.BEFORE_BACKWARD_OP
                )
                fresh = first and not STATE.cache
                child = record.child(self.call.op, self.call.op_id, fresh=fresh)
                self._analyse(scope, record, child, point, (grad_outputs, grad_inputs))
                children.append(child)
        return children

    def _analyse(
        self,
        scope: Scope,
        record: OpRecord,
        child: OpRecord,
        point: InstPoint,
        gradients: tuple[list[Any], list[Any] | None],
    ) -> None:
        if not child.pending(point):
            return
        only = child.redo.get(point) if point in child.analysed else None
        context = child.context
        context._backward = self.call
        context._gradients = gradients
        try:
            self._dispatcher.analyse(scope, child, point, only)
        except BaseException:
            record.children.pop(self.call.op_id, None)
            raise
        finally:
            context._backward = None
            context._gradients = (None, None)


def backward_needs(handle: OpHandle, backward_id: str) -> tuple[bool, bool, bool]:
    """What a backward operator that is about to run wants of its driver.

    Returns:
        Whether there is something to do before it, after it, and whether some
        analysis of it has yet to run.
    """
    before = after = pending = False
    for scope, record in handle.records():
        child = record.children.get(backward_id)
        first = child is None or not STATE.cache
        for point in (InstPoint.BEFORE_BACKWARD_OP, InstPoint.AFTER_BACKWARD_OP):
            if (first or child.pending(point)) and scope.analyses_at(point):  # type: ignore[union-attr]
                # An analysis before the op may record a routine after it.
                before |= point is InstPoint.BEFORE_BACKWARD_OP
                after = pending = True
        if child is not None:
            before |= bool(child.actions(ActionKind.BEFORE_BACKWARD_OP))
            after |= bool(
                child.actions(ActionKind.AFTER_BACKWARD_OP)
                or child.actions(ActionKind.REPLACE_BACKWARD_OP)
            )
    return before, after, pending


def replaced_gradients(
    dispatcher: Dispatcher, action: Action, grad_outputs: list[Any], grad_inputs: Sequence[Any]
) -> list[Any]:
    """The gradients that a replacement of a backward operator supplies.

    Raises:
        RoutineResultError: their number is wrong.
    """
    result = dispatcher.replace(action, grad_outputs)
    gradients = list(result) if isinstance(result, (list, tuple)) else [result]
    if (
        result is None
        or len(gradients) > len(grad_inputs)
        or not all(g is None or dispatcher.driver.is_tensor(g) for g in gradients)
    ):
        raise RoutineResultError(
            f"{action.routine} replaces the backward of op {action.op_id} and must return one "
            f"gradient for each of its {len(grad_inputs)} inputs (None for none), "
            f"got {described(result)}"
        )
    return gradients + [None] * (len(grad_inputs) - len(gradients))
