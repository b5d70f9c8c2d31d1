"""Cuts a graph of operators into parts in a row, so that the fewest bytes pass from part to part.

No tensor goes back to an earlier part. A tensor counts once in each cut that it crosses, however
many operators read it behind; an input of the model comes from before the first part.

The minimum cut of the graph in two sides is found first. Then the operators stand in a row, those
of the first side before the others, each side in the order of the run; the best places to cut the
row are found by dynamic programming. Two parts without limits are the minimum cut: with limits, or
with more parts, the best cut of all is an NP-hard problem.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np

from amanda.errors import UnsupportedProgramError
from amanda_tools._operators.parameters import UsedParameter


@attrs.frozen(eq=False)
class CutOp:
    """An operator: FLOPs of an execution, and the parameters that it reads."""

    flops: int
    parameters: frozenset[UsedParameter]

    @property
    def works(self) -> bool:
        """True if it makes a part worth while."""
        return bool(self.flops or self.parameters)


@attrs.frozen(eq=False)
class CutTensor:
    """A tensor that operators read.

    Attributes:
        size: its bytes.
        maker: number of the operator that gives it; -1 for an input of the model.
        readers: numbers of the operators that read it; they are larger.
    """

    size: int
    maker: int
    readers: Sequence[int]


Range = tuple[float, float]
"""The least and the largest amount."""


def cut(
    ops: Sequence[CutOp],
    tensors: Sequence[CutTensor],
    first: Collection[int],
    last: Collection[int],
    limits: Sequence[tuple[Range, Range]],
) -> tuple[list[int], int]:
    """Return the part of each operator, from 0, and the bytes that any cut has at least.

    Each part has an operator with FLOPs or parameters, if there are any.

    Args:
        ops: operators in the order of the run.
        tensors: the tensors between them, and inputs.
        first, last: operators that have to be in the first and in the last part; if empty, the
            first and the last one with FLOPs or parameters.
        limits: of each part the FLOPs, and the bytes of parameters, that it may have.

    Raises:
        UnsupportedProgramError: there is no such cut.
    """
    working = [number for number, op in enumerate(ops) if op.works] or range(len(ops))
    if len(working) < len(limits):
        raise UnsupportedProgramError(
            f"partition: {len(limits)} parts need as many ops with FLOPs or parameters, and the "
            f"model has {len(working)}"
        )
    first, last = first or working[:1], last or working[-1:]
    least, near = _minimum_cut(len(ops), tensors, first, last)
    order = sorted(range(len(ops)), key=lambda number: number not in near)
    places = _places(_Row(ops, tensors, order, {*working}), first, last, limits)
    found = [0] * len(ops)
    for part, (begin, end) in enumerate(zip(places, [*places[1:], len(order)], strict=True)):
        for number in order[begin:end]:
            found[number] = part
    return found, least * (len(limits) - 1)


def _minimum_cut(
    count: int, tensors: Sequence[CutTensor], first: Collection[int], last: Collection[int]
) -> tuple[int, Collection[int]]:
    """Return the fewest bytes between two sides, and the operators of the first one."""
    try:
        nx: Any = importlib.import_module("networkx")
    except ImportError as error:
        raise UnsupportedProgramError(
            f"partition: {error}: pip install 'amanda-tools[partition]'"
        ) from error
    # An edge without a capacity is infinite.
    graph = nx.DiGraph([("first", number) for number in first])
    graph.add_edges_from([(number, "last") for number in last])
    graph.add_nodes_from(range(count))
    for number, tensor in enumerate(tensors):
        maker, sent = tensor.maker if tensor.maker >= 0 else "first", ("tensor", number)
        graph.add_edge(maker, sent, capacity=tensor.size)
        for reader in tensor.readers:
            # Nothing goes back from a reader.
            graph.add_edges_from([(sent, reader), (reader, maker)])
    try:
        size, (near, _) = nx.minimum_cut(graph, "first", "last")
    except nx.NetworkXUnbounded as error:
        raise UnsupportedProgramError(
            "partition: an op of the first part is one of the last part, or reads what one gives"
        ) from error
    return size, near


class _Row:
    """Operators in an order, which is cut at places: place n is before operator n of the order.

    Attributes:
        at: the index of each operator.
        crossing: bytes of the tensors that cross a cut at each place.
        flops, working: FLOPs and number of the working operators before each place.
    """

    def __init__(
        self,
        ops: Sequence[CutOp],
        tensors: Sequence[CutTensor],
        order: Sequence[int],
        working: Collection[int],
    ) -> None:
        self.at = {number: place for place, number in enumerate(order)} | {-1: -1}
        changes = np.zeros(len(order) + 2)
        for tensor in tensors:
            changes[self.at[tensor.maker] + 1] += tensor.size
            changes[max(self.at[reader] for reader in tensor.readers) + 1] -= tensor.size
        self.crossing = changes.cumsum()
        self.flops = np.cumsum([0, *(ops[number].flops for number in order)], dtype=float)
        self.working = np.cumsum([0, *(number in working for number in order)])
        before: dict[UsedParameter, int] = {}
        reads = []
        for place, number in enumerate(order):
            for parameter in ops[number].parameters:
                reads.append((place, before.get(parameter, -1), parameter.bytes))
                before[parameter] = place
        self._reads = np.array(reads, dtype=np.int64).reshape(-1, 3).T

    def memory(self, begin: int) -> Any:
        """Return the bytes of the parameters from a place to each later one; each counts once."""
        places, earlier, sizes = self._reads
        new = (places >= begin) & (earlier < begin)
        rest = len(self.flops) - 1 - begin
        return np.bincount(places[new] - begin, sizes[new], rest).cumsum()


def _places(
    row: _Row,
    first: Collection[int],
    last: Collection[int],
    limits: Sequence[tuple[Range, Range]],
) -> list[int]:
    """Return the places where the parts begin: the best ones, of equal ones those with the most
    even FLOPs."""
    count, parts = len(row.flops) - 1, len(limits)
    first_end, last_begin = max(row.at[i] for i in first) + 1, min(row.at[i] for i in last)
    best, came = np.full((parts + 1, count + 1), np.inf), np.zeros((parts + 1, count + 1), int)
    best[0, 0] = 0
    for begin in range(count):
        ends = np.arange(begin + 1, count + 1)
        flops, memory = row.flops[ends] - row.flops[begin], row.memory(begin)
        # Less than a byte in sum.
        evenness = (flops / max(row.flops[-1], 1)) ** 2 / 2
        for part in map(int, np.flatnonzero(np.isfinite(best[:parts, begin]))):
            low, high = np.transpose(limits[part])
            is_within = (low[0] <= flops) & (flops <= high[0])
            is_within &= (low[1] <= memory) & (memory <= high[1])
            is_within &= row.working[ends] > row.working[begin]
            is_within &= ends >= first_end  # all parts but the last end before that one begins
            is_within &= (ends == count) if part == parts - 1 else (ends <= last_begin)
            cost = best[part, begin] + evenness + (row.crossing[begin] if part else 0)
            better = ends[is_within & (cost < best[part + 1, ends])]
            best[part + 1, better] = cost[better - begin - 1]
            came[part + 1, better] = begin
    if not np.isfinite(best[parts, count]):
        raise UnsupportedProgramError(
            f"partition: no cut into {parts} parts fulfils inside, outside, flops and memory"
        )
    found = [count]
    for part in range(parts, 0, -1):
        found.insert(0, int(came[part, found[0]]))
    return found[:-1]
