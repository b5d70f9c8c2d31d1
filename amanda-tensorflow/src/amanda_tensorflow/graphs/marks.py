"""Nodes of a copy that keep the order of the program: what comes before runs before.

A mark tells tools of an iteration that begins or ends within a run of a graph. Of what a run
executes, all that was added to the copy before it runs before it, and all that is added later runs
after it. No operator runs for its sake, and loops compute no result that nothing reads::

    marks = Marks(building)
    marks.add(tell)                     # tell(scopes) is called in each run
    with marks.after():
        ...                             # add operators
    marks.add_waits(roots)              # the copy is complete
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda.state import LiveScope
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.executions import Ends, Executions, needed_by, sources
from amanda_tensorflow.graphs.passes import Tell
from amanda_tensorflow.graphs.run_time_routines import insert_mark
from amanda_tensorflow.operators.types import CONTROL_FLOW

_FIRST_COME = frozenset({"Merge", "RefMerge"})
"""Operators that run as soon as one of their inputs is there."""


class Marks:
    """The marks of one copy.

    Args:
        building: the copy.

    Attributes:
        last: the node of the last one; None before the first.
    """

    def __init__(self, building: Building) -> None:
        self._building = building
        self._size = 0
        self._counts: list[tuple[Executions, list[Any]]] = []
        self._waiting: list[tuple[Any, Sequence[Any]]] = []
        self.last: Any = None
        self._later: set[str] = set()

    def add(self, tell: Tell) -> None:
        """Add a mark to the copy."""
        building = self._building
        graph = building.graph
        before = _internals.operations_since(graph, self._size)
        executions, waits = Executions(()), [] if self.last is None else [self.last]

        def told(scopes: tuple[LiveScope, ...], values: Sequence[Any]) -> None:
            executions.add()
            tell(scopes)

        self.last = insert_mark(building, told, "amanda/mark/", waits, [])
        self._waiting.append((self.last, before))
        self._size, self._later = _internals.count_operations(graph), set()
        counts, building.counts = building.counts, []
        self._counts.append((executions, counts))

    @contextmanager
    def after(self) -> Iterator[None]:
        """Within it, what is added runs after the last mark."""
        if self.last is None:
            yield
            return
        with self._building.graph.control_dependencies([self.last]):
            yield

    def before(self, kind: str, inputs: Sequence[Any], controls: Sequence[Any]) -> list[Any]:
        """The control inputs that make an operator run after the last mark.

        Nothing, where what it reads or waits for does so already: a control edge keeps operators
        from being fused. Worse, oneDNN's rewriting ends the process at a convolution that its
        BiasAdd follows if the two have the same one (TensorFlow 2.21).

        Args:
            kind: its type.
            inputs: the tensors that it reads.
            controls: the operators that it waits for.
        """
        if self.last is None:
            return []
        sources = [*controls]
        if kind not in _FIRST_COME:
            sources += [tensor.op for tensor in inputs]
        return [] if any(op.name in self._later for op in sources) else [self.last]

    def note(self, op: Any) -> None:
        """Note an operator that runs after the last mark."""
        if self.last is not None:
            self._later.add(op.name)

    def add_waits(self, roots: Sequence[Any]) -> None:
        """The copy is complete: let marks wait for what a run executes before them.

        What no result needs would run if a mark waited for it, such as the step by which an RNN of
        Keras learns the type of its output.

        Args:
            roots: what a run executes, and others for its sake.
        """
        graph, needed = self._building.graph, needed_by(roots)
        ends = Ends(graph, needed, graph.outputs)
        for mark, before in self._waiting:
            run = [op for op in before if op.name in needed]
            read = {name for op in run for name in sources(op)}
            for op in run:
                # Who reads one result of a loop waits for that one, and not for the rest of its
                # last iteration (TensorFlow 2.21).
                if op.name not in read or op.type in CONTROL_FLOW:
                    for end in ends.of(op):
                        _internals.add_control_input(mark, end)
        self._waiting.clear()

    def finish(self, roots: Sequence[Any]) -> None:
        """The copy is complete: let marks count what was executed before them.

        Args:
            roots: what a run executes, and others for its sake.
        """
        needed = needed_by([*roots, *([self.last] if self.last is not None else [])])
        for executions, counts in self._counts:
            executions.counters = [c for c, op in counts if op.name in needed]
        self._counts.clear()
