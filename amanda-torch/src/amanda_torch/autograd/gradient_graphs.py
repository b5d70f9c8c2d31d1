"""The gradient graph of an operator: the autograd nodes between its outputs and its inputs.

Executions of an operator have gradient graphs of few forms. All graphs of one form share the names
of the nodes, the ids of their backward operators, and their hooks.
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
"""Forms of an operator's gradient graph that are kept: in a loop whose first state needs no
gradient, two forms alternate. A form holds the classes of the program's functions, which a program
may define anew at each call."""

_NATIVES = 4
"""Forms that the extension keeps. It holds the classes weakly."""


class KnownGradients:
    """Facts that a thread has learned about the backward operators of one operator, under one plan.

    Attributes:
        handle: leads hooks to the operator's records; holds no tensors.
        hooks: hooks by backward id, of backward operators without a pending analysis. They hold no
            part of a graph, and serve every execution.
        graphs: the operator's gradient graphs by form.
        graph: the gradient graph of the last execution; None before the first one.
        natives: the extension's records of the graphs.
    """

    __slots__ = ("__weakref__", "_pending", "graph", "graphs", "handle", "hooks", "natives")

    def __init__(self, handle: OpHandle) -> None:
        self.handle = handle
        self.hooks: dict[str, NodeHooks] = {}
        self.graphs: dict[tuple[Any, ...], KnownGraph] = {}
        self.graph: KnownGraph | None = None
        self.natives: tuple[Any, ...] = ()
        # By backward id the value of RoutineDispatcher.analysed at which an analysis was pending.
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
        """Keep the extension's record of one more graph."""
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
        """The hooks of a backward operator; for one execution only if an analysis is pending.

        Args:
            past: the tensors of that execution; None if no analysis reads them.
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


NodePath = list[tuple[int, int, int]]
"""The nodes behind the node of an output, breadth first. For each node: the position in the path of
the node that leads to it (0 is the node of the output), the number of the edge there, and its own
number."""


class GraphShape:
    """The common facts of all gradient graphs of one form, also of different operators.

    Attributes:
        edges: see :class:`~amanda_torch.autograd.nodes.Traced`.
        names: names of the nodes.
        suffixes: ends of the ids of their backward operators.
        paths: for each node of an output, the path to all nodes behind it.
    """

    def __init__(self, traced: Traced) -> None:
        self.edges = traced.edges
        self.names = [node_name(node) for node in traced.nodes]
        self.suffixes = numbered(self.names)
        every = set(range(len(traced.nodes)))
        entries = range(traced.entries)
        self.paths: list[NodePath] = [self.path(entry, traced.entries, every) for entry in entries]

    def path(self, entry: int, entries: int, wanted: set[int]) -> NodePath:
        """The path from the node of an output to the wanted nodes behind it.

        It ends at nodes of other outputs, which have paths of their own.
        """
        found, path = [entry], []
        # It grows while it is read.
        for place, number in enumerate(found):
            for edge, target in enumerate(self.edges[number]):
                if target >= entries and target not in found:
                    found.append(target)
                    path.append((place, edge, target))
        while path and path[-1][2] not in wanted:
            path.pop()
        return path


_SHAPES: Memo[Any, GraphShape] = Memo(4096)
"""By form. A program has few forms; one description per operator would take most of the time of a
backward operator's first execution."""

_name = operator.methodcaller("name")


def _shape_of(traced: Traced, form: tuple[Any, ...]) -> GraphShape:
    """The shape of a graph; all graphs of one form share the object."""
    key = form, *map(_name, traced.nodes)
    shape = _SHAPES.get(key)
    if shape is None:
        shape = GraphShape(traced)
        # Not with classes of the program's own functions, which it may drop.
        if not any(issubclass(type(node), _internals.FUNCTION_NODE) for node in traced.nodes):
            _SHAPES[key] = shape
    return shape


class KnownGraph:
    """The gradient graph of an operator, in all executions in which it has the same form.

    Attributes:
        shape: the facts that graphs of its form share.
        inputs: for each node the forward inputs whose gradients it produces, see
            :attr:`amanda.interface.calls.BackwardCall.names`; None if no analysis has read them.
        layout: reads the operator's inputs; None without one.
        hooks: hooks of all nodes; None while an analysis of one of them is pending.
        inner: for each node of an output, the path to the nodes behind it that have hooks.
    """

    __slots__ = ("_op_id", "hooks", "inner", "inputs", "layout", "shape")

    def __init__(self, op_id: str, shape: GraphShape) -> None:
        self._op_id = op_id
        self.shape = shape
        self.inputs: Sequence[Sequence[str]] | None = None
        self.layout: Layout | None = None
        self.hooks: Sequence[NodeHooks] | None = None
        self.inner = shape.paths

    def id_of(self, number: int) -> str:
        """The id of a node's backward operator."""
        return self._op_id + self.shape.suffixes[number]

    def find_hooks(self, known: KnownGradients, dispatcher: RoutineDispatcher) -> bool:
        """Look for the hooks of all nodes, unless they are known; return True if they are known
        now.

        Args:
            known: the facts about the operator.
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
            self.inner = [self.shape.path(entry, count, busy) for entry in range(count)]
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
"""The graph of all operators whose outputs need no gradient."""

NO_GRADIENTS = KnownGradients(OpHandle("", ()))
"""The facts about all operators whose outputs need no gradient; read only. One object for each
would cost the garbage collector time."""
NO_GRADIENTS.graph, NO_NODES.hooks = NO_NODES, ()
