"""The hooks on autograd nodes that run the routines and analyses of backward operators.

Hooks hold the graph's tensors weakly or not at all: a hook that holds an output keeps the graph
alive, which keeps the hook alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.engine.backward import BackwardExecution, OpHandle
from amanda.errors import CapabilityError
from amanda.inline.steps import Around
from amanda.interface.action import ActionKind, InstPoint
from amanda.interface.calls import BackwardCall
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.nodes import is_accumulation
from amanda_torch.routines import BackwardRoutines, RoutineDispatcher

Gradients = Sequence[Any]

_without_modes = _internals.without_modes


class NodeCall(BackwardCall):
    """One backward operator about to be executed: the autograd node whose hooks run."""

    __slots__ = ()

    def shown(
        self, grad_outputs: Gradients | None, grad_inputs: Gradients | None
    ) -> tuple[Gradients | None, Gradients | None]:
        """The gradients that it consumes, and what it is to produce where it has not run."""
        if grad_inputs is None and (node := _internals.current_node()) is not None:
            grad_inputs = _internals.produced_gradients(node)
        return _shown(grad_outputs), _shown(grad_inputs)

    def parameter_name(self, index: int, names: Sequence[str]) -> str | None:
        node = _internals.current_node()
        if not is_accumulation(node):
            return super().parameter_name(index, names)
        found = (e.parameter_name() for e in self.inputs if e is not None and e() is node.variable)
        name: str | None = next(found, None)
        return name


def _shown(gradients: Gradients | None) -> Gradients | None:
    return None if gradients is None else [*map(_internals.shown_part, gradients)]


class NodeHooks:
    """The hooks of one backward operator, on its autograd node in any graph.

    Attributes:
        has_before, has_after: whether there is something to do before it, and after it.
        is_idle: whether there is neither.
    """

    __slots__ = (
        "_dispatcher",
        "_execution",
        "_handle",
        "_key",
        "has_after",
        "has_before",
        "is_idle",
    )

    def __init__(
        self,
        dispatcher: RoutineDispatcher,
        handle: OpHandle,
        call: BackwardCall,
        needs: Sequence[bool],
    ) -> None:
        """Make hooks that are on no node yet.

        Args:
            needs: whether there is something to do before the operator, and after it.
        """
        self._dispatcher = dispatcher
        self._handle = handle
        self._execution = BackwardExecution(dispatcher, handle, call)
        self.has_before, self.has_after = needs
        # All hooks of one backward operator in the same scopes have the same routines.
        self._key = call.op_id, handle.scopes
        self.is_idle = not any(needs)

    def register(self, node: Any) -> None:
        """Hook a node at one or both of its ends."""
        native = self._dispatcher.native
        if native is not None and native.register(self, node):
            return
        if self.has_before:
            node.register_prehook(self.before)
        if self.has_after:
            node.register_hook(self.after)

    def of_scope(self, reference: Any) -> NodeHooks:
        """These hooks for one of their scopes: another operator may hook the node for others."""
        handle, scope = self._handle, reference()
        left = [] if scope is None else [scope]
        some = OpHandle(handle.op_id, left, handle.inputs, handle.outputs, model=handle.model)
        needs = self.has_before, self.has_after
        return NodeHooks(self._dispatcher, some, self._execution.call, needs)

    @property
    def name(self) -> str:
        """The name of the backward operator, as PyTorch calls its node."""
        return str(self._execution.call.op.__name__)

    def routines(self) -> BackwardRoutines | None:
        """All routines; None if an analysis has yet to run, or one replaces the operator."""
        return self._dispatcher.settled.get(self._key) or self._settle()

    def before(self, grad_outputs: tuple[Any, ...]) -> Any:
        """Prehook: the gradients to consume instead, None for the same."""
        # The first says it of nearly all nodes, without a function more.
        if grad_outputs and grad_outputs[0] is None and nothing_flows(grad_outputs):
            return None
        dispatcher = self._dispatcher
        settled = dispatcher.settled.get(self._key) or self._settle()
        if settled is None or not dispatcher.is_plain_thread(vars(STATE)):
            values = list(grad_outputs)
            changed = _without_modes(self._execution.before, values)
        elif settled.is_joined or settled.around_before <= Around.BLIND:
            if settled.steps_before:
                dispatcher.run_blind(settled.steps_before)
            return None
        else:
            values = list(grad_outputs)
            changed = dispatcher.run_all(settled.before, values)
        return None if changed is values else tuple(changed)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
        """Posthook: the gradients to pass on instead, None for the same."""
        # The first says it of nearly all nodes, without a function more.
        if grad_outputs and grad_outputs[0] is None and nothing_flows(grad_outputs):
            return None
        dispatcher = self._dispatcher
        settled = dispatcher.settled.get(self._key) or self._settle()
        if settled is None or not dispatcher.is_plain_thread(vars(STATE)):
            values = list(grad_inputs)
            changed = _without_modes(self._execution.after, values, list(grad_outputs))
        elif settled.is_joined:
            dispatcher.run_joined(settled, list(grad_outputs), list(grad_inputs))
            return None
        elif settled.around_after <= Around.BLIND:
            dispatcher.run_blind(settled.steps_after)
            return None
        else:
            values = list(grad_inputs)
            changed = dispatcher.run_all(settled.after, values)
        if changed is values:
            return None
        for index, (old, new) in enumerate(zip(values, changed, strict=True)):
            if old is None and new is not None:
                raise CapabilityError(
                    f"op {self._execution.call.op_id} produces no gradient at position {index}, "
                    "so that PyTorch takes none in its place; return None there"
                )
        return tuple(changed)

    def _settle(self) -> BackwardRoutines | None:
        """Keep the routines for the next executions; None if an analysis has yet to run, and where
        a routine replaces the operator."""
        settled = self._dispatcher.settled
        if not STATE.cache:
            return None
        records = self._handle.records()
        children = [record.children.get(self._execution.call.op_id) for _, record in records]
        for (scope, _), child in zip(records, children, strict=True):
            if child is None or child.actions(ActionKind.REPLACE_BACKWARD_OP):
                return None
            for point in (InstPoint.BEFORE_BACKWARD_OP, InstPoint.AFTER_BACKWARD_OP):
                if child.pending(point) and scope.analyses_at(point):
                    return None
        if not children:
            return None
        before, after = (
            [action for child in children if child for action in child.actions(kind)]
            for kind in (ActionKind.BEFORE_BACKWARD_OP, ActionKind.AFTER_BACKWARD_OP)
        )
        routines = settled[self._key] = BackwardRoutines(before, after)
        return routines


def nothing_flows(gradients: Sequence[Any]) -> bool:
    """True if a node gets no gradient: a replacement of its operator has taken another way."""
    for gradient in gradients:
        if gradient is not None:
            return False
    return bool(gradients)
