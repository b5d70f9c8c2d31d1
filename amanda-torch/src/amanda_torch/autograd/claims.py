"""Backward operators: which autograd nodes belong to which operator, and when they are hooked.

A :class:`Claimer` is called for an operator right after it has run::

    start = _internals.sequence_number()
    result = operator(...)
    claimer.claim(plan, known, execution, result, start, iteration)

Only the nodes of its outputs are hooked then. The nodes behind them, of which some operators have
many, are hooked when a backward pass comes to the operator (:class:`Claim`): a forward pass whose
graph no backward pass uses pays nothing for them.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from amanda.engine.backward import OpHandle, PastTensor, backward_needs
from amanda.engine.plan import ActionPlan
from amanda.interface.calls import NamedOp
from amanda.memo import Memo
from amanda.references import Reference, nothing
from amanda.state import STATE, Lock
from amanda_torch import _internals
from amanda_torch.autograd.hooks import (
    Accumulation,
    NodeCall,
    NodeHooks,
    add_reached,
    note_reached,
    nothing_flows,
)
from amanda_torch.autograd.nodes import (
    KINDS,
    LEAF,
    UNCERTAIN,
    Traced,
    edge_of,
    form_of,
    is_accumulation,
    is_edge,
    is_own,
    is_replaced,
    new_nodes,
    node_name,
    trace_graph,
)
from amanda_torch.operators.calls import TorchCall, tensors_of
from amanda_torch.operators.layouts import Layout
from amanda_torch.operators.names import is_constant
from amanda_torch.routines import RoutineDispatcher

_MARK = "amanda"
"""Key in the metadata of a leaf's accumulation: by scope in which some operator owns it, its
:class:`~amanda_torch.autograd.hooks.Accumulation`; None where nothing is to be done at it. The only
one stands there without a dictionary: Python's, or that of the gate."""

_COMPILED_PASSES = "backward operators behind others, in passes of compiled autograd"

_current_node = _internals.current_node
_next_number = _internals.sequence_number
_sequence = _internals.node_sequence


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
        natives: the hooks of its leaves' accumulations, as far as the gate has made them; None for
            none.
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
        self.natives: list[Any] | None = None
        self.asked = -1

    def take_turns(self) -> None:
        """Make the other graph the present one."""
        self.graph, self.other = self.other, self.graph


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
        natives: what the gate has made of `hooks`; None if it has not.
        pending: what has claimed it, where the gate may note further executions with analyses
            pending, see :meth:`Claimer.resume`; otherwise None.
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
        "natives",
        "pending",
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
        self.natives: list[Any] | None = None
        self.pending: Claimer | None = None
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
    graph.natives = []
    return graph


_NO_NODES = _no_nodes()
"""The graph of an operator whose outputs want no gradient: nothing is to be found out of it."""

NO_GRADIENTS = KnownGradients(OpHandle("", ()))
"""The facts about such an operator, to be read only. One object serves all: objects of their own
would be two more for the garbage collector to visit."""
NO_GRADIENTS.form, NO_GRADIENTS.graph = (), _NO_NODES


class Execution:
    """One execution of an operator, which is described when the first analysis asks for it.

    Args:
        describe: describes it.
        modules: gives references to the running modules, innermost first.
        key, args, kwargs: what a :class:`~amanda_torch.operators.layouts.Layout` finds its inputs
            by; None for a `key` where nothing does.
    """

    __slots__ = ("_args", "_call", "_describe", "_kwargs", "_past", "key", "modules")

    def __init__(
        self,
        describe: Callable[[], TorchCall],
        modules: Callable[[], Sequence[weakref.ref[nn.Module]]],
        key: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._describe = describe
        self.modules = modules
        self.key = key
        self._args = args
        self._kwargs: Mapping[str, Any] = kwargs or {}
        self._call: TorchCall | None = None
        self._past: Past | None = None

    def call(self) -> TorchCall:
        """The call."""
        self._call = self._call or self._describe()
        return self._call

    def layout(self) -> Layout | None:
        """The layout that finds the inputs of other executions; None without a key."""
        call = self.call()
        return None if self.key is None else Layout.of(call, call.op.__name__, self.key)

    def past(self, outputs: Sequence[Any], layout: Layout | None = None) -> Past:
        """The tensors of the execution, held weakly.

        Args:
            layout: finds the inputs without a description.
        """
        if self._past is None:
            inputs: Sequence[Any] | None = None
            if layout is not None and self.key is not None:
                inputs = layout.values(self.key, self._args, self._kwargs)
            inputs = self.call().inputs if inputs is None else inputs
            self._past = Past(inputs, outputs, self.modules())
        return self._past


class Past(list[Any]):
    """The tensors of a past execution, held weakly.

    One object, the list of all references: those to inputs, to outputs and to modules.

    Args:
        modules: references to those that were running, innermost first.
    """

    __slots__ = ("_handle", "_inputs", "_outputs")

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        modules: Sequence[weakref.ref[nn.Module]],
    ) -> None:
        # Not Amanda's own for all: only of parameters may the program swap what they hold.
        references = [
            None
            if t is None
            else weakref.ref(t)
            if type(t) is torch.Tensor
            else Reference(t, nothing)
            for t in (*inputs, *outputs)
        ]
        super().__init__(references)
        self += modules
        self._inputs = len(inputs)
        self._outputs = len(outputs)
        self._handle: OpHandle | None = None

    @classmethod
    def of(cls, found: Any) -> Past:
        """Convert the gate's note of an execution; a `Past` is returned unchanged."""
        if isinstance(found, cls):
            return found
        references, inputs, outputs = found.parts()
        past = cls((), (), references)
        past._inputs, past._outputs = inputs, outputs
        return past

    def handle(self, bare: OpHandle) -> OpHandle:
        """A handle like `bare`, which also leads to the tensors."""
        if self._handle is None:
            scopes = [scope for scope in (ref() for ref in bare.scopes) if scope is not None]
            tensors, count = self._past(), self._inputs
            inputs, outputs = tensors[:count], tensors[count:]
            self._handle = OpHandle(bare.op_id, scopes, inputs, outputs, model=bare.model)
        return self._handle

    def bare(self) -> Past:
        """A copy without the handle, which would keep the operator's records alive."""
        count = self._inputs + self._outputs
        copy = Past((), (), self[count:])
        copy[:0] = self[:count]
        copy._inputs, copy._outputs = self._inputs, self._outputs
        return copy

    def _past(self) -> list[PastTensor | None]:
        count = self._inputs + self._outputs
        # Not a method, which would be a cycle. One whose tensor is gone says so.
        value = functools.partial(_constant, self[count:])
        return [None if ref is None else PastTensor(ref, value) for ref in self[:count]]


def _constant(modules: Sequence[weakref.ref[nn.Module]], tensor: Any) -> Any:
    """The tensor if it is a parameter, buffer or constant of these modules."""

    def running() -> list[nn.Module]:
        return [module for module in (ref() for ref in modules) if module is not None]

    return tensor if is_constant(tensor, running) else None


class Claim:
    """The backward operators of one execution, found where a backward pass comes to it.

    Args:
        past: the tensors of the execution; None where no analysis is pending.
        reached: what is told when a pass comes to the operator.
    """

    __slots__ = (
        *("_claimer", "_done", "_graph", "_hooks", "_is_settled", "_known", "_past", "_reached"),
    )

    def __init__(
        self,
        claimer: Claimer,
        known: KnownGradients,
        graph: KnownGraph,
        past: Past | None,
        reached: Sequence[Accumulation],
    ) -> None:
        self._claimer = claimer
        self._known = known
        self._graph = graph
        self._past = past
        self._reached = reached
        # Made where a pass comes to it: it may never do.
        self._done: set[int] | None = None
        # A list of its own where some are yet to be made.
        self._hooks: Any = graph.hooks
        self._is_settled = graph.hooks is not None

    def register(self, entry: int, node: Any) -> None:
        """Hook the node of an output.

        Args:
            entry: its number.
        """
        hooks: Any = self._hooks[entry] if self._hooks else None
        native = self._claimer.dispatcher.native
        # Nearly all operators have one entry. Bound methods would be two objects more for each.
        hook = functools.partial(self, entry=entry) if entry else self
        native.attach(node, hook, False) if native else node.register_prehook(hook)
        if native and self._is_settled and not hooks.has_before:
            native.register(hooks, node)
        elif hooks is None or hooks.has_after:
            native.attach(node, hook, True) if native else node.register_hook(hook)

    def __call__(
        self,
        gradients: tuple[Any, ...],
        grad_outputs: tuple[Any, ...] | None = None,
        entry: int = 0,
    ) -> Any:
        """Prehook of an entry; posthook, where PyTorch passes what the node has consumed, too."""
        if grad_outputs is not None:
            hooks = self._hooks_at(entry)
            return hooks.after(gradients, grad_outputs) if hooks.has_after else None
        if nothing_flows(gradients):
            return None
        if self._done is None:
            self._done = set()
        if entry not in self._done:
            self._done.add(entry)
            self._hook_inner(entry, self._done)
        if self._reached:
            note_reached(self._reached, gradients)
        hooks = self._hooks_at(entry)
        return hooks.before(gradients) if hooks.has_before else None

    def _hook_inner(self, entry: int, done: set[int]) -> None:
        """Hook the nodes behind the one that runs now: a pass comes to them later.

        Args:
            done: the numbers of those that are hooked, to be added to.
        """
        way = self._graph.inner[entry]
        if not way:
            return
        nodes = [_current_node()]
        if nodes[0] is None:
            # Compiled autograd calls the hooks of nodes in code of its own, where none is run.
            self._claimer.dispatcher.not_seen(_COMPILED_PASSES, len(way))
            return
        # An LSTM's cell has thirteen of them.
        settled = self._hooks if self._is_settled else None
        for place, edge, number in way:
            node = nodes[place].next_functions[edge][0]
            nodes.append(node)
            if number not in done:
                done.add(number)
                hooks = settled[number] if settled else self._hooks_at(number)
                if not hooks.is_idle:
                    hooks.register(node)

    def _hooks_at(self, number: int) -> NodeHooks:
        if self._hooks is None:
            self._hooks = [None] * len(self._graph)
        hooks: NodeHooks | None = self._hooks[number]
        if hooks is None:
            hooks = self._claimer.hooks_of(self._known, self._graph, number, self._past)
            self._hooks[number] = hooks
        return hooks


_leaf_locked = Lock().hold
"""Calls a function that claims the accumulations of leaves: threads may share a leaf, and one that
finds it claimed has to find its hooks there, too."""


class _Owner(Reference):
    """A reference to a leaf, and the operator whose its accumulation is.

    One object: with a callback of its own it would be six.

    Attributes:
        op_id: of the operator.
        known: a reference to what is known of its gradients: the leaf may outlive its model.
        number: of the leaf among those that it owns.
        past: its tensors, as long as an analysis of the accumulation is pending.
        is_idle: whether it is known that nothing is to be done there. Read by the gate.
    """

    __slots__ = ("is_idle", "key", "known", "number", "op_id", "owners", "past")

    key: int
    owners: dict[int, _Owner]
    op_id: str
    known: weakref.ref[KnownGradients]
    number: int
    past: Past | None
    is_idle: bool


def _forget_owner(owner: Any) -> None:
    """The leaf is gone."""
    if owner.owners.get(owner.key) is owner:
        del owner.owners[owner.key]


class LateClaims(Protocol):
    """Operators whose leaves are hooked only if that turns out to be necessary.

    It stands for their iteration in :attr:`Claimer.iterations`, where the gate does not know it and
    asks Python.

    Attributes:
        iteration: in which they last ran.
    """

    iteration: int

    def mark(self, node: Any) -> bool:
        """Hook the accumulation of a leaf, which another operator uses as well.

        Returns:
            Whether there was something to do.
        """


class Claimer:
    """Finds the autograd nodes of forward operators and hooks them, for one thread.

    Attributes:
        dispatcher: runs their routines.
        iterations: by operator the iteration in which it last ran with gradients.
        leaf_owners: by the identity of a leaf a weak reference to it, and the operator that used it
            first in an iteration.
        owner_changes: how often a leaf has got another owner.
        late_runs: runs of captured graphs whose leaves are hooked only if that is necessary.
        late_changes: how often accumulations that such runs use may have got hooks.
    """

    def __init__(self, dispatcher: RoutineDispatcher) -> None:
        self.dispatcher = dispatcher
        self.iterations: dict[str, int | LateClaims] = {}
        self.leaf_owners: dict[int, _Owner] = {}
        self.owner_changes = 0
        self.late_runs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.late_changes = 0

    @staticmethod
    def is_alone() -> bool:
        """Whether operators of at most one thread own leaves."""
        return len(_CLAIMERS) <= 1

    def clear(self) -> None:
        """Forget everything, at the end of the thread's scopes."""
        self.iterations.clear()
        self.leaf_owners.clear()
        _CLAIMERS.discard(self)

    def forget(self, model: str) -> None:
        """Drop the facts about the operators of a model that is gone, in any thread.

        Args:
            model: what their ids begin with.
        """
        ends = tuple(f"{model}{end}" for end in "./#")
        for op_id in list(self.iterations):
            if op_id.startswith(ends):
                self.iterations.pop(op_id, None)

    def owners(self) -> set[str]:
        """The operators that own an accumulation."""
        return {owner.op_id for owner in list(self.leaf_owners.values())}

    def note_run(self, op_id: str, iteration: int) -> None:
        """Remember the iteration in which an operator with gradients last ran."""
        self.iterations[op_id] = iteration

    def claim_again(
        self, plan: ActionPlan, known: KnownGradients, result: Any, start: int, iteration: int
    ) -> bool:
        """A fast form of :meth:`claim` for an operator of one node about which everything is known.

        Returns:
            Whether it was such an operator; otherwise nothing is done.
        """
        graph = known.graph
        if graph is None or not graph.is_quick or type(result) is not torch.Tensor:
            return False
        node: Any = result.grad_fn if _next_number() - start == 1 else None
        # Where there is one new node, others of these types are as old as they were.
        if (
            type(node) is not graph.form[0]
            or _sequence(node) != start
            or [type(target) for target, _ in node.next_functions] != graph.types
            or not (STATE.cache and _internals.is_only_run())
        ):
            return False
        self.iterations[plan.op_id] = iteration
        reached: list[Accumulation] = []
        if graph.leaves:
            leaves = dict.fromkeys(node.next_functions[edge][0] for edge in graph.leaves)
            _leaf_locked(self._claim_leaves, list(leaves), known, None, iteration, reached)
        if reached:
            note = functools.partial(note_reached, reached)
            native = self.dispatcher.native
            native.attach(node, note, False) if native else node.register_prehook(note)
        if not graph.is_idle and graph.hooks is not None:
            graph.hooks[0].register(node)
        return True

    def claim(
        self,
        plan: ActionPlan,
        known: KnownGradients,
        execution: Execution,
        result: Any,
        start: int,
        iteration: int,
    ) -> None:
        """Find the backward operators of an operator that has just run, and hook the first of them.

        Args:
            known: what is known of them, to be added to.
            execution: it is asked only for an analysis.
            result: the operator's result.
            start: the sequence number read before it ran.
            iteration: the iteration of its thread.
        """
        self.iterations[plan.op_id] = iteration
        if known.form is not None and known.form == form_of(result):
            return
        graph = known.graph
        outputs = tensors_of(result)
        traced = None
        if STATE.cache and not plan.acts_on_gradients:
            # Of a graph that has another form, the names of the inputs are yet to be found.
            is_described = graph is not None and (graph.hooks or graph.inputs)
            form = graph.form if graph is not None and is_described else None
            traced = trace_graph(outputs, start, form, self.dispatcher.native)
        if traced is None:
            self._claim_all(plan, known, execution, result, start, iteration)
            return
        if graph is None or (graph.form is not traced.form and graph.form != traced.form):
            # KnownGradients.take_turns(), without a function.
            graph = known.other
            known.graph, known.other = graph, known.graph
            if graph is None or graph.form != traced.form:
                # Where no tensor wants a gradient, the same for all operators.
                new = KnownGraph(plan.op_id, shape_of(traced)) if traced.nodes else _NO_NODES
                graph = known.graph = new
            if known.is_new:
                graph.asked = known.asked = self.dispatcher.analysed
        known.is_new = False
        if graph.hooks is None and graph.asked != self.dispatcher.analysed:
            self._ask(known, graph)
        reached: list[Accumulation] = []
        leaves, described = traced.leaves, (execution, outputs)
        is_idle = not leaves or _leaf_locked(
            self._claim_leaves, leaves, known, described, iteration, reached
        )
        self._hook_entries(known, graph, traced, execution, outputs, reached)
        graph.pending = self if graph.hooks is None and traced.entries == 1 else None
        if graph.hooks is not None and self.dispatcher.native is not None:
            self._give_to_gate(known, graph)
        if graph.types and graph.hooks is not None:
            # A second operator on a leaf owns none, and has no hooks for it.
            ids = [f"{plan.op_id}/grad/AccumulateGrad:{i}" for i in range(len(traced.leaves))]
            graph.is_quick = all(backward_id in known.hooks for backward_id in ids)
        if is_idle and not reached and graph.is_idle:
            graph.is_quick = False
            form = form_of(result)
            # An operator that has returned its input has the form of another one.
            known.form = form if traced.entries or not form else None
        else:
            # The form of an earlier graph, at which there was nothing to do, does not hold any
            # more.
            known.form = None

    def resume(
        self, known: KnownGradients, graph: KnownGraph, past: Any, reached: Sequence[Accumulation]
    ) -> Claim:
        """The claim of an execution that the gate has noted, made when a pass comes to it.

        Args:
            past: its tensors, as the gate has them.
            reached: is told of the pass.
        """
        return Claim(self, known, graph, Past.of(past), reached)

    def _give_to_gate(self, known: KnownGradients, graph: KnownGraph) -> None:
        """Hand over to the gate: nothing has to be found out about later executions."""
        make = self.dispatcher.native.hook
        if graph.natives is None:
            graph.natives = [make(hooks) for hooks in graph.hooks or ()]
        leaves, op_id = known.natives or [], known.handle.op_id
        while hooks := known.hooks.get(f"{op_id}/grad/AccumulateGrad:{len(leaves)}"):
            leaves.append(make(hooks))
        known.natives = leaves or None

    def _ask(self, known: KnownGradients, graph: KnownGraph) -> None:
        """Find the hooks of all nodes of a graph, if no analysis of any of them is pending."""
        graph.asked = self.dispatcher.analysed
        hooks = []
        for number, name in enumerate(graph.shape.names):
            backward_id = graph.id_of(number)
            one = known.hooks.get(backward_id)
            if one is None:
                one = self._shared_hooks(known, name, backward_id)
                if one is None:
                    return
            hooks.append(one)
        graph.settle(hooks)

    def _shared_hooks(
        self,
        known: KnownGradients,
        name: str,
        backward_id: str,
        needs: tuple[bool, bool, bool] | None = None,
    ) -> NodeHooks | None:
        """The hooks of a backward operator for all executions; None if an analysis is pending.

        Args:
            needs: what :func:`backward_needs` has just said.
        """
        before, after, pending = needs or backward_needs(known.handle, backward_id)
        if pending or not STATE.cache:
            return None
        call = NodeCall(NamedOp(name), backward_id)
        hooks = NodeHooks(self.dispatcher, known.handle, call, (before, after))
        known.hooks[backward_id] = hooks
        return hooks

    def hooks_of(
        self, known: KnownGradients, graph: KnownGraph, number: int, past: Past | None
    ) -> NodeHooks:
        """The hooks of one node in one execution.

        Args:
            past: the tensors of the execution.
        """
        inputs = graph.inputs[number] if graph.inputs is not None else ()
        name, backward_id = graph.shape.names[number], graph.id_of(number)
        return self._made_hooks(known, name, backward_id, past, inputs)

    def _made_hooks(
        self,
        known: KnownGradients,
        name: str,
        backward_id: str,
        past: Past | None,
        inputs: Sequence[str] = (),
    ) -> NodeHooks:
        hooks = known.hooks.get(backward_id)
        if hooks is None:
            needs = backward_needs(known.handle, backward_id)
            hooks = self._shared_hooks(known, name, backward_id, needs)
            if hooks is None:
                handle = known.handle if past is None else Past.of(past).handle(known.handle)
                hooks = self._pending_hooks(needs, name, backward_id, handle, inputs)
        return hooks

    def _pending_hooks(
        self,
        needs: tuple[bool, bool, bool],
        name: str,
        backward_id: str,
        handle: OpHandle,
        inputs: Sequence[str],
    ) -> NodeHooks:
        """Hooks for one execution, whose tensors an analysis may ask for."""
        call = NodeCall(NamedOp(name), backward_id)
        call.names, call.inputs, call.outputs = inputs, handle.inputs, handle.outputs
        return NodeHooks(self.dispatcher, handle, call, needs[:2])

    def _hook_entries(
        self,
        known: KnownGradients,
        graph: KnownGraph,
        traced: Traced,
        execution: Execution,
        outputs: Sequence[Any],
        reached: Sequence[Accumulation],
    ) -> None:
        """Hook the nodes of the outputs."""
        settled, past, claim = graph.hooks, None, None
        if settled is None and traced.entries:
            if graph.inputs is None:
                call = execution.call()
                graph.inputs = _input_names(traced.nodes, call)
            if execution.key is not None and not graph.has_layout:
                graph.layout, graph.has_layout = execution.layout(), True
            past = execution.past(outputs, graph.layout)
        for entry in range(traced.entries):
            if settled is not None and not (reached or graph.inner[entry]):
                if not settled[entry].is_idle:
                    settled[entry].register(traced.nodes[entry])
                continue
            claim = claim or Claim(self, known, graph, past, reached or ())
            claim.register(entry, traced.nodes[entry])

    def _claim_leaves(
        self,
        leaves: Sequence[Any],
        known: KnownGradients,
        described: tuple[Execution, Sequence[Any]] | Past | None,
        iteration: int,
        reached: list[Accumulation],
        first: int = 0,
    ) -> bool:
        """Hook the accumulations of leaves that belong to an operator, under the lock.

        Args:
            known: what is known of the operator's gradients.
            described: the execution and its outputs, or its tensors; None if no analysis is
                pending.
            reached: is added what is to be told when a pass comes to the operator.
            first: the number of the first one that belongs to it.

        Returns:
            Whether nothing is to be done at any of them.
        """
        handle, count, is_idle = known.handle, first, True
        for node in leaves:
            mark = node.metadata.get(_MARK)
            # Python's or the gate's.
            if mark is not None and type(mark) is not dict and mark.scopes == handle.scopes:
                # Of an operator that ran before, as of all but the first calls in a loop.
                if type(mark) is Accumulation and self.dispatcher.native is not None:
                    mark = self._handed_over(node, mark, known)
                if not mark.is_idle and mark not in reached:
                    reached.append(mark)
                continue
            marks, fresh = self._owned(node, known, iteration, count)
            if not fresh:
                add_reached(reached, marks, handle.scopes)
                continue
            backward_id = f"{handle.op_id}/grad/AccumulateGrad:{count}"
            count += 1
            hooks = known.hooks.get(backward_id)
            if hooks is None and known.asked != self.dispatcher.analysed:
                hooks = self._shared_hooks(known, "AccumulateGrad", backward_id)
            if hooks is None or not hooks.is_idle:
                is_idle, past = False, None
                if hooks is None and type(described) is Past:
                    past = described
                elif hooks is None and described is not None:
                    layout = None if known.graph is None else known.graph.layout
                    past = described[0].past(described[1], layout)
                only = self._hook_leaf(node, marks, fresh, known, backward_id, hooks, past)
                if only is None:
                    add_reached(reached, marks, handle.scopes)
                else:
                    reached.append(only)
        known.asked = self.dispatcher.analysed
        return is_idle

    def _hook_leaf(
        self,
        node: Any,
        marks: dict[Any, Any],
        fresh: Sequence[Any],
        known: KnownGradients,
        backward_id: str,
        hooks: NodeHooks | None,
        past: Past | None,
    ) -> Accumulation | None:
        """Hook the accumulation of a leaf that begins to belong to an operator.

        Args:
            marks, fresh: see :meth:`_owned`; the former is added to.
            known: what is known of the operator's gradients.
            backward_id: the accumulation's id.
            hooks: what acts there; None as long as an analysis is pending.
            past: the tensors of the execution that the analysis is told.

        Returns:
            What acts there, if it is the same in all scopes that have marked it.
        """
        # It may outlive the model, as the leaf may.
        self.leaf_owners[id(node.variable)].past = None if past is None else past.bare()
        native = self.dispatcher.native
        # One for each: a pass of another thread may come through some of them only.
        for scopes in (fresh,) if len(fresh) == 1 else [(scope,) for scope in fresh]:
            one = Accumulation(self, known, backward_id, scopes, past)
            if len(marks) > 1:
                marks[scopes[0]] = one
            else:
                node.metadata[_MARK] = one
            if hooks is None or hooks.has_before:
                native.attach(node, one, False) if native else node.register_prehook(one)
            if hooks is None or hooks.has_after:
                native.attach(node, one, True) if native else node.register_hook(one)
        return None if len(marks) > 1 else one

    def _handed_over(self, node: Any, mark: Accumulation, known: KnownGradients) -> Any:
        """Exchange Python's hooks of an accumulation for the gate's, if that is possible now.

        Where the graph of one step is alive until that of the next one has been made, as a loop's
        ``loss = ...`` keeps it, all steps have the accumulations of the first one, in which
        analyses were pending.
        """
        native, backward_id = self.dispatcher.native, mark.backward_id
        is_own = backward_id.startswith(f"{known.handle.op_id}/grad/")
        # Not where a pass may be about to call what is to be exchanged.
        if not is_own or not self.is_alone() or _internals.graph_task() >= 0:
            return mark
        hooks = known.hooks.get(backward_id)
        if hooks is None and known.asked != self.dispatcher.analysed:
            hooks = self._shared_hooks(known, "AccumulateGrad", backward_id)
        made = None if hooks is None else native.exchange(node, mark, native.hook(hooks))
        if made is None:
            return mark
        mark.hand_over(made)
        node.metadata[_MARK] = made
        return made

    def claim_leaves(
        self,
        leaves: Sequence[Any],
        known: KnownGradients,
        iteration: int,
        reached: list[Accumulation],
        past: Past | None = None,
    ) -> None:
        """Hook the accumulations of leaves that belong to an operator in compiled code.

        Args:
            known: what is known of the operator's gradients.
            reached: is added what is to be told when a pass comes to the code.
            past: the tensors of an execution; None where no analysis is pending.
        """
        self.iterations[known.handle.op_id] = iteration
        _leaf_locked(self._claim_leaves, leaves, known, past, iteration, reached)

    def claim_late(
        self, node: Any, known: KnownGradients, number: int, iteration: int
    ) -> Sequence[Accumulation]:
        """Hook the accumulation of a leaf after the operator that owns it has run unhooked.

        Args:
            known: what is known of the operator's gradients.
            number: of the leaf among those that the operator owns.
            iteration: in which it ran.

        Returns:
            What is to be told when a pass comes to the operator.
        """
        reached: list[Accumulation] = []
        _leaf_locked(self._claim_leaves, [node], known, None, iteration, reached, number)
        return reached

    def shared_leaf_hooks(self, known: KnownGradients, number: int) -> NodeHooks | None:
        """The hooks of a leaf's accumulation for all executions; None if an analysis is pending.

        Args:
            number: of the leaf among those that the operator owns.
        """
        backward_id = f"{known.handle.op_id}/grad/AccumulateGrad:{number}"
        found = known.hooks.get(backward_id)
        # One that lives longer than the graph of a step keeps the hooks of its first execution.
        return found or self._shared_hooks(known, "AccumulateGrad", backward_id)

    def leaf_hooks(
        self, known: KnownGradients, backward_id: str, scopes: Sequence[Any], past: Past | None
    ) -> NodeHooks:
        """The hooks of a leaf's accumulation, in the scopes in which it is the operator's."""
        hooks = self._made_hooks(known, "AccumulateGrad", backward_id, past)
        whole = len(scopes) == len(known.handle.scopes)
        return hooks if whole else hooks.of_scopes(set(scopes))

    def _owned(
        self, node: Any, known: KnownGradients, iteration: int, number: int
    ) -> tuple[dict[Any, Any], Sequence[Any]]:
        """The marks on a leaf's accumulation, and the scopes in which it begins to belong to an
        operator: it does to the first operator of the iteration that used the leaf.

        Args:
            known: what is known of the operator's gradients.
            number: of the leaf among those that it owns.
        """
        # A leaf has one accumulation node as long as some graph uses it: the marks on it keep
        # a second operator, or a second graph, from hooking it again.
        metadata, handle = node.metadata, known.handle
        none: dict[Any, Any] = {}
        # At once: the gate, which holds no lock, may be about to mark it in another thread.
        marks: Any = metadata.setdefault(_MARK, none)
        fresh: Sequence[Any] = handle.scopes
        if marks is not none:
            if type(marks) is not dict:
                # The only one, of one operator for all its scopes.
                marks = metadata[_MARK] = marks.marks()
            fresh = [scope for scope in fresh if scope not in marks]
            if not fresh:
                return marks, fresh
        op_id, leaf = handle.op_id, node.variable
        # owner_of(), without a function.
        found = self.leaf_owners.get(id(leaf))
        owner = found.op_id if found is not None and found() is leaf else None
        if owner != op_id:
            ran = None if owner is None else self.iterations.get(owner)
            if ran is not None and type(ran) is not int:
                if ran.mark(node):  # type: ignore[union-attr]
                    return self._owned(node, known, iteration, number)
                ran = ran.iteration  # type: ignore[union-attr]
            if found is not None and owner is not None and ran == iteration:
                return self._claim_for_owner(found, node, iteration), ()
            self._set_owner(leaf, known, number)
        elif found is not None and found.known() is not known:
            found.known, found.number, found.is_idle = weakref.ref(known), number, False
        for scope in fresh:
            marks[scope] = None
        return marks, fresh

    def _claim_for_owner(self, owner: _Owner, node: Any, iteration: int) -> dict[Any, Any]:
        """The marks on an accumulation whose owner ran in this iteration, and left none.

        Its backward operators need no hooks; or the graph that it has made is gone, as that of a
        norm that is printed, and the accumulation with it: this is another one.
        """
        known = owner.known()
        if known is not None and not owner.is_idle:
            hooks = known.hooks.get(f"{owner.op_id}/grad/AccumulateGrad:{owner.number}")
            if hooks is None or not hooks.is_idle:
                past = None if owner.past is None else Past.of(owner.past)
                self._claim_leaves([node], known, past, iteration, [], owner.number)
            else:
                owner.is_idle = True
        marks: Any = node.metadata[_MARK]
        found: dict[Any, Any] = marks if type(marks) is dict else marks.marks()
        return found

    def owner_of(self, leaf: torch.Tensor) -> str | None:
        """The operator that a leaf's accumulation belongs to."""
        # Not a WeakIdKeyDictionary, which makes an object of Python for each question.
        known = self.leaf_owners.get(id(leaf))
        return known.op_id if known is not None and known() is leaf else None

    def _set_owner(self, leaf: torch.Tensor, known: KnownGradients, number: int) -> None:
        self.owner_changes += 1
        _CLAIMERS.add(self)
        owner = _Owner(leaf, _forget_owner)
        owner.key, owner.owners, owner.op_id = id(leaf), self.leaf_owners, known.handle.op_id
        owner.known, owner.number = weakref.ref(known), number
        owner.past, owner.is_idle = None, False
        self.leaf_owners[id(leaf)] = owner

    def _claim_all(
        self,
        plan: ActionPlan,
        known: KnownGradients,
        execution: Execution,
        result: Any,
        start: int,
        iteration: int,
    ) -> None:
        """Hook all backward operators at once.

        For operators with routines on their gradients as a whole, whose order says when each hook
        is to be registered, and for graphs of which :func:`trace_graph` finds nothing.
        """
        op_id, handle, outputs = plan.op_id, known.handle, tensors_of(result)
        known.form = None
        counts: dict[str, int] = {}
        leaves, is_idle = [], STATE.cache and not plan.acts_on_gradients
        for node in new_nodes(outputs, start):
            if plan.replace_backward is not None and is_replaced(node):
                continue
            if is_accumulation(node):
                leaves.append(node)
                continue
            name = node_name(node)
            number = counts.get(name, 0)
            counts[name] = number + 1
            backward_id = f"{op_id}/grad/{name}:{number}"
            hooks = known.hooks.get(backward_id)
            if hooks is None:
                needs = backward_needs(handle, backward_id)
                hooks = self._shared_hooks(known, name, backward_id, needs)
            if hooks is None:
                own = execution.past(outputs).handle(handle)
                names = _input_names([node], execution.call())[0]
                hooks = self._pending_hooks(needs, name, backward_id, own, names)
            hooks.register(node)
            is_idle = is_idle and hooks.is_idle
        reached: list[Accumulation] = []
        described = execution, outputs
        found = _leaf_locked(self._claim_leaves, leaves, known, described, iteration, reached)
        if is_idle and found and not reached:
            known.form = form_of(result)
        if reached:
            for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
                node.register_prehook(functools.partial(note_reached, reached))


def mark_of(node: Any) -> Any:
    """The mark of the owning operators on a leaf's accumulation; None if it has none."""
    return node.metadata.get(_MARK)


def is_marked(node: Any, scopes: Sequence[Any]) -> bool:
    """Whether a leaf's accumulation has an owner in all these scopes."""
    marks = mark_of(node)
    if marks is not None and type(marks) is not dict:
        marks = marks.marks()
    return marks is not None and all(scope in marks for scope in scopes)


_CLAIMERS: weakref.WeakSet[Claimer] = weakref.WeakSet()
"""The claimers of all threads whose operators own leaves."""

_NAMES: Memo[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]] = Memo(4096)
"""Each result of :func:`_input_names` once."""


def _input_names(nodes: Sequence[Any], call: TorchCall) -> Sequence[Sequence[str]]:
    """For each node the forward inputs whose gradients its outputs are, by name; "" for none."""
    edges = call.edges or map(edge_of, call.inputs)
    every = [(e, n) for e, n in zip(edges, call.names, strict=True) if e is not None]
    found = []
    for node in nodes:
        left, names = every, []
        for target, number in node.next_functions:
            if KINDS.get(type(target), UNCERTAIN) == UNCERTAIN and target is not None:
                while is_own(target) and target.next_functions:
                    target, number = target.next_functions[0]
            name = ""
            for position, (edge, input_name) in enumerate(left):
                is_same = target is edge[0] and number == edge[1]
                if is_same or (edge[1] == -1 and is_edge(target, number, edge)):
                    name = input_name
                    left = [*left[:position], *left[position + 1 :]]
                    break
            names.append(name)
        found.append(tuple(names))
    key = tuple(found)
    known = _NAMES.get(key)
    if known is None:
        known = _NAMES[key] = key
    return known
