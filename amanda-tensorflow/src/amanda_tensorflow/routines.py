"""Routines in graphs: nodes that call Python at run time, or what a routine traces.

A routine of a graph mode is recorded while the instrumented copy of the graph is
built. By default a node is inserted that calls it at each execution with the
values; a routine that promises to be a function of tensors is traced into the
graph instead (design rule 14). Either way its results go in place of what was
selected, and their gradient passes straight through to what they replace,
unless the routine takes part in differentiation (rule 7).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import tensorflow as tf

from amanda._scope import Scope
from amanda.action import Action, ActionKind
from amanda.calls import OpCall
from amanda.dispatch import Dispatcher
from amanda.errors import RoutineResultError
from amanda_tensorflow import _internals
from amanda_tensorflow.nodes import (
    STRAIGHT_THROUGH,
    ReplacementRoutine,
    RunTimeRoutine,
)
from amanda_tensorflow.ops import ROUTING, takes_reference


@attrs.define(eq=False)
class Building:
    """The copy that is being built, as routines see it.

    Attributes:
        graph: the copy's graph.
        scopes: the scopes whose tools act on it.
        needs_gradient: whether the copy may be differentiated.
        anchors: operators that a node without inputs waits for.
        controls: nodes without outputs that what comes next has to wait for.
        late: a tensor's id to nodes that whoever reads the tensor has to wait for.
        template: what the replacement of an operator has to give: per output a
            tensor of its type, or None for what is not wanted.
        likes: of each such output a tensor of its shape, where it is known.
        takes_reference: whether the operator being built writes to one of its inputs.
        is_routing: whether the operator being built routes values in a version 1 loop
            or branch, where some of them may never come.
        is_changed: whether anything was inserted.
        may_change: whether a routine may have changed what a forward operator
            computes with or gives.
        has_python: whether any of it runs Python.
        routines: what calls Python at run time.
    """

    graph: Any
    scopes: tuple[Scope, ...]
    needs_gradient: bool
    anchors: Sequence[Any] = ()
    controls: list[Any] = attrs.field(factory=list)
    late: dict[int, list[Any]] = attrs.field(factory=dict)
    template: Sequence[Any] = ()
    likes: Sequence[Any] = ()
    takes_reference: bool = False
    is_routing: bool = False
    is_changed: bool = False
    may_change: bool = False
    has_python: bool = False
    routines: list[RunTimeRoutine] = attrs.field(factory=list)

    def begin(self, kind: str) -> None:
        """Note of which type the operator is that is built next."""
        self.takes_reference = takes_reference(kind)
        self.is_routing = kind in ROUTING

    def absorb(self, inner: Building) -> None:
        """Note what was done to a body or branch of the copy."""
        self.is_changed |= inner.is_changed
        self.may_change |= inner.may_change
        self.has_python |= inner.has_python
        self.routines += inner.routines

    def late_nodes(self, tensors: Iterable[Any]) -> list[Any]:
        """The nodes that whoever reads these tensors has to wait for."""
        if not self.late:
            return []
        return [node for tensor in tensors for node in self.late.get(id(tensor), ())]

    def earlier(self) -> list[Any]:
        """The nodes without outputs that were put at this point before (design rule 9)."""
        return [] if self.is_routing else list(self.controls)

    def take_controls(self) -> list[Any]:
        """The nodes to wait for, which are forgotten."""
        controls, self.controls = self.controls, []
        return controls


class _Current(threading.local):
    building: Building | None = None


def is_traceable(action: Action) -> bool:
    """Whether a routine may be traced into a graph (design rule 14)."""
    func = action.func
    return bool(getattr(func, "amanda_traceable", False)) or isinstance(
        func, tf.types.experimental.PolymorphicFunction
    )


class GraphDispatcher(Dispatcher):
    """A dispatcher whose routines are inserted into the copy that is being built.

    In a thread that builds no copy, such as one of the runtime that calls a
    routine, it is an ordinary one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._current = _Current()

    @contextmanager
    def build(self, building: Building) -> Iterator[None]:
        """Within it, the current thread builds a copy."""
        outer, self._current.building = self._current.building, building
        try:
            yield
        finally:
            self._current.building = outer

    def run(self, action: Action, values: list[Any]) -> list[Any]:
        """Insert a routine; `values` with what it gives in place of what it has selected."""
        building = self._current.building
        if building is None:
            return super().run(action, values)
        indices = range(len(values)) if action.select is None else action.select
        selected = self._selected(action, values, indices)
        if is_traceable(action):
            new = self._traced(building, action, selected)
        else:
            building.is_changed = building.has_python = True
            new = RunTimeRoutine(self, action, selected, building).inserted(values)
        if action.kind in (ActionKind.BEFORE_OP, ActionKind.AFTER_OP):
            building.may_change |= any(n is not o for n, o in zip(new, selected, strict=True))
        changed = list(values)
        for index, old, tensor in zip(indices, selected, new, strict=True):
            changed[index] = self._through(building, action, old, tensor)
        return changed

    def replace(self, action: Action, values: list[Any], call: OpCall | None = None) -> Any:
        """Insert the replacement of an operator; it is differentiated as the operator would be."""
        building = self._current.building
        if building is None or is_traceable(action):
            if building is not None:
                building.is_changed = True
            return super().replace(action, values, call)
        indices = range(len(values)) if action.select is None else action.select
        selected = self._selected(action, values, indices)
        building.is_changed = building.has_python = True
        return ReplacementRoutine(self, action, selected, building).inserted(values)

    def _traced(self, building: Building, action: Action, selected: Sequence[Any]) -> Sequence[Any]:
        """What a traceable routine makes of symbolic tensors."""
        before = len(building.graph.get_operations())
        with tf.control_dependencies(building.earlier()):
            result = self.call(action, selected)
        made = building.graph.get_operations()[before:]
        # A print or an assertion has no output that somebody waits for.
        building.controls += [op for op in made if _internals.is_stateful(op)]
        building.is_changed |= bool(made)
        if result is None:
            return selected
        final = []
        for old, new in zip(selected, self.checked(action, result, len(selected)), strict=True):
            if new is None or new is old or old is None:
                final.append(old)
                continue
            final.append(fitted(action, old, tf.convert_to_tensor(new)))
        return final

    def _through(self, building: Building, action: Action, old: Any, new: Any) -> Any:
        """`new`, whose gradient passes straight through to `old` (design rule 7)."""
        if new is old or action.differentiable or not building.needs_gradient:
            return new
        if not (old.dtype.is_floating or old.dtype.is_complex):
            return new
        with building.graph.gradient_override_map({"IdentityN": STRAIGHT_THROUGH}):
            return _internals.identity_n([new, old])[0]


def fitted(action: Action, old: Any, new: Any) -> Any:
    """`new` in the type of `old`: in a graph all types are settled before it runs.

    Raises:
        RoutineResultError: the shapes differ.
    """
    if not new.shape.is_compatible_with(old.shape):
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must return tensors of the shapes it got, "
            f"expected {tuple(old.shape)}, got {tuple(new.shape)}"
        )
    return new if new.dtype == old.dtype else tf.cast(new, old.dtype)
