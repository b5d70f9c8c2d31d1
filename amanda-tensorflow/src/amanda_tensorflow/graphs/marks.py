"""Nodes of a copy that keep the order of the program: what comes before runs before.

A mark tells tools of an iteration that begins or ends within a run of a graph. All that was added
to the copy before it runs before it, and all that is added later runs after it::

    marks = Marks(building, points)
    marks.add(tell)                     # tell(points, scopes) is called in each run
    with marks.after():
        ...                             # add operators
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from amanda.engine.points import Points
from amanda.state import LiveScope
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.executions import Executions, needed_by
from amanda_tensorflow.graphs.passes import Tell
from amanda_tensorflow.graphs.run_time_routines import PythonNode


class Marks:
    """The marks of one copy.

    Args:
        building: the copy.
        points: of the driver.

    Attributes:
        last: the node of the last one; None before the first.
        unneeded: names of operators of the copy that no result needs; marks do not wait for them.
    """

    def __init__(self, building: Building, points: Points) -> None:
        self._building = building
        self._points = points
        self._size = 0
        self._nodes: list[tuple[_Mark, list[Any]]] = []
        self.last: Any = None
        self.unneeded: set[str] = set()

    def add(self, tell: Tell) -> None:
        """Add a mark to the copy."""
        building = self._building
        graph = building.graph
        waits = self._ends(graph.get_operations()[self._size :])
        node = _Mark(self._points, tell, building.scopes)
        with (
            graph.as_default(),
            tf.name_scope("amanda/mark/"),
            graph.control_dependencies(None),
            graph.control_dependencies(waits),
        ):
            node.insert([], [])
        self.last, self._size = node.op, len(graph.get_operations())
        counts, building.counts = building.counts, []
        self._nodes.append((node, counts))
        building.is_changed = building.has_python = True
        building.routines.append(node)

    @contextmanager
    def after(self) -> Iterator[None]:
        """Within it, what is added runs after the last mark."""
        if self.last is None:
            yield
            return
        with self._building.graph.control_dependencies([self.last]):
            yield

    def finish(self, roots: Sequence[Any]) -> None:
        """The copy is complete: let marks count what was executed before them.

        Args:
            roots: what a run executes, and others for its sake.
        """
        needed = needed_by([*roots, *([self.last] if self.last is not None else [])])
        for node, counts in self._nodes:
            node.executions = Executions([c for c, op in counts if op.name in needed])
        self._nodes.clear()

    def _ends(self, operations: Sequence[Any]) -> list[Any]:
        """The operators that no other of them waits for, and the last mark."""
        read = set[str]()
        for op in operations:
            read.update(tensor.op.name for tensor in op.inputs)
            read.update(before.name for before in op.control_inputs)
        ends = [op for op in operations if op.name not in read and op.name not in self.unneeded]
        return ends if self.last is None else [*ends, self.last]


class _Mark(PythonNode):
    """The node of a mark.

    Attributes:
        executions: counts what was executed between the last mark and this one.
    """

    def __init__(self, points: Points, tell: Tell, scopes: Sequence[LiveScope]) -> None:
        super().__init__()
        self._points = points
        self._tell: Tell | None = tell
        self._scopes = [weakref.ref(scope) for scope in scopes]
        self.executions: Executions | None = None

    def compute(self, values: Sequence[Any]) -> list[Any]:
        found = [reference() for reference in self._scopes]
        scopes = tuple(scope for scope in found if scope is not None and scope.alive)
        tell = self._tell
        if scopes and tell is not None:
            if self.executions is not None:
                self.executions.add()
            tell(self._points, scopes)
        return []

    def release(self) -> None:
        """Let go of the counters: the scope has ended."""
        self._tell = self.executions = None
