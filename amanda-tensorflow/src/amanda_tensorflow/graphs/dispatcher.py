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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from amanda.engine.dispatch import Dispatcher
from amanda.interface.action import Action, ActionKind
from amanda.interface.calls import OpCall
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.run_time_routines import (
    STRAIGHT_THROUGH,
    ReplacementRoutine,
    RunTimeRoutine,
    fitted,
)


class _Current(threading.local):
    building: Building | None = None


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


def is_traceable(action: Action) -> bool:
    """Whether a routine may be traced into a graph (design rule 14)."""
    func = action.func
    return bool(getattr(func, "amanda_traceable", False)) or isinstance(
        func, tf.types.experimental.PolymorphicFunction
    )
