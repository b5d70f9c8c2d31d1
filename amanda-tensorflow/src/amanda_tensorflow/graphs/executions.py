"""Counters in graphs (:class:`amanda.inline.Counter`): executions that are known from the graph.

An operator of a graph without control flow is executed once in each run that needs it. Its counters
need no node: the driver adds one to each of them when a run has ended. A loop's body, or a branch,
runs as often as the values say: one node in it calls Python, whatever number of counters it has.

In loops and branches of TensorFlow 1, which are operators of the graph itself, counters are nodes
like other routines.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from amanda.inline import Counter
from amanda.state import tool_locked
from amanda_tensorflow.graphs.building import Building, identity_after
from amanda_tensorflow.graphs.run_time_routines import insert_mark
from amanda_tensorflow.operators.types import ROUTING, takes_reference


class Executions:
    """Adds the runs of a graph to the counters of its operators.

    Args:
        counters: those of the operators that a run executes.
    """

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counters = counters

    @classmethod
    def of(
        cls, building: Building, roots: Iterable[Any], fed: Container[int] = frozenset()
    ) -> Executions | None:
        """The executions in some runs of a copy; None if there is nothing to count.

        Args:
            building: the copy.
            roots: operators of the copy that a run executes, and others for their sake.
            fed: ``id`` of tensors that a run is given, whichever operator makes them.
        """
        executed = executed_by(roots, fed) if building.counts else frozenset[str]()
        counters = [counter for counter, op in building.counts if op.name in executed]
        return cls(counters) if counters else None

    @classmethod
    def of_function(cls, building: Building) -> Executions | None:
        """The executions in runs of a function; None if there is nothing to count."""
        graph = building.graph
        return cls.of(building, [*(tensor.op for tensor in graph.outputs), *graph.control_outputs])

    def add(self) -> None:
        """Count one run."""
        tool_locked(self._add)

    def _add(self) -> None:
        for counter in self.counters:
            counter.count += 1


def needed_by(roots: Iterable[Any], fed: Container[int] = frozenset()) -> set[str]:
    """Return the names of `roots` and of all operators that a run executes for their sake."""
    waiting, needed = list(roots), set[str]()
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [tensor.op for tensor in op.inputs if id(tensor) not in fed]
            waiting += op.control_inputs
    return needed


def executed_by(roots: Iterable[Any], fed: Container[int]) -> set[str]:
    """Return the names of the operators that a run of an optimized graph executes.

    The optimizer removes what has no effect and is only waited for, as TensorFlow 1 waits for all
    gradients of an operator.
    """
    waiting, seen = [(op, True) for op in roots], set[tuple[str, bool]]()
    while waiting:
        op, is_read = waiting.pop()
        is_read = is_read or op.op_def.is_stateful or op.type in ROUTING or takes_reference(op.type)
        if not {(op.name, True), (op.name, is_read)} & seen:
            seen.add((op.name, is_read))
            waiting += [(tensor.op, is_read) for tensor in op.inputs if id(tensor) not in fed]
            waiting += [(before, False) for before in op.control_inputs]
    return {name for name, is_read in seen if is_read}


def sources(op: Any) -> Iterator[str]:
    """The names of the operators that an operator waits for."""
    yield from (tensor.op.name for tensor in op.inputs)
    yield from (before.name for before in op.control_inputs)


class Ends:
    """Tells when what a run needs of an operator has been executed.

    A loop that has ended has computed all of its results, also those that nothing reads, such as
    gradients of the data: who waits for a loop waits for the results that are read.

    Args:
        graph: of the copy, which is complete.
        needed: the names of the operators that a run executes.
        outputs: the tensors that it gives.
    """

    def __init__(self, graph: Any, needed: Container[str], outputs: Iterable[Any] = ()) -> None:
        self._graph = graph
        self._needed = needed
        self._outputs = outputs
        self._read: set[int] | None = None

    def of(self, op: Any) -> Sequence[Any]:
        """The operators that have run when `op` has, as far as it is needed."""
        if op.type not in _LOOPS:
            return [op]
        if self._read is None:
            readers = (op for op in self._graph.get_operations() if op.name in self._needed)
            self._read = {id(tensor) for reader in readers for tensor in reader.inputs}
            self._read |= {id(tensor) for tensor in self._outputs}
        read = [tensor for tensor in op.outputs if id(tensor) in self._read]
        if len(read) in (0, len(op.outputs)):
            return [op]
        with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope("amanda/end/"):
            return [identity_after(tensor, []).op for tensor in read]

    def one(self, op: Any) -> Any:
        """As :meth:`of`, joined into one operator."""
        found = self.of(op)
        if len(found) == 1:
            return found[0]
        with (
            self._graph.as_default(),
            tf.name_scope("amanda/end/"),
            tf.control_dependencies(None),
            tf.control_dependencies(found),
        ):
            return tf.no_op()


_LOOPS = frozenset({"While", "StatelessWhile"})


def counts_statically(operations: Iterable[Any]) -> bool:
    """True if each of some operators is executed at most once in a run of their graph."""
    return ROUTING.isdisjoint({op.type for op in operations})


def count_runs(building: Building, is_loop: bool) -> None:
    """Let a body or branch that was added to a copy count its runs by itself.

    Args:
        is_loop: whether it is the body of a loop.
    """
    graph = building.graph
    executions = Executions.of_function(building)
    if executions is None:
        return
    # In a loop an operator without inputs might run before the first iteration, and once.
    anchors = [tensor.op for tensor in graph.inputs[:1]]
    count = executions.add
    mark = insert_mark(building, lambda scopes, values: count(), "amanda/runs/", anchors, [])
    # The runtime may leave out what nothing reads, and leave a loop before the last run of its body
    # has ended. What a body only passes on stays as it is: its gradient is another one.
    passed = {id(tensor) for tensor in graph.inputs} if is_loop else frozenset[int]()
    with graph.as_default():
        graph.outputs = [t if id(t) in passed else identity_after(t, [mark]) for t in graph.outputs]
    graph.control_outputs = [*graph.control_outputs, mark]


def moved(inner: Building, outer: Building, op: Any) -> None:
    """Let the counters of a called function count with the operator that calls it."""
    executions = Executions.of_function(inner)
    if executions is not None:
        outer.counts += [(counter, op) for counter in executions.counters]
