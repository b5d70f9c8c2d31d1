"""The dispatcher of the graph modes, which inserts routines into a copy instead of running them.

By default a node is inserted that calls the routine at each execution. A routine that promises to
be a function of tensors (``@amanda.traceable``, or a ``tf.function``) is traced into the graph
instead (contract rule 14). Either way its results take the place of the tensors that it selects,
and their gradient passes straight through to these tensors, unless the routine takes part in
differentiation (contract rule 7)::

    with dispatcher.build(building):
        tensors = dispatcher.run(action, tensors)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from amanda.driver import Dispatcher, StaticGraphDispatcher
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
from amanda_tensorflow.operators.types import is_differentiable


class GraphDispatcher(StaticGraphDispatcher):
    """Inserts routines into the copy that the current thread builds."""

    def run(self, action: Action, values: list[Any]) -> list[Any]:
        """Insert a routine; `values` with its results in the selected positions."""
        building = self._current.graph
        if building is not None and building.count(action):
            return values
        return super().run(action, values)

    def insert(self, building: Building, action: Action, values: list[Any]) -> Sequence[Any]:
        """Insert a routine, traced or as a node that calls Python."""
        selected = self.selected(action, values)
        is_traced = is_traceable(action)
        if is_traced:
            new = self._traced(building, action, selected)
        else:
            building.is_changed = building.has_python = True
            new = RunTimeRoutine(self, action, selected, building).inserted(values)
        if action.kind in (ActionKind.BEFORE_OP, ActionKind.AFTER_OP):
            building.may_change |= any(n is not o for n, o in zip(new, selected, strict=True))
        if not is_traced:
            return new
        return [
            self._through(building, action, old, tensor)
            for old, tensor in zip(selected, new, strict=True)
        ]

    def insert_replacement(
        self, building: Building, action: Action, values: list[Any], call: OpCall | None
    ) -> Any:
        """Insert a replacement, traced or as a node that calls Python."""
        building.is_changed = building.is_replaced = True
        if is_traceable(action):
            return Dispatcher.replace(self, action, values, call)
        building.has_python = True
        selected = self.selected(action, values)
        return ReplacementRoutine(self, action, selected, building).inserted(values)

    def _traced(self, building: Building, action: Action, selected: Sequence[Any]) -> Sequence[Any]:
        """Trace a routine into the copy. Returns the tensors in place of the selected ones."""
        before = _internals.count_operations(building.graph)
        with tf.control_dependencies(building.earlier()):
            result = self.tool_code.enter(self.call, action, selected)
        made = _internals.operations_since(building.graph, before)
        building.enter_loop(made, selected)
        # A print or an assertion has no output by which it would be run.
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
        """`new`, whose gradient passes straight through to `old` (contract rule 7)."""
        if new is old or action.differentiable or not building.needs_gradient:
            return new
        if not is_differentiable(old):
            return new
        with building.graph.gradient_override_map({"IdentityN": STRAIGHT_THROUGH}):
            return _internals.identity_n([new, old])[0]


def is_traceable(action: Action) -> bool:
    """True if a routine may be traced into a graph (contract rule 14)."""
    func = action.func
    return bool(getattr(func, "amanda_traceable", False)) or isinstance(
        func, tf.types.experimental.PolymorphicFunction
    )
