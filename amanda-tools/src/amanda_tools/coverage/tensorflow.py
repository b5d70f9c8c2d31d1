"""Which operators Keras layers show."""

from __future__ import annotations

import collections

from amanda import OpContext
from amanda.tools.graph_tracing import Graph, TracedOp
from amanda_tools.coverage.peers import Peer


class KerasLayers(Peer):
    """Arguments and results of layers' calls, derived from the graph of operators.

    Keras has no hooks; watching means wrapping the call of each layer. An operator is seen if its
    data come from outside of the innermost name scope that runs it, and its results leave that
    scope. Name scopes stand for layers, in all modes alike; functions with a scope of their own
    count as layers, which is the most that layers can show. Nothing is called in the backward pass.
    """

    name = "keras_layers"
    framework = "tensorflow"
    how = "derived"

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._ids: set[str] = set()

    def look(self, context: OpContext) -> None:
        self._graph = context["graph"]
        self._ids.add(context.get_op_id())

    def seen(self) -> frozenset[str]:
        graph = Graph() if self._graph is None else self._graph
        static = _without_data(graph)
        neighbours: dict[str, set[str]] = collections.defaultdict(set)
        for edge in graph.edges:
            neighbours[edge.producer].add(edge.consumer)
            if edge.producer not in static:
                neighbours[edge.consumer].add(edge.producer)
        # An operator whose results nothing reads leaves its scope if it is the last one there.
        last = {op.module: op.id for op in graph.ops}
        candidates = (self._ids - static) & {*last.values(), *(e.producer for e in graph.edges)}
        return frozenset(
            op.id
            for op in graph.ops
            if op.module and op.id in candidates
            if any(tensor is not None for tensor in op.outputs)
            if not any(_is_in(graph.op(i), op.module) for i in neighbours[op.id])
        )


def _is_in(op: TracedOp, scope: str) -> bool:
    return op.module == scope or op.module.startswith(f"{scope}/")


def _without_data(graph: Graph) -> set[str]:
    """Return the operators that compute with parameters and constants only: reads, casts of
    weights."""
    static: set[str] = set()
    for op in graph.ops:
        tensors = [tensor for tensor in op.inputs if tensor is not None]
        if all(tensor.is_parameter or tensor.producer in static for tensor in tensors):
            static.add(op.id)
    return static


PEERS = (KerasLayers,)
