"""Backward operators: which autograd nodes belong to which operator, and when they are hooked.

A :class:`Claimer` is called for an operator right after it has run::

    start = _internals.sequence_number()
    result = operator(...)
    claimer.claim(plan, known, execution, result, start, iteration)

This hooks the nodes of the outputs only. The nodes behind them, of which some operators have many,
are hooked when a backward pass reaches the operator (:class:`Claim`): a forward pass whose graph no
backward pass uses does not pay for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from amanda.engine.plan import ActionPlan
from amanda.state import STATE
from amanda_torch import _internals
from amanda_torch.autograd.executions import Execution, Past
from amanda_torch.autograd.gradient_graphs import KnownGradients, KnownGraph, numbered
from amanda_torch.autograd.hooks import NodeHooks, all_none
from amanda_torch.autograd.leaves import Accumulation, LeafClaimer, note_reached
from amanda_torch.autograd.nodes import (
    KINDS,
    OWNER,
    UNCERTAIN,
    Edge,
    Traced,
    edge_of,
    is_accumulation,
    is_edge,
    is_own,
    is_replaced,
    new_nodes,
    node_name,
    trace_graph,
)
from amanda_torch.operators.calls import TorchCall, tensors_of

_COMPILED_PASSES = "backward operators behind others, in passes of compiled autograd"

_current_node = _internals.current_node


class Claim:
    """The backward operators of one execution, hooked when a backward pass reaches it.

    Args:
        past: the tensors of the execution; None where no analysis is pending.
        reached: the accumulations of leaves that are notified when a pass reaches the operator.
    """

    __slots__ = ("_claimer", "_graph", "_hooks", "_known", "_past", "_reached")

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
        # By the number of the node. Created in the first pass that reaches a node: there may be
        # none.
        self._hooks: dict[int, NodeHooks] | None = None

    def register(self, entry: int, node: Any) -> None:
        """Hook the node of an output.

        Args:
            entry: the number of the node.
        """
        # Nearly all operators have one entry. Bound methods would be two objects more for each.
        hook = functools.partial(self, entry=entry) if entry else self
        node.register_prehook(hook)
        if self._graph.hooks is None or self._graph.hooks[entry].has_after:
            node.register_hook(hook)

    def __call__(
        self,
        gradients: tuple[Any, ...],
        grad_outputs: tuple[Any, ...] | None = None,
        entry: int = 0,
    ) -> Any:
        """Run as prehook of an entry, or as posthook if PyTorch also passes the gradients that the
        node has consumed."""
        if self._hooks is None:
            self._hooks = {}
        hooks = self._hooks.get(entry)
        if grad_outputs is not None:
            # Without hooks the node has got no gradient.
            has_after = hooks is not None and hooks.has_after
            return hooks(gradients, grad_outputs) if hooks and has_after else None
        if all_none(gradients):
            return None
        if hooks is None:
            hooks = self._hooks[entry] = self._hooks_at(entry)
            self._hook_inner(entry, self._hooks)
        if self._reached:
            note_reached(self._reached, gradients)
        return hooks(gradients) if hooks.has_before else None

    def _hook_inner(self, entry: int, found: dict[int, NodeHooks]) -> None:
        """Hook the nodes behind the node that runs now: the pass reaches them later.

        Args:
            found: the hooks by number of the node; those of further nodes are added.
        """
        path = self._graph.inner[entry]
        if not path:
            return
        nodes = [_current_node()]
        if nodes[0] is None:
            # Compiled autograd calls hooks in code of its own, in which no node runs.
            self._claimer.dispatcher.not_seen(_COMPILED_PASSES, len(path))
            return
        # An LSTM's cell has thirteen of them.
        for place, edge, number in path:
            node = nodes[place].next_functions[edge][0]
            nodes.append(node)
            if number not in found:
                hooks = found[number] = self._hooks_at(number)
                if not hooks.is_idle:
                    hooks.register(node)

    def _hooks_at(self, number: int) -> NodeHooks:
        graph = self._graph
        if graph.hooks is not None:
            return graph.hooks[number]
        inputs = graph.inputs[number] if graph.inputs is not None else ()
        name, backward_id = graph.shape.names[number], graph.id_of(number)
        dispatcher = self._claimer.dispatcher
        return self._known.made_hooks(dispatcher, name, backward_id, self._past, inputs)


class Claimer(LeafClaimer):
    """Finds the autograd nodes of forward operators and hooks them, for one thread.

    Attributes:
        marks: True if all nodes are marked with their owners, since the program differentiates
            gradients; False if only nodes of first executions are.
    """

    marks = False

    def claim(
        self,
        plan: ActionPlan,
        known: KnownGradients,
        execution: Execution,
        result: Any,
        start: int,
        iteration: int,
    ) -> None:
        """Find the backward operators of an operator that has just run, and hook those of its
        outputs.

        Args:
            known: the facts about the backward operators, which are extended.
            execution: the execution; read only if an analysis is pending.
            result: the operator's result.
            start: the sequence number read before it ran.
            iteration: the iteration of the thread that ran it.
        """
        self.iterations[plan.op_id] = iteration
        # `y[mask] = x` returns nothing, and has changed an input.
        outputs = tensors_of(execution.call().inputs if result is None else result)
        if _internals.in_functorch():
            outputs = [_internals.differentiated(output) for output in outputs]
        traced = None
        if STATE.cache and not plan.acts_on_gradients:
            traced = trace_graph(outputs, start)
        if traced is None:
            self._hook_now(plan, known, execution, outputs, start, iteration)
        else:
            graph = known.graph_of(traced)
            is_known = graph.find_hooks(known, self.dispatcher)
            past = functools.partial(execution.past, outputs, graph.layout)
            reached = self.claim_leaves(traced.leaves, known, iteration, past)
            own = self._hook_entries(known, graph, traced, execution, outputs, reached)
            if self.marks or not is_known:
                for number, node in enumerate(traced.nodes):
                    node.metadata[OWNER] = known, graph.id_of(number), own
            elif self.dispatcher.native is not None and result is not None:
                self._learn(known, graph, traced, result, start)

    def _hook_entries(
        self,
        known: KnownGradients,
        graph: KnownGraph,
        traced: Traced,
        execution: Execution,
        outputs: Sequence[Any],
        reached: Sequence[Accumulation],
    ) -> Past | None:
        """Hook the nodes of the outputs; return the tensors of the execution if an analysis is
        pending."""
        hooks, past, claim = graph.hooks, None, None
        if hooks is None:
            if graph.inputs is None:
                graph.inputs = _input_names(traced.nodes, execution.call())
            if graph.layout is None:
                graph.layout = execution.layout()
            past = execution.past(outputs, graph.layout)
        for entry in range(traced.entries):
            if hooks is None or reached or graph.inner[entry]:
                claim = claim or Claim(self, known, graph, past, reached)
                claim.register(entry, traced.nodes[entry])
            elif not hooks[entry].is_idle:
                hooks[entry].register(traced.nodes[entry])
        return past

    def _learn(
        self, known: KnownGradients, graph: KnownGraph, traced: Traced, result: Any, start: int
    ) -> None:
        """Register a graph in which no analysis is pending with the extension."""
        dispatcher, leaves = self.dispatcher, {}
        for node in traced.leaves:
            owner = self.leaf_owners.get(id(node.variable))
            if owner is None or owner() is not node.variable:
                return
            own = None
            if owner.op_id == known.handle.op_id:
                own = self.known_leaf_hooks(known, owner.backward_id)
                if own is None:
                    return
            leaves[node] = owner, own
        nodes = dict(zip(traced.nodes, graph.hooks or (), strict=True))
        scopes = known.handle.scopes
        learned = dispatcher.native.learn(result, start, nodes, leaves, self.leaf_owners, scopes)
        if learned is not None:
            known.add_native(learned)

    def _hook_now(
        self,
        plan: ActionPlan,
        known: KnownGradients,
        execution: Execution,
        outputs: Sequence[Any],
        start: int,
        iteration: int,
    ) -> None:
        """Hook all backward operators at once.

        For operators with routines on their gradients as a whole, whose order determines when each
        hook is registered, and for graphs that :func:`trace_graph` cannot trace.
        """
        nodes, leaves = [], []
        for node in new_nodes(outputs, start):
            if is_accumulation(node):
                leaves.append(node)
            elif plan.replace_backward is None or not is_replaced(node):
                nodes.append(node)
        names = [node_name(node) for node in nodes]
        for node, name, suffix in zip(nodes, names, numbered(names), strict=True):
            about = self.dispatcher, name, plan.op_id + suffix
            hooks, own = known.hooks_for(*about), None
            if hooks is None:
                inputs = _input_names([node], execution.call())[0]
                own = execution.past(outputs)
                hooks = known.made_hooks(*about, own, inputs)
            hooks.register(node)
            node.metadata[OWNER] = known, plan.op_id + suffix, own
        past = functools.partial(execution.past, outputs)
        reached = self.claim_leaves(leaves, known, iteration, past)
        if reached:
            for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
                node.register_prehook(functools.partial(note_reached, reached))


def _input_names(nodes: Sequence[Any], call: TorchCall) -> Sequence[Sequence[str]]:
    """For each node, the names of the forward inputs whose gradients it produces; "" for an output
    that is no such gradient."""
    edges = call.edges or map(edge_of, call.inputs)
    every = [(e, n) for e, n in zip(edges, call.names, strict=True) if e is not None]
    return [tuple(_names_of(node, every)) for node in nodes]


def _names_of(node: Any, inputs: Sequence[tuple[Edge, str]]) -> Iterator[str]:
    """For each edge of a node, the name of the input that it leads to; each input is named once."""
    left = [*inputs]
    for target, number in node.next_functions:
        if KINDS.get(type(target), UNCERTAIN) == UNCERTAIN and target is not None:
            while is_own(target) and target.next_functions:
                number += getattr(target, "skipped", 0)
                target, number = target.next_functions[number]
        for position, (edge, name) in enumerate(left):
            is_same = target is edge[0] and number == edge[1]
            if is_same or (edge[1] == -1 and is_edge(target, number, edge)):
                yield name
                del left[position]
                break
        else:
            yield ""
