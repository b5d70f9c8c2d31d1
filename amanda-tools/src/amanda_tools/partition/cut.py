"""Cuts a graph of operators into parts in a row, so that the fewest bytes pass from part to part.

No tensor goes back to an earlier part. A tensor counts once in each cut that it crosses, however
many operators read it behind; an input of the model comes from before the first part, and counts in
the cuts before its last reader.

Two parts without limits are a minimum cut. With limits, or of more parts, it is an NP-hard problem,
and the parts follow one order of the operators: the best places in it are found by dynamic
programming. Of equal ones those with the most even FLOPs are taken.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from amanda.errors import UnsupportedProgramError
from amanda_tools._operators.parameters import UsedParameter

FIRST, LAST = -1, 1
"""Places of operators that have to be in the first and in the last part."""


@attrs.define(eq=False)
class CutOp:
    """An operator.

    Attributes:
        id: its id.
        flops: FLOPs of an execution.
        parameters: the parameters that it reads.
        place: FIRST, LAST, or 0 for any part.
    """

    id: str
    flops: int
    parameters: frozenset[UsedParameter]
    place: int = 0


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


@attrs.frozen(eq=False)
class Problem:
    """What is cut.

    Attributes:
        ops: operators in the order of the run.
        tensors: tensors between them, and inputs.
        flops, memory: for each part the FLOPs, and the bytes of parameters, that it may have.
    """

    ops: Sequence[CutOp]
    tensors: Sequence[CutTensor]
    flops: Sequence[Range]
    memory: Sequence[Range]

    def cut(self) -> tuple[list[int], int]:
        """Return the part of each operator, from 0, and the bytes that any cut has at least.

        Raises:
            UnsupportedProgramError: there is no such cut.
        """
        self._spread()
        least, sides = self._minimum_cut()
        count = len(self.flops)
        if count == 2 and self._is_within(sides):
            return sides, least
        # By sides first, so that the minimum cut is one of the places.
        order = sorted(range(len(self.ops)), key=lambda i: (sides[i], self.ops[i].place))
        return _Row(self, order).parts(), (count - 1) * least

    def _spread(self) -> None:
        """Give the makers of what the first part reads, and the readers of the last one's, their
        places."""
        edges = [(t.maker, reader) for t in self.tensors if t.maker >= 0 for reader in t.readers]
        for maker, reader in sorted(edges, key=lambda edge: -edge[1]):
            if self.ops[reader].place == FIRST:
                self._put(maker, FIRST, reader)
        for maker, reader in sorted(edges):
            if self.ops[maker].place == LAST:
                self._put(reader, LAST, maker)

    def _put(self, number: int, place: int, neighbour: int) -> None:
        op, other = self.ops[number], self.ops[neighbour]
        if op.place == -place:
            before, behind = (op, other) if place == FIRST else (other, op)
            raise UnsupportedProgramError(
                f"partition: op {behind.id} of the first part reads what op {before.id} of the "
                "last part gives"
            )
        op.place = place

    def _is_within(self, part_of: Sequence[int]) -> bool:
        for part, (flops, memory) in enumerate(zip(self.flops, self.memory, strict=True)):
            own = [op for op, at in zip(self.ops, part_of, strict=True) if at == part]
            used = {parameter for op in own for parameter in op.parameters}
            if not flops[0] <= sum(op.flops for op in own) <= flops[1]:
                return False
            if not memory[0] <= sum(parameter.bytes for parameter in used) <= memory[1]:
                return False
        return True

    def _minimum_cut(self) -> tuple[int, list[int]]:
        """Return the fewest bytes between two sides, and the side of each operator: 0 or 1.

        Each has an operator that computes with parameters or multiplies.
        """
        try:
            nx: Any = importlib.import_module("networkx")
        except ImportError as error:
            raise UnsupportedProgramError(
                f"partition: {error}: pip install 'amanda-tools[partition]'"
            ) from error
        graph = nx.DiGraph()
        graph.add_nodes_from(["first", "last", *range(len(self.ops))])
        for number, tensor in enumerate(self.tensors):
            maker, sent = tensor.maker if tensor.maker >= 0 else "first", ("tensor", number)
            graph.add_edge(maker, sent, capacity=tensor.size)
            # Without a capacity it is infinite: nothing goes back from a reader.
            graph.add_edges_from([(sent, reader) for reader in tensor.readers])
            graph.add_edges_from([(reader, maker) for reader in tensor.readers])
        found = []
        for first, last in itertools.product(*self._ends()):
            trial = graph.copy()
            trial.add_edges_from([("first", number) for number in first])
            trial.add_edges_from([(number, "last") for number in last])
            try:
                size, (near, _) = nx.minimum_cut(trial, "first", "last")
            except nx.NetworkXUnbounded:
                # The one is needed by the other, or they are the same.
                continue
            found.append((size, [int(number not in near) for number in range(len(self.ops))]))
        if not found:
            raise UnsupportedProgramError("partition: too few operators compute for two parts")
        return min(found, key=lambda pair: pair[0])

    def working(self) -> list[bool]:
        """Tell which operators make a part worth while: with FLOPs or parameters, behind an input
        of the model; all, if there are none."""
        fed = [False] * len(self.ops)
        # By the makers, which are fed before.
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.maker):
            if tensor.maker < 0 or fed[tensor.maker]:
                for reader in tensor.readers:
                    fed[reader] = True
        found = [
            is_fed and bool(op.flops or op.parameters)
            for op, is_fed in zip(self.ops, fed, strict=True)
        ]
        return found if any(found) else [True] * len(self.ops)

    def _ends(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the alternatives of what is in the first part at least, and in the last one."""
        works, ends = self.working(), []
        edges = [(t.maker, reader) for t in self.tensors if t.maker >= 0 for reader in t.readers]
        for place, pairs in (
            (FIRST, sorted(edges)),
            (LAST, sorted(((b, a) for a, b in edges), reverse=True)),
        ):
            own = [i for i, op in enumerate(self.ops) if op.place == place]
            is_behind = [False] * len(self.ops)
            for one, other in pairs:
                is_behind[other] |= is_behind[one] or works[one]
            outermost = [[i] for i, of in enumerate(works) if of and not is_behind[i]]
            ends.append([own] if own else outermost)
        return ends[0], ends[1]


class _Row:
    """Operators in an order, which is cut at places: place n is before operator n of the order."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self._problem, self._order, count = problem, order, len(order)
        at = {number: place for place, number in enumerate(order)} | {-1: -1}
        changes = np.zeros(count + 2)
        for tensor in problem.tensors:
            changes[at[tensor.maker] + 1] += tensor.size
            changes[max(at[reader] for reader in tensor.readers) + 1] -= tensor.size
        self._crossing = changes.cumsum()
        ops, works = [problem.ops[number] for number in order], problem.working()
        self._flops = np.cumsum([0, *(op.flops for op in ops)], dtype=float)
        self._works = np.cumsum([0, *(works[number] for number in order)])
        self._first_end = max((i + 1 for i, op in enumerate(ops) if op.place == FIRST), default=0)
        self._last_begin = min((i for i, op in enumerate(ops) if op.place == LAST), default=count)
        before: dict[UsedParameter, int] = {}
        reads = []
        for place, op in enumerate(ops):
            for parameter in op.parameters:
                reads.append((place, before.get(parameter, -1), parameter.bytes))
                before[parameter] = place
        self._reads = np.array(reads, dtype=np.int64).reshape(-1, 3).T

    def _memory(self, begin: int) -> Any:
        """Return the bytes of the parameters from a place to each later one; each counts once."""
        places, earlier, sizes = self._reads
        own = (places >= begin) & (earlier < begin)
        size = len(self._order) - begin
        return np.bincount(places[own] - begin, weights=sizes[own], minlength=size).cumsum()

    def parts(self) -> list[int]:
        """Return the part of each operator.

        Raises:
            UnsupportedProgramError: no places are within the limits.
        """
        count, parts = len(self._order), len(self._problem.flops)
        best = np.full((parts + 1, count + 1), np.inf)
        came = np.zeros((parts + 1, count + 1), dtype=int)
        best[0, 0] = 0
        for begin in range(count):
            flops, memory = self._flops[begin + 1 :] - self._flops[begin], self._memory(begin)
            evenness = (flops / max(self._flops[-1], 1)) ** 2 / 2  # less than a byte in sum
            for part in np.flatnonzero(np.isfinite(best[:parts, begin])):
                ends = self._ends(part, begin, flops, memory)
                cost = best[part, begin] + evenness + (self._crossing[begin] if part else 0)
                better = ends & (cost < best[part + 1, begin + 1 :])
                best[part + 1, begin + 1 :][better] = cost[better]
                came[part + 1, begin + 1 :][better] = begin
        if not np.isfinite(best[parts, count]):
            raise UnsupportedProgramError(
                f"partition: no cut into {parts} parts is within the limits"
            )
        found, end = [0] * count, count
        for part in reversed(range(parts)):
            begin = came[part + 1, end]
            for place in range(begin, end):
                found[self._order[place]] = part
            end = begin
        return found

    def _ends(self, part: int, begin: int, flops: Any, memory: Any) -> Any:
        """Tell for each place behind the begin of a part whether it may end there."""
        ends = self._works[begin + 1 :] > self._works[begin]
        for amount, limits in ((flops, self._problem.flops), (memory, self._problem.memory)):
            ends &= (amount >= limits[part][0]) & (amount <= limits[part][1])
        places = np.arange(begin + 1, len(self._order) + 1)
        if part == 0:
            ends &= places >= self._first_end
        if part == len(self._problem.flops) - 1:
            ends &= (places == len(self._order)) & (begin <= self._last_begin)
        return ends
