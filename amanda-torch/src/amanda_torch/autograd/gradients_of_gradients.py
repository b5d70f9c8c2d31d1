"""Backward operators of gradients: the nodes that a pass with ``create_graph=True`` makes.

They belong to the operator whose backward operator has made them: the id of one is
``/pow:0/grad/PowBackward0:0/grad/MulBackward0:0``. A sum of gradients belongs to the node that
receives it. ::

    with MadeGraph(claimer, roots) as made:
        gradients = engine(roots, inputs)
        made.claim_results(inputs, gradients)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from amanda_torch import _internals
from amanda_torch.autograd.claims import Claimer
from amanda_torch.autograd.gradient_graphs import numbered
from amanda_torch.autograd.nodes import OWNER, is_accumulation, is_own, node_name

_UNKNOWN = "backward operators of gradients, in the first pass that makes a graph"


class MadeGraph:
    """The context of a pass that makes a graph.

    Args:
        roots: the tensors or edges at which the pass begins.
    """

    def __init__(self, claimer: Claimer, roots: Sequence[Any]) -> None:
        self._claimer = claimer
        self._handles: list[Any] = []
        self._unowned = 0
        # All nodes that existed before the pass; at first those of the roots.
        with _internals.reading(roots):
            self._before: dict[Any, None] = dict.fromkeys(map(_node_of, roots))

    def __enter__(self) -> MadeGraph:
        try:
            self._hook()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _hook(self) -> None:
        before, unknown = self._before, 0
        waiting = list(before)
        for node in waiting:
            if node is None or is_accumulation(node):
                continue
            owner = node.metadata.get(OWNER)
            if owner is not None:
                made = functools.partial(self._claim_made, owner)
                self._handles.append(node.register_hook(made))
            else:
                unknown += not is_own(node)
            for following, _ in node.next_functions:
                if following not in before:
                    before[following] = None
                    waiting.append(following)
        # Nodes that ran before the scope are counted elsewhere.
        self._unowned = 0 if self._claimer.marks else unknown
        self._claimer.marks = True

    def __exit__(self, *raised: object) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        if self._unowned:
            self._claimer.dispatcher.not_seen(_UNKNOWN, self._unowned)

    def claim_results(self, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Hook the sums among the gradients that the pass returns.

        Args:
            inputs: the tensors or edges whose gradients the results are.
        """
        owned = bool(inputs)
        for value, result in zip(inputs, results, strict=False):
            node = _node_of(value)
            owner = self._claimer.owner_of(value) if node is None else node.metadata.get(OWNER)
            if owner is not None and result is not None:
                self._claim_made(owner, (result,), ())
            owned &= owner is not None and result is not None
        self._unowned *= not owned

    def _claim_made(self, owner: Any, produced: Sequence[Any], consumed: Sequence[Any]) -> None:
        """Posthook of a node: hook the nodes behind its gradients that have no owner yet."""
        given = (*produced, *consumed)
        with _internals.reading(given):
            nodes = _internals.without_modes(self._made, given)
        known, backward_id, past = owner
        names = [node_name(node) for node in nodes]
        for node, name, suffix in zip(nodes, names, numbered(names), strict=True):
            inner_id, dispatcher = backward_id + suffix, self._claimer.dispatcher
            inputs = ("",) * len(node.next_functions)
            known.made_hooks(dispatcher, name, inner_id, past, inputs).register(node)
            node.metadata[OWNER] = known, inner_id, past

    def _made(self, gradients: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        waiting = [_node_of(gradient) for gradient in gradients]
        seen = set()
        for node in waiting:
            if node is None or node in self._before or node in seen or is_accumulation(node):
                continue
            seen.add(node)
            if OWNER not in node.metadata:
                if not is_own(node):
                    found.append(node)
                waiting.extend([edge[0] for edge in node.next_functions])
        return found


def _node_of(value: Any) -> Any:
    if isinstance(value, GradientEdge):
        return value.node
    return value.grad_fn if isinstance(value, torch.Tensor) else None
