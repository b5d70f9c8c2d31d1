"""The dispatcher of drivers that rewrite a graph before it runs.

Such a driver copies a graph operator by operator. In a thread that copies a graph, within
:meth:`StaticGraphDispatcher.build`, actions are not run but inserted into the copy. Everywhere
else, as in the threads of a runtime that calls a routine, the dispatcher is an ordinary one::

    class MyDispatcher(StaticGraphDispatcher):
        def insert(self, graph, action, values):
            return graph.add_node(action, self.selected(action, values)).outputs

        def insert_replacement(self, graph, action, values, call):
            return graph.add_node(action, self.selected(action, values)).outputs

    class MyDriver(Driver):
        dispatcher_class = MyDispatcher
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.interface.action import Action, ActionKind
from amanda.interface.calls import OpCall


class _Current(threading.local):
    graph: Any = None


class StaticGraphDispatcher(Dispatcher, abc.ABC):
    """Inserts routines into a graph under construction instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self._current = _Current()

    @abc.abstractmethod
    def insert(self, graph: Any, action: Action, values: list[Any]) -> Sequence[Any]:
        """Insert a routine.

        Args:
            graph: the graph under construction.
            values: the symbolic tensors that the action selects from.

        Returns:
            For each selected tensor its substitute in the graph, or the tensor itself.
        """

    @abc.abstractmethod
    def insert_replacement(
        self, graph: Any, action: Action, values: list[Any], call: OpCall | None
    ) -> Any:
        """Insert the replacement of an operator, differentiated as the operator would be.

        Args:
            graph: the graph under construction.
            values: the symbolic tensors that the action selects from.
            call: the operator that is replaced.

        Returns:
            The outputs of the operator.
        """

    @contextmanager
    def build(self, graph: Any) -> Iterator[None]:
        """Within it, the current thread builds `graph`."""
        outer, self._current.graph = self._current.graph, graph
        try:
            yield
        finally:
            self._current.graph = outer

    def run(self, action: Action, values: list[Any]) -> list[Any]:
        """Insert a routine; return `values` with its results in the selected positions."""
        graph = self._current.graph
        if graph is None:
            return super().run(action, values)
        indices = range(len(values)) if action.select is None else action.select
        changed = list(values)
        for index, tensor in zip(indices, self.insert(graph, action, values), strict=True):
            if tensor is not changed[index] and action.kind is ActionKind.AFTER_OP:
                self.note_substitute(changed[index], tensor, action.op_id)
            changed[index] = tensor
        return changed

    def run_all(self, actions: Sequence[Action], values: list[Any]) -> list[Any]:
        """Insert the routines of one point, in order."""
        if self._current.graph is None:
            return super().run_all(actions, values)
        for action in actions:
            values = self.run(action, values)
        return values

    def replace(self, action: Action, values: list[Any], call: OpCall | None = None) -> Any:
        """Insert the replacement of an operator."""
        graph = self._current.graph
        if graph is None:
            return super().replace(action, values, call)
        return self.insert_replacement(graph, action, values, call)
