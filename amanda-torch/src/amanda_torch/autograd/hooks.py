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
from amanda_torch.routines import TOOL_CODE, BackwardRoutines, RoutineDispatcher, until_result

Gradients = Sequence[Any]

_without_modes = _internals.without_modes

_PLAIN: tuple[Any, ...] = True, True, 0, False, {}
"""The state of a thread in which kept routines may be used: in scopes, with the cache, outside of
tools' code and of suspended blocks, while no backward pass of a tool runs."""


class NodeCall(BackwardCall):
    """One backward operator about to be executed: the autograd node whose hooks run."""

    __slots__ = ()

    def shown(
        self, grad_outputs: Gradients | None, grad_inputs: Gradients | None
    ) -> tuple[Gradients | None, Gradients | None]:
        """The gradients that it consumes and produces; before it has run, descriptions of the
        gradients that it is to produce."""
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
        has_before, has_after: True if there are routines or analyses before it, and after it.
        is_idle: True if there are none at all.
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
        """Make hooks that are not yet registered.

        Args:
            needs: whether there are routines or analyses before the operator, and after it.
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
            node.register_prehook(self)
        if self.has_after:
            node.register_hook(self)

    def of_scope(self, reference: Any) -> NodeHooks:
        """Return the hooks for one scope of these: another operator may hook the node for other
        scopes."""
        handle, scope = self._handle, reference()
        left = [] if scope is None else [scope]
        some = OpHandle(handle.op_id, left, handle.inputs, handle.outputs, model=handle.model)
        needs = self.has_before, self.has_after
        return NodeHooks(self._dispatcher, some, self._execution.call, needs)

    @property
    def name(self) -> str:
        """The name of the backward operator: PyTorch's name of the node."""
        return str(self._execution.call.op.__name__)

    def routines(self) -> BackwardRoutines | None:
        """All routines; None if an analysis has yet to run, or one replaces the operator."""
        return self._dispatcher.settled.get(self._key) or self._settle()

    def __call__(self, gradients: tuple[Any, ...], consumed: tuple[Any, ...] | None = None) -> Any:
        """Run as prehook or posthook; return the gradients to use instead, or None for the same.

        Args:
            gradients: the gradients that the node consumes; of a posthook, those that it has
                produced.
            consumed: of a posthook, the gradients that the node has consumed.
        """
        flowing = gradients if consumed is None else consumed
        # The first gradient decides for nearly all nodes, without a function call.
        if flowing and flowing[0] is None and all_none(flowing):
            return None
        dispatcher, thread, values = self._dispatcher, vars(STATE), list(gradients)
        settled = dispatcher.settled.get(self._key) or self._settle()
        now = thread["enabled"], thread["cache"], thread["paused"], thread["held"], dispatcher.quiet
        if settled is None or now != _PLAIN:
            changed = _without_modes(self._run_recorded, values, consumed)
        else:
            actions, steps, needed = settled.ends[consumed is not None]
            if needed is None:
                dispatcher.run_joined(settled, list(flowing), values)
                return None
            if needed <= Around.BLIND:
                dispatcher.run_blind(steps)
                return None
            if needed is Around.ALL or not _internals.is_untransformed():
                changed = dispatcher.run_all(actions, values)
            else:
                done = TOOL_CODE.enter(until_result, actions, values, isolated=True)
                if done is None:
                    return None
                changed = _without_modes(dispatcher.go_on, actions, values, *done)
        return None if changed is values else self._replaced(values, changed, consumed is not None)

    def _run_recorded(self, values: list[Any], consumed: Gradients | None) -> Gradients:
        """Run the analyses and routines before or after the node, by the records of the scopes."""
        if consumed is None:
            return self._execution.before(values)
        return self._execution.after(values, list(consumed))

    def _replaced(self, values: Gradients, changed: Gradients, is_after: bool) -> tuple[Any, ...]:
        for index, (old, new) in enumerate(zip(values, changed, strict=True)):
            if is_after and old is None and new is not None:
                raise CapabilityError(
                    f"op {self._execution.call.op_id} produces no gradient at position {index}, "
                    "so that PyTorch takes none in its place; return None there"
                )
        return tuple(changed)

    def _settle(self) -> BackwardRoutines | None:
        """Keep the routines for further executions; None if an analysis has yet to run, or a
        routine replaces the operator."""
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


def all_none(gradients: Sequence[Any]) -> bool:
    """True if a node gets no gradient, as in an operator whose gradients a replacement supplies."""
    return bool(gradients) and all(gradient is None for gradient in gradients)
