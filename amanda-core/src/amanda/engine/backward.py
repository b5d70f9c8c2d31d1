"""Runs the routines of backward operators, which are found through past executions.

A driver that finds the backward operators of an operator by itself makes a
:class:`BackwardExecution` for each, with the :class:`OpHandle` of the forward execution, and calls
:meth:`BackwardExecution.run` in place of the backward operator. :class:`OperatorGradients` has the
routines on the gradients of the operator as a whole. :func:`run_backward` runs both for an operator
whose gradient is one function.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from amanda.engine.plan import find_replacement
from amanda.engine.records import OpRecord
from amanda.errors import RoutineResultError, described
from amanda.interface.action import Action, ActionKind, InstPoint
from amanda.interface.calls import BackwardCall, KnownTensor, NamedOp, no_name
from amanda.state import STATE, LiveScope, tool_locked

if TYPE_CHECKING:
    from amanda.engine.dispatch import Dispatcher

Gradients = list[Any]
"""Gradients of several tensors in order; None where there is none."""


class PastTensor(KnownTensor):
    """A forward tensor for backward analyses, which is released if nothing else holds it.

    Args:
        reference: returns the tensor while it is alive, then None.
        current_value: returns the value of a parameter, buffer or constant; None for other tensors.
        name_of: returns the path of a parameter; None for other tensors, and by default.
    """

    __slots__ = ("_current_value", "_name_of", "_references")

    def __init__(
        self,
        reference: Callable[[], Any],
        current_value: Callable[[Any], Any],
        name_of: Callable[[Any], str | None] = no_name,
    ) -> None:
        self._current_value = current_value
        self._name_of = name_of
        self._references = [reference]

    def __call__(self) -> Any:
        for reference in self._references:
            tensor = reference()
            if tensor is not None:
                return tensor
        return None

    def add_stand_in(self, reference: Callable[[], Any]) -> None:
        """Note another tensor of the same value, which replaces this one in the program."""
        self._references.append(reference)

    def constant(self) -> Any:
        tensor = self()
        return None if tensor is None else self._current_value(tensor)

    def parameter_name(self) -> str | None:
        tensor = self()
        return None if tensor is None else self._name_of(tensor)


class OpHandle:
    """The link from the hooks of a past execution to the records of its operator.

    It holds scopes and tensors weakly, so that a graph that outlives the scope
    keeps nothing alive and runs vanilla.

    Attributes:
        op_id: the forward operator's id.
        key: the key of its records (:attr:`~amanda.interface.calls.OpCall.key`).
        inputs, outputs: functions that return the forward tensors, or None.
        model: an object of the driver, kept alive as long as a hook may run.
    """

    __slots__ = ("inputs", "key", "model", "op_id", "outputs", "scopes")

    def __init__(
        self,
        op_id: str,
        scopes: Sequence[LiveScope],
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        key: str = "",
        model: Any = None,
    ) -> None:
        self.op_id = op_id
        self.model = model
        self.key = key or op_id
        if len(scopes) == 1:
            # One tuple serves all operators of the scope.
            self.scopes: tuple[weakref.ref[Any], ...] = scopes[0].reference
        else:
            self.scopes = tuple(map(weakref.ref, scopes))
        self.inputs = inputs
        self.outputs = outputs

    def records(self) -> list[tuple[LiveScope, OpRecord]]:
        """The operator's records in the scopes that have not ended."""
        found = []
        for reference in self.scopes:
            scope = reference()
            if scope is not None and scope.alive:
                record = scope.cache.get(self.key)
                if record is not None:
                    found.append((scope, record))
        return found

    def actions(self, kind: ActionKind) -> list[Action]:
        """The actions on the operator as a whole, of the scopes that have not ended."""
        return [action for _, record in self.records() for action in record.actions(kind)]


@attrs.define(eq=False, repr=False)
class BackwardExecution:
    """Executions of one backward operator.

    Attributes:
        made: number of backward operators of each kind that the running one has made.
    """

    _dispatcher: Dispatcher
    _handle: OpHandle
    call: BackwardCall
    made: collections.Counter[str] = attrs.field(factory=collections.Counter)

    def is_live(self) -> bool:
        """True if a scope that saw the forward operator has not ended."""
        return bool(self._handle.records())

    def needed(self) -> tuple[bool, bool]:
        """Return whether there are routines or analyses before the operator, and after it."""
        before, after, _ = backward_needs(self._handle, self.call.op_id)
        return before, after

    def claim(self, name: str, input_names: Sequence[str]) -> BackwardExecution:
        """A backward operator that this one makes, as by :meth:`OperatorRun.claim`."""
        number = self.made[name]
        self.made[name] += 1
        op_id, call = f"{self.call.op_id}/grad/{name}:{number}", self.call
        inner = BackwardCall(NamedOp(name), op_id, input_names, call.inputs, call.outputs)
        return BackwardExecution(self._dispatcher, self._handle, inner)

    def names_by(self, key: Callable[[Any], Any]) -> dict[Any, str]:
        """No names: its results are gradients of gradients."""
        return {}

    def run(self, grad_outputs: Gradients, vanilla: Callable[[Gradients], Sequence[Any]]) -> Any:
        """Run the backward operator, or its replacement, between its routines.

        Args:
            grad_outputs: the gradients that it consumes.
            vanilla: the framework's own backward operator, not run if it is replaced.

        Returns:
            The gradients that it produces.
        """
        if self._dispatcher.is_paused() or not any(self.needed()):
            return vanilla(grad_outputs)
        before = InstPoint.BEFORE_BACKWARD_OP
        children = self._children(before, grad_outputs, None)
        grad_outputs = self._routines(children, ActionKind.BEFORE_BACKWARD_OP, grad_outputs)
        replacement = find_replacement(children, ActionKind.REPLACE_BACKWARD_OP)
        if replacement is None or not self.call.names:
            return self.after(list(vanilla(grad_outputs)), grad_outputs)
        nothing = [None] * len(self.call.names)
        grad_inputs = replaced_gradients(self._dispatcher, replacement, grad_outputs, nothing)
        children = self._children(InstPoint.AFTER_BACKWARD_OP, grad_outputs, grad_inputs)
        return self._routines(children, ActionKind.AFTER_BACKWARD_OP, grad_inputs)

    def before(self, grad_outputs: Gradients) -> Gradients:
        """Run the analyses and routines before the backward operator; return the gradients that it
        consumes."""
        if self._dispatcher.is_paused():
            self._note_dry_run(InstPoint.BEFORE_BACKWARD_OP, grad_outputs, None)
            return grad_outputs
        children = self._children(InstPoint.BEFORE_BACKWARD_OP, grad_outputs, None)
        return self._routines(children, ActionKind.BEFORE_BACKWARD_OP, grad_outputs)

    def after(self, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        """Run the analyses and routines after the backward operator; return the gradients that it
        produces.

        A replacement of the backward operator supplies them instead of `grad_inputs`.
        """
        if self._dispatcher.is_paused():
            self._note_dry_run(InstPoint.AFTER_BACKWARD_OP, grad_outputs, grad_inputs)
            return grad_inputs
        children = self._children(InstPoint.AFTER_BACKWARD_OP, grad_outputs, grad_inputs)
        replacement = find_replacement(children, ActionKind.REPLACE_BACKWARD_OP)
        if replacement is not None:
            grad_inputs = replaced_gradients(
                self._dispatcher, replacement, grad_outputs, grad_inputs
            )
        return self._routines(children, ActionKind.AFTER_BACKWARD_OP, grad_inputs)

    def _note_dry_run(
        self, point: InstPoint, grad_outputs: Gradients, grad_inputs: Gradients | None
    ) -> None:
        """Run the analyses at a point, if the pass is a :class:`DryRun`."""
        dry_run = self._dispatcher.dry_run
        if dry_run is not None:
            for child in self._children(point, grad_outputs, grad_inputs):
                dry_run.note(child, grad_outputs, grad_inputs)

    def _routines(
        self, children: Sequence[OpRecord], kind: ActionKind, gradients: Gradients
    ) -> Gradients:
        actions = [action for child in children for action in child.actions(kind)]
        return self._dispatcher.run_all(actions, gradients)

    def _children(
        self, point: InstPoint, grad_outputs: Gradients, grad_inputs: Gradients | None
    ) -> list[OpRecord]:
        """The backward operator's records, analysed at `point`, one for each live scope."""
        records = self._handle.records()
        known = []
        # Once for each execution of each backward operator: comprehensions would cost frames.
        for _, record in records:
            child = record.children.get(self.call.op_id)
            if child is None or child.pending(point) or not STATE.cache:
                break
            known.append(child)
        else:
            return known
        unboxed = self._dispatcher.unboxed
        shown = (unboxed(grad_outputs), None if grad_inputs is None else unboxed(grad_inputs))
        return tool_locked(self._analysed_children, records, point, shown)

    def _analysed_children(
        self,
        records: Sequence[tuple[LiveScope, OpRecord]],
        point: InstPoint,
        shown: tuple[Sequence[Any], Sequence[Any] | None],
    ) -> list[OpRecord]:
        children = []
        for scope, record in records:
            # Without the cache the first analysis of the operator makes a new record.
            first = point is InstPoint.BEFORE_BACKWARD_OP or not scope.analyses_at(
                InstPoint.BEFORE_BACKWARD_OP
            )
            fresh = first and not STATE.cache
            child = record.child(self.call.op, self.call.op_id, fresh=fresh)
            self._analyse(scope, record, child, point, shown)
            children.append(child)
        return children

    def _analyse(
        self,
        scope: LiveScope,
        record: OpRecord,
        child: OpRecord,
        point: InstPoint,
        gradients: tuple[Sequence[Any], Sequence[Any] | None],
    ) -> None:
        if not child.pending(point):
            return
        only = child.redo.get(point) if point in child.analysed else None
        child.state.backward, child.state.gradients = self.call, gradients
        try:
            self._dispatcher.analyse(scope, child, point, only)
            if child.state.tensors is not None:
                child.state.see(child.state.tensors)
        except BaseException:
            record.children.pop(self.call.op_id, None)
            raise
        finally:
            child.state.backward, child.state.gradients = None, (None, None)


@attrs.define(eq=False, repr=False)
class OperatorGradients:
    """The routines on the gradients of an operator as a whole (contract rule 8).

    Forward analyses record them: before routines see the gradients of the operator's outputs,
    after routines the gradients of its inputs, and a replacement supplies its whole vector-Jacobian
    product. They enclose the routines of the single backward operators.
    """

    _dispatcher: Dispatcher
    _handle: OpHandle

    def before(self, grad_outputs: Gradients) -> Gradients:
        """Run the routines on the gradients of the outputs."""
        return self._run(ActionKind.BEFORE_BACKWARD_OP, grad_outputs)

    def after(self, grad_inputs: Gradients) -> Gradients:
        """Run the routines on the gradients of the inputs."""
        return self._run(ActionKind.AFTER_BACKWARD_OP, grad_inputs)

    def replaced(self, grad_outputs: Gradients, count: int) -> Gradients | None:
        """The gradients of the `count` inputs that a replacement supplies; None without one."""
        if self._dispatcher.is_paused():
            return None
        for action in self._handle.actions(ActionKind.REPLACE_BACKWARD_OP):
            return replaced_gradients(self._dispatcher, action, grad_outputs, [None] * count)
        return None

    def _run(self, kind: ActionKind, gradients: Gradients) -> Gradients:
        if self._dispatcher.is_paused():
            return gradients
        return self._dispatcher.run_all(self._handle.actions(kind), gradients)


def run_backward(
    dispatcher: Dispatcher,
    handle: OpHandle,
    call: BackwardCall,
    vjp: Callable[[Gradients], Sequence[Any]],
    grad_outputs: Gradients,
) -> Gradients:
    """The gradient of an operator whose only backward operator is `vjp`, under all routines.

    In this order: whole-operator routines before; the whole operator's replacement or else the
    backward operator between its own routines; whole-operator routines after.

    Args:
        call: the backward operator; its names give the number of the inputs.
        vjp: the framework's own function from gradients of the outputs to gradients of the
            inputs.
        grad_outputs: the gradients of the outputs.
    """
    whole = OperatorGradients(dispatcher, handle)
    grad_outputs = whole.before(grad_outputs)
    grad_inputs = whole.replaced(grad_outputs, len(call.names))
    if grad_inputs is None:
        execution = BackwardExecution(dispatcher, handle, call)
        grad_inputs = list(execution.run(grad_outputs, vjp))
    return whole.after(grad_inputs)


def backward_needs(handle: OpHandle, backward_id: str) -> tuple[bool, bool, bool]:
    """The parts of a backward operator's execution that a driver has to intercept.

    Returns:
        True if there are analyses or routines before it; the same after it; True if an analysis is
        pending.
    """
    before = after = pending = False
    for scope, record in handle.records():
        child = record.children.get(backward_id)
        first = child is None or not STATE.cache
        for point in (InstPoint.BEFORE_BACKWARD_OP, InstPoint.AFTER_BACKWARD_OP):
            if (first or child.pending(point)) and scope.analyses_at(point):  # type: ignore[union-attr]
                # An analysis before the operator may record a routine after it.
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
