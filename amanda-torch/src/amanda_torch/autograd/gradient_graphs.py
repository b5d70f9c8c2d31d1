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
from amanda_torch.autograd.nodes import LEAF, Traced, node_name
from amanda_torch.operators.layouts import Layout
from amanda_torch.routines import RoutineDispatcher


class KnownGradients:
    """Facts that a thread has learned about the backward operators of one operator, under one plan.

    Attributes:
        handle: leads hooks to the operator's records; holds no tensors.
        hooks: by backward id, where no analysis is pending: they hold nothing of one graph,
            and serve every execution.
        form: the form of its gradient graph if no node of it needs a hook, see
            :func:`~amanda_torch.autograd.nodes.form_of`; None if that is not known.
        graph: its gradient graph as it last was.
        other: as it was before, in another form: in a loop, where the first state needs no
            gradient, and the last one does, two forms take turns.
        natives: what the extension knows of its gradient graphs, one for each form.
        asked: :attr:`RoutineDispatcher.analysed` when the hooks of leaves were last looked for.
        is_new: whether the operator has just been analysed for the first time, so that no analysis
            of its backward operators has run.
    """

    __slots__ = (
        *("__weakref__", "asked", "form", "graph", "handle", "hooks", "is_new", "natives", "other"),
    )

    def __init__(self, handle: OpHandle) -> None:
        self.is_new = False
        self.handle = handle
        self.hooks: dict[str, NodeHooks] = {}
        self.form: Any = None
        self.graph: KnownGraph | None = None
        self.other: KnownGraph | None = None
        self.natives: tuple[Any, ...] = ()
        self.asked = -1

    def shared_hooks(
        self,
        dispatcher: RoutineDispatcher,
        name: str,
        backward_id: str,
        needs: tuple[bool, bool, bool] | None = None,
    ) -> NodeHooks | None:
        """The hooks of a backward operator for all executions; None if an analysis is pending.

        Args:
            needs: what :func:`backward_needs` has just said.
        """
        before, after, pending = needs or backward_needs(self.handle, backward_id)
        if pending or not STATE.cache:
            return None
        call = NodeCall(NamedOp(name), backward_id)
        hooks = NodeHooks(dispatcher, self.handle, call, (before, after))
        self.hooks[backward_id] = hooks
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
        hooks = self.hooks.get(backward_id)
        if hooks is None:
            needs = backward_needs(self.handle, backward_id)
            hooks = self.shared_hooks(dispatcher, name, backward_id, needs)
            if hooks is None:
                handle = self.handle if past is None else past.handle(self.handle)
                hooks = pending_hooks(dispatcher, needs, name, backward_id, handle, inputs)
        return hooks


def pending_hooks(
    dispatcher: RoutineDispatcher,
    needs: tuple[bool, bool, bool],
    name: str,
    backward_id: str,
    handle: OpHandle,
    inputs: Sequence[str],
) -> NodeHooks:
    """Hooks for one execution, whose tensors an analysis may ask for."""
    call = NodeCall(NamedOp(name), backward_id)
    call.names, call.inputs, call.outputs = inputs, handle.inputs, handle.outputs
    return NodeHooks(dispatcher, handle, call, needs[:2])


Way = list[tuple[int, int, int]]


class GraphShape:
    """The structure that all gradient graphs of one form share.

    Attributes:
        form, edges: see :class:`~amanda_torch.autograd.nodes.Traced`.
        names: the framework's name of each node.
        suffixes: how the id of each node's backward operator ends.
        ways: for each node of an output the way to all nodes behind it.
        types: of the nodes that the edges of a single node lead to.
        leaves: which of these edges lead to accumulations.
    """

    __slots__ = ("edges", "form", "leaves", "names", "suffixes", "types", "ways")

    def __init__(self, traced: Traced) -> None:
        self.form = traced.form
        self.edges = traced.edges
        self.names = [node_name(node) for node in traced.nodes]
        self.suffixes = _numbered(self.names)
        self.types: list[Any] = []
        self.leaves: list[int] = []
        if len(traced.nodes) == 1:
            self.types = [type(target) for target, _ in traced.nodes[0].next_functions]
            self.leaves = [i for i, place in enumerate(traced.edges[0]) if place == LEAF]
        every = set(range(len(traced.nodes)))
        entries = range(traced.entries)
        self.ways: list[Way] = [self.way(entry, traced.entries, every) for entry in entries]

    def way(self, entry: int, entries: int, wanted: set[int]) -> Way:
        """The way from the node of an output to the wanted nodes behind it.

        Those behind the node of another output are found from there.

        Returns:
            For each node where in the way the one before it stands (the entry at 0), by which of
            its edges it is reached, and its number.
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


def shape_of(traced: Traced) -> GraphShape:
    """The shape of a graph, the same for all graphs of its form."""
    nodes = traced.nodes
    key = [traced.entries, *map(_name, nodes), *map(type, nodes), *map(tuple, traced.edges)]
    if len(nodes) == 1:
        key += [type(target) for target, _ in nodes[0].next_functions]
    every = tuple(key)
    shape = _SHAPES.get(every)
    if shape is None:
        shape = GraphShape(traced)
        # Not those of the program's own functions, whose classes it may drop.
        is_kept = not any(
            isinstance(part, type) and issubclass(part, _internals.FUNCTION_NODE) for part in key
        )
        if is_kept:
            _SHAPES[every] = shape
    return shape


class KnownGraph:
    """The gradient graph of an operator, in all executions in which it has the same form.

    Attributes:
        form: see :class:`~amanda_torch.autograd.nodes.Traced`.
        shape: what it shares with other graphs.
        inputs: for each the forward inputs whose gradients it produces, see
            :attr:`amanda.interface.calls.BackwardCall.names`; None where nobody has asked.
        layout: finds the operator's inputs; None if nothing does, or none was made.
        has_layout: whether one was made, or tried to be.
        hooks: of all nodes, where no analysis of any of them is pending; otherwise None.
        inner: for each node of an output the way to the nodes behind it that have something to do.
        asked: :attr:`RoutineDispatcher.analysed` when it was last tried to find the hooks.
        is_idle: whether nothing is to be done at any node.
        is_quick: whether it has one node, all is known of that and of its leaves, and
            something is to be done there.
        types: of the nodes that the edges of a single node lead to.
        leaves: which of these edges lead to accumulations.
    """

    __slots__ = (
        "_op_id",
        "asked",
        "form",
        "has_layout",
        "hooks",
        "inner",
        "inputs",
        "is_idle",
        "is_quick",
        "layout",
        "leaves",
        "shape",
        "types",
    )

    def __init__(self, op_id: str, shape: GraphShape) -> None:
        self._op_id = op_id
        self.shape = shape
        self.form = shape.form
        self.inputs: Sequence[Sequence[str]] | None = None
        self.layout: Layout | None = None
        self.has_layout = False
        self.hooks: list[NodeHooks] | None = None
        self.asked = -1
        self.is_idle = False
        self.is_quick = False
        self.types = shape.types
        self.leaves = shape.leaves
        self.inner = shape.ways

    def __len__(self) -> int:
        return len(self.shape.names)

    def id_of(self, number: int) -> str:
        """The id of a node's backward operator."""
        return self._op_id + self.shape.suffixes[number]

    def settle(self, hooks: list[NodeHooks]) -> None:
        """Note the hooks of all nodes."""
        self.hooks = hooks
        busy = {number for number, one in enumerate(hooks) if not one.is_idle}
        self.is_idle = not busy
        if len(busy) < len(hooks):
            count = len(self.inner)
            self.inner = [self.shape.way(entry, count, busy) for entry in range(count)]


def _numbered(names: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    suffixes = []
    for name in names:
        number = counts.get(name, 0)
        counts[name] = number + 1
        suffixes.append(f"/grad/{name}:{number}")
    return suffixes


def _no_nodes() -> KnownGraph:
    graph = KnownGraph("", GraphShape(Traced([], 0, [], [], [])))
    graph.settle([])
    return graph


NO_NODES = _no_nodes()
"""The graph of an operator whose outputs want no gradient: nothing is to be found out of it."""

NO_GRADIENTS = KnownGradients(OpHandle("", ()))
"""The facts about such an operator, to be read only. One object serves all: objects of their own
would be two more for the garbage collector to visit."""
NO_GRADIENTS.form, NO_GRADIENTS.graph = (), NO_NODES
