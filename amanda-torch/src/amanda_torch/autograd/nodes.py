"""Finds and classifies the autograd nodes of an operator.

Autograd numbers the nodes that a thread makes. The nodes of an operator are the nodes behind its
outputs with at least the number that was next before it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from amanda_torch import _internals
from amanda_torch.autograd.functions import OWN_FUNCTIONS

OWN_NODES = frozenset(map(_internals.node_class, OWN_FUNCTIONS))

BACKWARD = "amanda_backward"
"""Key in a node's metadata of the function that runs in place of its backward, or around it; see
:mod:`amanda_torch.autograd.user_functions`."""

OWNER = "amanda_owner"
"""Key in a node's metadata: the facts about its operator, the id of the backward operator, and the
tensors of the execution, None if no analysis was pending."""

_ALIAS = "amanda_alias"
"""Key in the metadata of the nodes of aliases that this package has made."""


Edge = tuple[Any, int]
"""The target of a gradient: an autograd node and the number of its input, or a leaf and -1."""


def edge_of(tensor: Any) -> Edge | None:
    """The edge that the gradient of a tensor goes to; None if the tensor needs no gradient."""
    if tensor is None or not tensor.requires_grad:
        return None
    if tensor.grad_fn is None:
        return tensor, -1
    return tensor.grad_fn, tensor.output_nr


def is_edge(target: Any, number: int, edge: Edge) -> bool:
    """True if a gradient that a node sends to input `number` of `target` goes to `edge`."""
    if edge[1] == -1:
        # is_accumulation(), inlined: this is asked for each new operator.
        return hasattr(type(target), "variable") and target.variable is edge[0]
    return target is edge[0] and number == edge[1]


def node_name(node: Any) -> str:
    """``ConvolutionBackward0``, ``AccumulateGrad``: the name without the C++ namespace."""
    return str(node.name()).rpartition("::")[2]


_sequence = _internals.node_sequence


def is_accumulation(node: Any) -> bool:
    """True if a node adds a gradient to a leaf's ``grad``."""
    # By the class: a node of an ``autograd.Function`` has the attributes that its ``forward`` sets.
    return hasattr(type(node), "variable")


def is_replaced(node: Any) -> bool:
    """True if a tool supplies the gradients of a node, which computes none."""
    backward = node.metadata.get(BACKWARD)
    return backward is not None and bool(backward.is_replaced)


def set_alias(node: Any) -> None:
    """Mark the node of an alias that this package has made."""
    node.metadata[_ALIAS] = True


def is_own(node: Any) -> bool:
    """True if a node belongs to a function or an alias that this package inserts."""
    cls = type(node)
    return cls in OWN_NODES or (cls.__name__ == "AliasBackward0" and _ALIAS in node.metadata)


NOWHERE, OUTSIDE, LEAF = -1, -2, -3
"""Targets of an edge other than nodes of the operator: none, an older node, the accumulation of a
leaf."""

_PLAIN_NODE, _ACCUMULATION, UNCERTAIN = range(3)

KINDS: dict[Any, int] = dict.fromkeys(OWN_NODES, UNCERTAIN)
"""Kinds of classes of nodes, read before :func:`_kind` is called, which costs a frame. A node of an
``UNCERTAIN`` class may be of this package. Classes of the program's own functions, which it may
drop, are plain and are not kept."""


def _kind(cls: Any) -> int:
    kind = KINDS.get(cls)
    if kind is not None:
        return kind
    if issubclass(cls, _internals.FUNCTION_NODE):
        return _PLAIN_NODE
    kind = _ACCUMULATION if hasattr(cls, "variable") else _PLAIN_NODE
    if cls.__name__ == "AliasBackward0":
        kind = UNCERTAIN
    KINDS[cls] = kind
    return kind


@attrs.frozen(eq=False)
class Traced:
    """The nodes that an operator has made, in the order of :func:`new_nodes`.

    Attributes:
        nodes: the nodes, those of the outputs first.
        entries: number of the nodes that belong to outputs.
        edges: for each node the numbers of the nodes that its edges lead to, or ``OUTSIDE`` and
            the like.
        leaves: the accumulations of leaves that they lead to.
    """

    nodes: list[Any]
    entries: int
    edges: list[tuple[int, ...]] = attrs.field(factory=list)
    leaves: list[Any] = attrs.field(factory=list)

    def form(self) -> tuple[Any, ...]:
        """A key that is equal for two executions whose graphs have the same nodes and edges."""
        return self.entries, *map(type, self.nodes), *self.edges


def _output_nodes(outputs: Sequence[Any]) -> list[Any]:
    return [
        tensor.grad_fn
        for tensor in outputs
        if tensor is not None and tensor.requires_grad and tensor.grad_fn is not None
    ]


def _base_nodes(outputs: Sequence[Any]) -> list[Any]:
    """The nodes of the bases of outputs that are views: an in-place operator on a view gives the
    base a new node, too (CopySlices)."""
    bases = [_internals.base_of(tensor) for tensor in outputs if tensor is not None]
    return _output_nodes(bases)


def trace_graph(outputs: Sequence[Any], start: int) -> Traced | None:
    """As :func:`new_nodes`, with the edges between the nodes.

    Returns:
        None if the base of an output has a new node, too, or if a node of this package is reached.
    """
    for node in _base_nodes(outputs):
        if _sequence(node) >= start:
            return None
    nodes = []
    for node in dict.fromkeys(_output_nodes(outputs)):
        if _kind(type(node)) == UNCERTAIN and is_own(node):
            return None
        if _sequence(node) >= start:
            nodes.append(node)
    found = Traced(nodes, len(nodes))
    return found if _follow_edges(found, start) else None


def _follow_edges(found: Traced, start: int) -> bool:
    """Add the nodes behind those of the outputs; False if a node of this package is reached."""
    nodes, leaves = found.nodes, found.leaves
    numbers = dict(zip(nodes, range(len(nodes)), strict=True))
    # Breadth first: the list grows while it is read.
    for node in nodes:
        targets = []
        for target, _ in node.next_functions:
            if target is None:
                targets.append(NOWHERE)
                continue
            cls = type(target)
            kind = KINDS.get(cls)
            if kind is None:
                kind = _kind(cls)
            if kind == _ACCUMULATION:
                targets.append(LEAF)
                if target not in leaves:
                    leaves.append(target)
            elif kind == UNCERTAIN and is_own(target):
                return False
            elif _sequence(target) < start:
                targets.append(OUTSIDE)
            else:
                number = numbers.get(target)
                if number is None:
                    number = numbers[target] = len(nodes)
                    nodes.append(target)
                targets.append(number)
        found.edges.append(tuple(targets))
    return True


def new_nodes(outputs: Sequence[Any], start: int, *, aliases: bool = False) -> list[Any]:
    """The nodes that an operator has made, and the accumulations that they feed.

    Args:
        outputs: the operator's output tensors.
        start: the sequence number read before the operator ran.
        aliases: True to include aliases that this package has made.
    """
    waiting = [*_output_nodes(outputs), *_base_nodes(outputs)]
    found, seen = [], set()
    # Breadth first: the list grows while it is read.
    for node in waiting:
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_accumulation(node):
            found.append(node)
            continue
        if is_own(node):
            if aliases and _ALIAS in node.metadata:
                found.append(node)
        elif _sequence(node) >= start:
            found.append(node)
        else:
            continue
        waiting.extend([edge[0] for edge in node.next_functions])
    return found


def count_foreign(roots: Sequence[Any], start: int) -> int:
    """The number of nodes of a backward pass whose operators ran before number `start`."""
    waiting: list[Any] = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    seen, foreign = set(waiting), 0
    while waiting:
        node = waiting.pop()
        if node is None or is_accumulation(node):
            continue
        # Threads have numbers of their own.
        foreign += _internals.node_sequence(node) < start and OWNER not in node.metadata
        following = [edge[0] for edge in node.next_functions if edge[0] not in seen]
        seen.update(following)
        waiting.extend(following)
    return foreign
