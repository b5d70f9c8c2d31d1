"""Chooses the operators to run again in the backward pass, from one measured iteration.

The choice is greedy: the next operator is the one with the least cost per byte freed, where the
cost includes all neighbouring operators that would be run again with it. This is the heuristic of
dynamic tensor rematerialization (Kirisame et al., ICLR 2021) without its staleness, since
everything is chosen at once. It keeps chains of recomputed operators short, as the checkpoints of
Chen et al. (2016) do::

    memory = MemoryModel(ops, sizes)
    plan = make_plan(memory, budget=10**9, allowed=range(len(memory.ops)))
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from amanda.tools.description import OpDescription

_MOST_SIMULATIONS = 80
"""Limit of simulated backward passes that look for the lowest peak; each costs time in
proportion to the operators."""


@attrs.define(eq=False)
class MeasuredOp:
    """One operator of the measured iteration. Memory is numbered: a *piece* is one allocation.

    Attributes:
        op: the operator.
        cost: microseconds of running it again.
        inputs: pieces that it reads, those of parameters aside.
        made: pieces that it allocates: outputs, and tensors that only its backward pass reads.
        saved: pieces kept for its backward operators.
        unknown: tensors that hooks of the program keep in another form.
        obstacle: why it cannot be run again; "" if it can.
        is_random: it draws random numbers.
        changes: ids of the operators that change its outputs in place, in order.
    """

    op: OpDescription
    cost: float = 0.0
    inputs: list[int] = attrs.field(factory=list)
    made: list[int] = attrs.field(factory=list)
    saved: frozenset[int] = frozenset()
    unknown: int = 0
    obstacle: str = ""
    is_random: bool = False
    changes: list[str] = attrs.field(factory=list)


@attrs.frozen
class Plan:
    """Which operators are run again, and the memory that it leads to.

    Attributes:
        recomputed: positions of the operators.
        saved_bytes: kept for the backward pass without the plan.
        held_bytes: kept with it, at the end of the forward pass.
        peak_bytes: largest sum of kept and recomputed memory during the backward pass.
        minimum_bytes: lowest peak found for any limit.
        budget_bytes: the limit.
    """

    recomputed: frozenset[int]
    saved_bytes: int
    held_bytes: int
    peak_bytes: int
    minimum_bytes: int
    budget_bytes: int

    @property
    def is_met(self) -> bool:
        """True if the plan stays within the limit."""
        return self.peak_bytes <= self.budget_bytes


class MemoryModel:
    """Memory of the measured iteration: which operators make, read and keep each piece.

    Attributes:
        ops: the operators, in order.
        sizes: bytes by piece.
        makers: piece to the position of the operator that makes it.
        savers: piece to the positions of the operators that save it for their backward pass.
        readers: piece to the positions of the operators that read it.
    """

    def __init__(self, ops: Sequence[MeasuredOp], sizes: Mapping[int, int]) -> None:
        self.ops = ops
        self.sizes = sizes
        self.makers = {piece: i for i, step in enumerate(ops) for piece in step.made}
        self.savers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for i, step in enumerate(ops):
            for piece in step.saved:
                self.savers.setdefault(piece, []).append(i)
            for piece in set(step.inputs):
                self.readers.setdefault(piece, []).append(i)

    def size(self, pieces: Iterable[int]) -> int:
        """Sum the bytes of pieces."""
        return sum(self.sizes[piece] for piece in pieces)

    def kept(self, recomputed: Collection[int]) -> set[int]:
        """Return the pieces in memory at the end of the forward pass."""
        inputs = [piece for i in recomputed for piece in self.ops[i].inputs]
        pieces = itertools.chain(self.savers, inputs)
        return {piece for piece in pieces if self.makers.get(piece) not in recomputed}

    def peak(self, recomputed: Collection[int]) -> int:
        """Return the largest number of bytes at any time of the backward pass; see
        :class:`_BackwardUse`."""
        return _BackwardUse(self, recomputed).peak()


class _BackwardUse:
    """Simulates a backward pass under the rules by which the tool recomputes.

    A recomputed result stays until the backward pass has passed all operators that keep it, and all
    that are recomputed from it have run. A kept input of a recomputed operator stays until nothing
    of that operator is wanted any more.
    """

    def __init__(self, memory: MemoryModel, recomputed: Collection[int]) -> None:
        self._memory = memory
        self._recomputed = recomputed
        self._live = 0
        self._highest = 0
        self._cached: set[int] = set()
        self._wanted = {i: self._savers_of(i) for i in recomputed}
        self._waiting = {i: self._dependents(i) for i in recomputed}
        self._ends: dict[int, int] = {}
        for i in sorted(recomputed, reverse=True):
            later = [self._ends[d] for d in self._waiting[i]]
            self._ends[i] = min([*self._wanted[i], *later], default=len(memory.ops))

    def peak(self) -> int:
        memory = self._memory
        kept = memory.kept(self._recomputed)
        self._live = self._highest = memory.size(kept)
        released: dict[int, list[int]] = {}
        for piece in kept:
            readers = memory.readers.get(piece, ())
            ends = [self._ends[i] for i in readers if i in self._recomputed]
            end = min([*memory.savers.get(piece, ()), *ends])
            released.setdefault(end, []).append(piece)
        for i in reversed(range(len(memory.ops))):
            self._step(i)
            self._live -= memory.size(released.get(i, ()))
        return self._highest

    def _step(self, i: int) -> None:
        makers = {self._memory.makers.get(piece) for piece in self._memory.ops[i].saved}
        for maker in makers:
            if maker is not None and maker in self._recomputed:
                self._run(maker)
        for maker in makers:
            if maker is not None and maker in self._recomputed:
                self._wanted[maker].discard(i)
                self._release(maker)

    def _run(self, target: int) -> None:
        waiting = [target]
        needed = set()
        while waiting:
            i = waiting.pop()
            if i not in self._cached and i not in needed:
                needed.add(i)
                waiting += self._sources(i)
        for i in sorted(needed):
            self._cached.add(i)
            self._live += self._memory.size(self._memory.ops[i].made)
            self._highest = max(self._highest, self._live)
            for source in self._sources(i):
                self._waiting[source].discard(i)
                self._release(source)

    def _release(self, i: int) -> None:
        if i in self._cached and not self._wanted[i] and not self._waiting[i]:
            self._cached.discard(i)
            self._live -= self._memory.size(self._memory.ops[i].made)

    def _sources(self, i: int) -> set[int]:
        makers = (self._memory.makers.get(piece) for piece in self._memory.ops[i].inputs)
        return {m for m in makers if m is not None and m in self._recomputed}

    def _savers_of(self, i: int) -> set[int]:
        made = self._memory.ops[i].made
        return {saver for piece in made for saver in self._memory.savers.get(piece, ())}

    def _dependents(self, i: int) -> set[int]:
        made = self._memory.ops[i].made
        readers = (reader for piece in made for reader in self._memory.readers.get(piece, ()))
        return {reader for reader in readers if reader in self._recomputed}


def make_plan(memory: MemoryModel, budget: int, allowed: Collection[int]) -> Plan:
    """Return the cheapest plan found within a limit, else the one with the lowest peak.

    Args:
        memory: the measured iteration.
        budget: the limit in bytes.
        allowed: positions of the operators that may be run again.
    """
    saved = lowest = memory.size(memory.kept(()))
    best = frozenset[int]()
    chosen = best if saved <= budget else None
    stride = max(1, len(memory.ops) // _MOST_SIMULATIONS)
    # With bytes in place of costs, recomputed chains become equally large, which gives low peaks.
    for weights in (
        [step.cost for step in memory.ops],
        [float(memory.size(step.made)) for step in memory.ops],
    ):
        search, is_met = _Search(memory, allowed, weights), False
        for count, held in enumerate(search.steps()):
            # The peak is at least what is held: until that fits, few simulations suffice.
            if (is_met or held > budget) and count % stride:
                continue
            peak = memory.peak(search.recomputed)
            if peak < lowest:
                best, lowest = frozenset(search.recomputed), peak
            if peak <= budget and not is_met:
                is_met = True
                chosen = frozenset(search.recomputed) if chosen is None else chosen
    if chosen is None:
        chosen = best
    held = memory.size(memory.kept(chosen))
    return Plan(chosen, saved, held, memory.peak(chosen), lowest, budget)


class _Search:
    """Adds operators to a plan, those with the least cost per byte first.

    Args:
        memory: the measured iteration.
        allowed: positions of operators that may be added.
        weights: cost of each operator.
    """

    def __init__(
        self, memory: MemoryModel, allowed: Collection[int], weights: Sequence[float]
    ) -> None:
        self.recomputed: set[int] = set()
        self._memory = memory
        self._allowed = allowed
        self._kept = memory.kept(())
        self._groups = {i: i for i in allowed}
        self._weights = weights
        self._costs = {i: weights[i] for i in allowed}

    def steps(self) -> Iterable[int]:
        """Grow the plan; yield the bytes kept after each addition."""
        memory = self._memory
        held = memory.size(self._kept)
        later = [i for i in self._allowed if any(p in memory.savers for p in memory.ops[i].made)]
        while later:
            heap = [(self._score(self._closure(i))[0], i) for i in later]
            heapq.heapify(heap)
            later, before = [], held
            while heap:
                _, i = heapq.heappop(heap)
                if i in self.recomputed:
                    continue
                closure = self._closure(i)
                score, gain = self._score(closure)
                # It frees nothing yet; other additions may change that.
                if gain <= 0:
                    later.append(i)
                # Scores change as operators are added: a stale one is sorted in again.
                elif heap and score > heap[0][0]:
                    heapq.heappush(heap, (score, i))
                else:
                    self._add(closure)
                    held -= gain
                    yield held
            if held == before:
                return

    def _closure(self, i: int) -> set[int]:
        """Return an operator with those before it whose results are lost and have to be
        recomputed, too."""
        found, waiting = set(), [i]
        while waiting:
            j = waiting.pop()
            if j in found:
                continue
            found.add(j)
            for piece in self._memory.ops[j].inputs:
                maker = self._memory.makers.get(piece)
                is_lost = piece not in self._kept and maker not in self.recomputed
                if is_lost and maker is not None and maker in self._allowed:
                    waiting.append(maker)
        return found

    def _score(self, closure: set[int]) -> tuple[float, int]:
        """Return cost per byte freed, and bytes freed."""
        memory = self._memory
        steps = [memory.ops[i] for i in closure]
        made = {piece for step in steps for piece in step.made}
        new = {
            piece
            for step in steps
            for piece in step.inputs
            if piece not in made
            and piece not in self._kept
            and memory.makers.get(piece) not in self.recomputed
        }
        gain = memory.size(made & self._kept) - memory.size(new)
        groups = {self._group(i) for i in self._around(closure)}
        cost = sum(self._weights[i] for i in closure) + sum(self._costs[g] for g in groups)
        return (cost / gain if gain > 0 else float("inf")), gain

    def _around(self, closure: set[int]) -> set[int]:
        """Return the recomputed operators that make the inputs or read the results of others."""
        memory = self._memory
        found = set()
        for i in closure:
            found |= {memory.makers.get(piece) for piece in memory.ops[i].inputs}
            for piece in memory.ops[i].made:
                found |= set(memory.readers.get(piece, ()))
        return {i for i in found if i is not None and i in self.recomputed and i not in closure}

    def _add(self, closure: set[int]) -> None:
        memory = self._memory
        around = self._around(closure)
        self.recomputed |= closure
        for i in closure:
            step = memory.ops[i]
            self._kept -= set(step.made)
            self._kept |= {p for p in step.inputs if memory.makers.get(p) not in self.recomputed}
        first = self._group(next(iter(closure)))
        for i in closure | around:
            group = self._group(i)
            if group != first:
                self._costs[first] += self._costs[group]
                self._groups[group] = first

    def _group(self, i: int) -> int:
        while self._groups[i] != i:
            self._groups[i] = self._groups[self._groups[i]]
            i = self._groups[i]
        return i
