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
from collections.abc import Sequence
from typing import Any

import torch

from amanda.engine.backward import backward_needs
from amanda.engine.plan import ActionPlan
from amanda.python.memo import Memo
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.executions import Execution, Past
from amanda_torch.autograd.gradient_graphs import (
    NO_NODES,
    KnownGradients,
    KnownGraph,
    pending_hooks,
    shape_of,
)
from amanda_torch.autograd.hooks import Accumulation, NodeHooks, note_reached, nothing_flows
from amanda_torch.autograd.leaves import LeafClaimer
from amanda_torch.autograd.nodes import (
    KINDS,
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

_FORMS = 4
"""Forms of an operator's gradient graph that the extension knows at once."""

_COMPILED_PASSES = "backward operators behind others, in passes of compiled autograd"

_current_node = _internals.current_node
_next_number = _internals.sequence_number
_sequence = _internals.node_sequence


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
        # Nearly all operators have one entry. Bound methods would be two objects more for each.
        hook = functools.partial(self, entry=entry) if entry else self
        node.register_prehook(hook)
        if hooks is None or hooks.has_after:
            node.register_hook(hook)

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


class Claimer(LeafClaimer):
    """Finds the autograd nodes of forward operators and hooks them, for one thread."""

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
            self._locked(self._claim_leaves, list(leaves), known, None, iteration, reached)
        if reached:
            node.register_prehook(functools.partial(note_reached, reached))
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
            traced = trace_graph(outputs, start)
        if traced is None:
            self._claim_all(plan, known, execution, result, start, iteration)
            return
        if graph is None or (graph.form is not traced.form and graph.form != traced.form):
            # In a loop the first state may need no gradient, and the last one does.
            graph = known.other
            known.graph, known.other = graph, known.graph
            if graph is None or graph.form != traced.form:
                # Where no tensor wants a gradient, the same for all operators.
                new = KnownGraph(plan.op_id, shape_of(traced)) if traced.nodes else NO_NODES
                graph = known.graph = new
            if known.is_new:
                graph.asked = known.asked = self.dispatcher.analysed
        known.is_new = False
        if graph.hooks is None and graph.asked != self.dispatcher.analysed:
            self._ask(known, graph)
        reached: list[Accumulation] = []
        leaves, described = traced.leaves, (execution, outputs)
        is_idle = not leaves or self._locked(
            self._claim_leaves, leaves, known, described, iteration, reached
        )
        self._hook_entries(known, graph, traced, execution, outputs, reached)
        if graph.hooks is not None and self.dispatcher.native is not None:
            self._learn(known, graph.hooks, traced, result, start)
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

    def _learn(
        self,
        known: KnownGradients,
        hooks: Sequence[NodeHooks],
        traced: Traced,
        result: Any,
        start: int,
    ) -> None:
        """Tell the extension of a graph of which nothing is left to be found out."""
        leaves, op_id = {}, known.handle.op_id
        for node in traced.leaves:
            owner = self.leaf_owners.get(id(node.variable))
            if owner is None or owner() is not node.variable:
                return
            backward_id = f"{op_id}/grad/AccumulateGrad:{owner.number}"
            own = None
            if owner.op_id == op_id:
                own = known.hooks.get(backward_id) or known.shared_hooks(
                    self.dispatcher, "AccumulateGrad", backward_id
                )
                if own is None:
                    return
            leaves[node] = owner, own, backward_id
        nodes = dict(zip(traced.nodes, hooks, strict=True))
        native, scopes = self.dispatcher.native, known.handle.scopes
        learned = native.learn(result, start, nodes, leaves, self, self.leaf_owners, known, scopes)
        if learned is not None:
            known.natives = (learned, *known.natives[: _FORMS - 1])

    def _ask(self, known: KnownGradients, graph: KnownGraph) -> None:
        """Find the hooks of all nodes of a graph, if no analysis of any of them is pending."""
        graph.asked = self.dispatcher.analysed
        hooks = []
        for number, name in enumerate(graph.shape.names):
            backward_id = graph.id_of(number)
            one = known.hooks.get(backward_id)
            if one is None:
                one = known.shared_hooks(self.dispatcher, name, backward_id)
                if one is None:
                    return
            hooks.append(one)
        graph.settle(hooks)

    def hooks_of(
        self, known: KnownGradients, graph: KnownGraph, number: int, past: Past | None
    ) -> NodeHooks:
        """The hooks of one node in one execution.

        Args:
            past: the tensors of the execution.
        """
        inputs = graph.inputs[number] if graph.inputs is not None else ()
        name, backward_id = graph.shape.names[number], graph.id_of(number)
        return known.made_hooks(self.dispatcher, name, backward_id, past, inputs)

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
                hooks = known.shared_hooks(self.dispatcher, name, backward_id, needs)
            if hooks is None:
                own = execution.past(outputs).handle(handle)
                names = _input_names([node], execution.call())[0]
                hooks = pending_hooks(self.dispatcher, needs, name, backward_id, own, names)
            hooks.register(node)
            is_idle = is_idle and hooks.is_idle
        reached: list[Accumulation] = []
        described = execution, outputs
        found = self._locked(self._claim_leaves, leaves, known, described, iteration, reached)
        if is_idle and found and not reached:
            known.form = form_of(result)
        if reached:
            for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
                node.register_prehook(functools.partial(note_reached, reached))


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
