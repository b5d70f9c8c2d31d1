"""The gradient graph of an operator: the autograd nodes between its outputs and its inputs.

Executions of an operator have gradient graphs of few forms. What is found out about one, the names
of its nodes, the ids of their backward operators, and their hooks, holds for all of its form.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from amanda.engine.backward import OpHandle, backward_needs
from amanda.interface.calls import NamedOp
from amanda.python.memo import Memo
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.executions import Past
from amanda_torch.autograd.hooks import NodeCall, NodeHooks
from amanda_torch.autograd.nodes import Traced, node_name
from amanda_torch.operators.layouts import Layout
from amanda_torch.routines import RoutineDispatcher

_FORMS = 2
"""Forms of an operator's gradient graph that are known at once: in a loop, where the first state
needs no gradient, and the last one does, two take turns. They hold the classes of the program's
functions, which it may define anew at each call."""

_NATIVES = 4
"""Forms that the extension knows at once. It holds these classes weakly."""


class KnownGradients:
    """Facts that a thread has learned about the backward operators of one operator, under one plan.

    Attributes:
        handle: leads hooks to the operator's records; holds no tensors.
        hooks: by backward id, where no analysis is pending: they hold nothing of one graph,
            and serve every execution.
        graphs: its gradient graphs, by their form.
        graph: the last one; None if there was none.
        natives: what the extension knows of them.
    """

    __slots__ = ("__weakref__", "_pending", "graph", "graphs", "handle", "hooks", "natives")

    def __init__(self, handle: OpHandle) -> None:
        self.handle = handle
        self.hooks: dict[str, NodeHooks] = {}
        self.graphs: dict[tuple[Any, ...], KnownGraph] = {}
        self.graph: KnownGraph | None = None
        self.natives: tuple[Any, ...] = ()
        # By backward id RoutineDispatcher.analysed when an analysis was found to be pending.
        self._pending: dict[str, int] = {}

    def graph_of(self, traced: Traced) -> KnownGraph:
        """The gradient graph of an execution."""
        form = traced.form()
        graph = self.graphs.get(form) if traced.nodes else NO_NODES
        if graph is None:
            if len(self.graphs) == _FORMS:
                del self.graphs[next(iter(self.graphs))]
            graph = self.graphs[form] = KnownGraph(self.handle.op_id, _shape_of(traced, form))
        self.graph = graph
        return graph

    def add_native(self, learned: Any) -> None:
        """Note what the extension has learned of one more graph."""
        self.natives = (learned, *self.natives[: _NATIVES - 1])

    def hooks_for(
        self, dispatcher: RoutineDispatcher, name: str, backward_id: str
    ) -> NodeHooks | None:
        """The hooks of a backward operator for all executions; None if an analysis is pending."""
        hooks = self.hooks.get(backward_id)
        if hooks is not None or self._pending.get(backward_id) == dispatcher.analysed:
            return hooks
        *needs, pending = backward_needs(self.handle, backward_id)
        if pending:
            self._pending[backward_id] = dispatcher.analysed
        if pending or not STATE.cache:
            return None
        call = NodeCall(NamedOp(name), backward_id)
        hooks = self.hooks[backward_id] = NodeHooks(dispatcher, self.handle, call, needs)
        return hooks

    def made_hooks(
        self,
        dispatcher: RoutineDispatcher,
        name: str,
        backward_id: str,
        past: Past | None,
        inputs: Sequence[str] = (),
    ) -> NodeHooks:
        """The hooks of a backward operator, those for one execution if an analysis is pending.

        Args:
            past: the tensors of that execution; None where no analysis asks for them.
            inputs: the names of the forward inputs whose gradients it produces.
        """
        hooks = self.hooks_for(dispatcher, name, backward_id)
        if hooks is None:
            handle = self.handle if past is None else past.handle(self.handle)
            call = NodeCall(NamedOp(name), backward_id)
            call.names, call.inputs, call.outputs = inputs, handle.inputs, handle.outputs
            *needs, _ = backward_needs(self.handle, backward_id)
            hooks = NodeHooks(dispatcher, handle, call, needs)
        return hooks


Way = list[tuple[int, int, int]]
"""The way from the node of an output to nodes behind it: for each node where in the way the one
before it stands (the entry at 0), by which of its edges it is reached, and its number."""


class GraphShape:
    """What gradient graphs of the same form have in common, also those of other operators.

    Attributes:
        edges: see :class:`~amanda_torch.autograd.nodes.Traced`.
        names: of the nodes.
        suffixes: of the ids of their backward operators.
        ways: for each node of an output the way to all nodes behind it.
    """

    def __init__(self, traced: Traced) -> None:
        self.edges = traced.edges
        self.names = [node_name(node) for node in traced.nodes]
        self.suffixes = numbered(self.names)
        every = set(range(len(traced.nodes)))
        entries = range(traced.entries)
        self.ways: list[Way] = [self.way(entry, traced.entries, every) for entry in entries]

    def way(self, entry: int, entries: int, wanted: set[int]) -> Way:
        """The way from the node of an output to the wanted nodes behind it.

        Those behind the node of another output are found from there.
        """
        found, way = [entry], []
        # It grows while it is read.
        for place, number in enumerate(found):
            for edge, target in enumerate(self.edges[number]):
                if target >= entries and target not in found:
                    found.append(target)
                    way.append((place, edge, target))
        while way and way[-1][2] not in wanted:
            way.pop()
        return way


_SHAPES: Memo[Any, GraphShape] = Memo(4096)
"""By form: a program has few, and a description for each operator would take most of the time in
which a backward operator is first met."""

_name = operator.methodcaller("name")


def _shape_of(traced: Traced, form: tuple[Any, ...]) -> GraphShape:
    """The shape of a graph, the same for all graphs of its form."""
    key = form, *map(_name, traced.nodes)
    shape = _SHAPES.get(key)
    if shape is None:
        shape = GraphShape(traced)
        # Not those of the program's own functions, whose classes it may drop.
        if not any(issubclass(type(node), _internals.FUNCTION_NODE) for node in traced.nodes):
            _SHAPES[key] = shape
    return shape


class KnownGraph:
    """The gradient graph of an operator, in all executions in which it has the same form.

    Attributes:
        shape: what it shares with other graphs.
        inputs: for each node the forward inputs whose gradients it produces, see
            :attr:`amanda.interface.calls.BackwardCall.names`; None where nobody has asked.
        layout: finds the operator's inputs; None if nothing does, or none was made.
        hooks: of all nodes, where no analysis of any of them is pending; otherwise None.
        inner: for each node of an output the way to the nodes behind it that have something to do.
    """

    __slots__ = ("_op_id", "hooks", "inner", "inputs", "layout", "shape")

    def __init__(self, op_id: str, shape: GraphShape) -> None:
        self._op_id = op_id
        self.shape = shape
        self.inputs: Sequence[Sequence[str]] | None = None
        self.layout: Layout | None = None
        self.hooks: Sequence[NodeHooks] | None = None
        self.inner = shape.ways

    def id_of(self, number: int) -> str:
        """The id of a node's backward operator."""
        return self._op_id + self.shape.suffixes[number]

    def find_hooks(self, known: KnownGradients, dispatcher: RoutineDispatcher) -> bool:
        """True if the hooks of all nodes are known; they are looked for if they were not.

        Args:
            known: what is known of the operator.
        """
        if self.hooks is not None:
            return True
        hooks = []
        for number, name in enumerate(self.shape.names):
            one = known.hooks_for(dispatcher, name, self.id_of(number))
            if one is None:
                return False
            hooks.append(one)
        self.hooks = hooks
        busy = {number for number, one in enumerate(hooks) if not one.is_idle}
        if len(busy) < len(hooks):
            count = len(self.inner)
            self.inner = [self.shape.way(entry, count, busy) for entry in range(count)]
        return True


def numbered(names: Sequence[str]) -> list[str]:
    """The ends of the ids of backward operators with these names, in order."""
    counts: dict[str, int] = {}
    suffixes = []
    for name in names:
        number = counts.get(name, 0)
        counts[name] = number + 1
        suffixes.append(f"/grad/{name}:{number}")
    return suffixes


NO_NODES = KnownGraph("", GraphShape(Traced([], 0)))
"""The graph of an operator whose outputs want no gradient, the same for all."""

NO_GRADIENTS = KnownGradients(OpHandle("", ()))
"""The facts about an operator whose outputs want no gradient, to be read only. One object serves
all: objects of their own would be more for the garbage collector to visit."""
NO_GRADIENTS.graph, NO_NODES.hooks = NO_NODES, ()
