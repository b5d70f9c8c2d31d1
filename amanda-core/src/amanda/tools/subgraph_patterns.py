"""Patterns of operators, and the search for them in a traced graph.

``bindings(pattern, op, graph, PartialMatch())`` yields the matches of a pattern whose root is `op`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from amanda.tools.graph import Graph, TracedOp, TracedTensor

Predicate = Callable[[TracedOp, Graph], Any]


class Op:
    """One operator of a pattern.

    Args:
        types: canonical types or framework names that it may have; ``"*"`` for any.
        inputs: patterns of its inputs, by position: an :class:`Op` whose first output it reads, a
            name for an input tensor of the pattern (the same name is the same tensor), or None for
            any input. Inputs that are left out at the end are as if None.
        name: its name in a match; the first type if not given.
        where: a predicate of a traced operator and the graph; a false value rejects the operator.
        any_order: True if the order of the inputs does not matter, as for ``add``.

    Raises:
        TypeError: an input is something else.
    """

    def __init__(
        self,
        types: str | Sequence[str],
        *inputs: Op | str | None,
        name: str = "",
        where: Predicate | None = None,
        any_order: bool = False,
    ) -> None:
        self.types = (types,) if isinstance(types, str) else tuple(types)
        for entry in inputs:
            if not (entry is None or isinstance(entry, (Op, str))):
                raise TypeError(f"an input of a pattern is an Op, a name or None, got {entry!r}")
        count = max((i + 1 for i, entry in enumerate(inputs) if entry is not None), default=0)
        self.inputs = inputs[:count]
        self.name = name or self.types[0]
        self.where = where
        self.any_order = any_order

    def __repr__(self) -> str:
        inputs = "".join(f", {entry!r}" for entry in self.inputs)
        return f"Op({'|'.join(self.types)!r}{inputs})"

    def all_types(self) -> list[str]:
        """The types of this operator and of the operators that it reads."""
        below = [entry for entry in self.inputs if isinstance(entry, Op)]
        return [*self.types, *(kind for entry in below for kind in entry.all_types())]

    def accepts(self, op: TracedOp, graph: Graph) -> bool:
        """True if an operator matches, whatever its inputs are."""
        is_type = "*" in self.types or op.type in self.types or op.name in self.types
        return is_type and (self.where is None or bool(self.where(op, graph)))


@attrs.frozen
class InputSlot:
    """The place where a match reads an input tensor: an operator's id and an input position."""

    op: str
    input: int


@attrs.frozen
class PartialMatch:
    """A match of a pattern, or of the part of it that has been searched so far.

    Attributes:
        ops: operators of the pattern to operators of the graph.
        tensors: names of input tensors to tensors of the graph.
        places: names of input tensors to the place where each is read.
    """

    ops: Mapping[Op, TracedOp] = attrs.field(factory=dict)
    tensors: Mapping[str, TracedTensor | None] = attrs.field(factory=dict)
    places: Mapping[str, InputSlot] = attrs.field(factory=dict)


def chain(pattern: Op | Sequence[str]) -> Op:
    """Convert a list of types to a pattern in which each operator reads the one before.

    The first input of the first operator is called ``input``. A pattern is returned as it is.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(pattern, Op):
        return pattern
    if (
        isinstance(pattern, str)
        or not all(isinstance(kind, str) for kind in pattern)
        or not pattern
    ):
        raise TypeError(f"a pattern is an Op, or a list of types, got {pattern!r}")
    source: Op | str = "input"
    for place, kind in enumerate(pattern):
        name = kind if kind not in pattern[:place] else f"{kind}{place}"
        source = Op(kind, source, name=name)
    assert isinstance(source, Op)
    return source


def bindings(
    pattern: Op, op: TracedOp, graph: Graph, so_far: PartialMatch
) -> Iterator[PartialMatch]:
    """Yield the matches of a pattern at an operator and the operators that it reads.

    Args:
        pattern: the root of the pattern.
        op: the operator.
        graph: its graph.
        so_far: the bindings of other parts of the pattern, which the matches extend.
    """
    if pattern in so_far.ops:
        if so_far.ops[pattern] is op:
            yield so_far
        return
    if op in so_far.ops.values() or not pattern.accepts(op, graph):
        return
    count = len(pattern.inputs)
    if count > len(op.inputs):
        return
    begun = attrs.evolve(so_far, ops={**so_far.ops, pattern: op})
    orders: Iterator[tuple[int, ...]] = iter([tuple(range(count))])
    if pattern.any_order:
        orders = itertools.permutations(range(len(op.inputs)), count)
    for order in orders:
        yield from _inputs(list(zip(pattern.inputs, order, strict=True)), op, graph, begun)


def _inputs(
    wanted: list[tuple[Op | str | None, int]], op: TracedOp, graph: Graph, so_far: PartialMatch
) -> Iterator[PartialMatch]:
    """Yield the matches of the patterns of some inputs of an operator, position by position."""
    if not wanted:
        yield so_far
        return
    (entry, position), rest = wanted[0], wanted[1:]
    tensor = op.inputs[position]
    if isinstance(entry, Op):
        if tensor is not None and tensor.producer and tensor.position == 0:
            for found in bindings(entry, graph.op(tensor.producer), graph, so_far):
                yield from _inputs(rest, op, graph, found)
        return
    if isinstance(entry, str):
        if so_far.tensors.get(entry, tensor) != tensor:
            return
        if entry not in so_far.tensors:
            so_far = attrs.evolve(
                so_far,
                tensors={**so_far.tensors, entry: tensor},
                places={**so_far.places, entry: InputSlot(op.id, position)},
            )
    yield from _inputs(rest, op, graph, so_far)
