"""Which operators to run again in the backward pass: a plan from one measured iteration.

The choice is greedy. The next operator is the one with the least cost for the bytes that it
frees, where the cost is that of all neighbouring operators which would be run again with it:
the heuristic of dynamic tensor rematerialization (Kirisame et al., ICLR 2021), without its
staleness, since all is chosen at once. It keeps the runs of recomputed operators short, as the
checkpoints of Chen et al. (2016) do.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from amanda.tools.description import OpDescription

_LOOKS = 80
"""How often at most the backward pass is simulated."""


@attrs.define(eq=False)
class MeasuredOp:
    """One operator of the measured iteration.

    Attributes:
        op: the operator.
        cost: of running it again; microseconds, or operations where time is not known.
        inputs: the pieces of memory that it reads, parameters aside.
        made: the pieces that it makes, outputs and what it keeps of its own.
        saved: the pieces that are kept for its backward operators.
        obstacle: why it cannot be run again; "" if it can.
        is_random: whether it draws random numbers.
        followers: ids of operators that change what it has made in place, in order.
    """

    op: OpDescription
    cost: float = 0.0
    inputs: Sequence[int] = ()
    made: Sequence[int] = ()
    saved: frozenset[int] = frozenset()
    obstacle: str = ""
    is_random: bool = False
    followers: list[str] = attrs.field(factory=list)


@attrs.frozen
class Plan:
    """What to run again.

    Attributes:
        recomputed: positions of the steps.
        saved_bytes: kept for the backward pass without the plan.
        held_bytes: kept with it, at the end of the forward pass.
        peak_bytes: the most that is kept or recomputed at any time.
        minimum_bytes: the least peak that was found for any budget.
        budget_bytes: what was asked for.
    """

    recomputed: frozenset[int]
    saved_bytes: int
    held_bytes: int
    peak_bytes: int
    minimum_bytes: int
    budget_bytes: int

    @property
    def is_met(self) -> bool:
        """Whether the plan stays within the budget."""
        return self.peak_bytes <= self.budget_bytes


class MemoryModel:
    """The pieces of memory of the measured iteration, and who makes, reads and keeps them."""

    def __init__(self, steps: Sequence[MeasuredOp], sizes: Mapping[int, int]) -> None:
        self.steps = steps
        self.sizes = sizes
        self.makers = {piece: i for i, step in enumerate(steps) for piece in step.made}
        self.keepers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for i, step in enumerate(steps):
            for piece in step.saved:
                self.keepers.setdefault(piece, []).append(i)
            for piece in set(step.inputs):
                self.readers.setdefault(piece, []).append(i)

    def size(self, pieces: Iterable[int]) -> int:
        """Bytes of some pieces."""
        return sum(self.sizes[piece] for piece in pieces)

    def kept(self, recomputed: Collection[int]) -> set[int]:
        """The pieces that are there at the end of the forward pass."""
        inputs = [piece for i in recomputed for piece in self.steps[i].inputs]
        pieces = itertools.chain(self.keepers, inputs)
        return {piece for piece in pieces if self.makers.get(piece) not in recomputed}

    def peak(self, recomputed: Collection[int]) -> int:
        """The most bytes at any time of the backward pass; see :class:`_Backward`."""
        return _Backward(self, recomputed).peak()


class _Backward:
    """A backward pass in numbers, under the rules by which the tool recomputes.

    What is recomputed stays until the backward pass has been at all operators that keep it,
    and all that are recomputed from it have been; a kept input of a recomputed operator, until
    nothing of that operator is wanted any more.
    """

    def __init__(self, memory: MemoryModel, recomputed: Collection[int]) -> None:
        self._memory = memory
        self._recomputed = recomputed
        self._live = 0
        self._highest = 0
        self._cached: set[int] = set()
        self._wanted = {i: self._keepers_of(i) for i in recomputed}
        self._waiting = {i: self._dependents(i) for i in recomputed}
        self._ends: dict[int, int] = {}
        for i in sorted(recomputed, reverse=True):
            later = [self._ends[d] for d in self._waiting[i]]
            self._ends[i] = min([*self._wanted[i], *later], default=len(memory.steps))

    def peak(self) -> int:
        memory = self._memory
        kept = memory.kept(self._recomputed)
        self._live = self._highest = memory.size(kept)
        released: dict[int, list[int]] = {}
        for piece in kept:
            readers = memory.readers.get(piece, ())
            ends = [self._ends[i] for i in readers if i in self._recomputed]
            end = min([*memory.keepers.get(piece, ()), *ends])
            released.setdefault(end, []).append(piece)
        for i in reversed(range(len(memory.steps))):
            self._step(i)
            self._live -= memory.size(released.get(i, ()))
        return self._highest

    def _step(self, i: int) -> None:
        makers = {self._memory.makers.get(piece) for piece in self._memory.steps[i].saved}
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
            self._live += self._memory.size(self._memory.steps[i].made)
            self._highest = max(self._highest, self._live)
            for source in self._sources(i):
                self._waiting[source].discard(i)
                self._release(source)

    def _release(self, i: int) -> None:
        if i in self._cached and not self._wanted[i] and not self._waiting[i]:
            self._cached.discard(i)
            self._live -= self._memory.size(self._memory.steps[i].made)

    def _sources(self, i: int) -> set[int]:
        makers = (self._memory.makers.get(piece) for piece in self._memory.steps[i].inputs)
        return {m for m in makers if m is not None and m in self._recomputed}

    def _keepers_of(self, i: int) -> set[int]:
        made = self._memory.steps[i].made
        return {keeper for piece in made for keeper in self._memory.keepers.get(piece, ())}

    def _dependents(self, i: int) -> set[int]:
        made = self._memory.steps[i].made
        readers = (reader for piece in made for reader in self._memory.readers.get(piece, ()))
        return {reader for reader in readers if reader in self._recomputed}


def plan(memory: MemoryModel, budget: int, allowed: Collection[int]) -> Plan:
    """The cheapest plan that was found within a budget, else the one with the lowest peak.

    Args:
        memory: the measured iteration.
        budget: bytes.
        allowed: positions of the steps that may be run again.
    """
    saved = lowest = memory.size(memory.kept(()))
    chosen = best = frozenset[int]()
    is_met = saved <= budget
    # Bytes in place of costs part the operators evenly, which gives low peaks.
    for weights in (
        [step.cost for step in memory.steps],
        [float(memory.size(step.made)) for step in memory.steps],
    ):
        found = _Found(memory, budget, _Search(memory, allowed, weights))
        if found.peak < lowest:
            best, lowest = found.best, found.peak
        if not is_met and found.chosen is not None:
            chosen, is_met = found.chosen, True
    if not is_met:
        chosen = best
    held = memory.size(memory.kept(chosen))
    return Plan(chosen, saved, held, memory.peak(chosen), lowest, budget)


class _Found:
    """What a search comes by: the first plan within the budget, and the one with the least peak."""

    def __init__(self, memory: MemoryModel, budget: int, search: _Search) -> None:
        self.chosen: frozenset[int] | None = None
        self.best = frozenset[int]()
        self.peak = memory.size(memory.kept(()))
        stride = max(1, len(memory.steps) // _LOOKS)
        for count, held in enumerate(search.steps()):
            if (self.chosen is not None or held > budget) and count % stride:
                continue
            now = frozenset(search.recomputed)
            peak = memory.peak(now)
            if peak < self.peak:
                self.best, self.peak = now, peak
            if self.chosen is None and peak <= budget:
                self.chosen = now


class _Search:
    """Adds operators to a plan, the cheapest for its bytes first.

    Args:
        weights: what each step costs.
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
        """Grow the plan; yields the bytes that are held after each addition."""
        memory = self._memory
        held = memory.size(self._kept)
        later = [i for i in self._allowed if any(p in memory.keepers for p in memory.steps[i].made)]
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
                if gain <= 0:
                    later.append(i)
                elif heap and score > heap[0][0]:
                    heapq.heappush(heap, (score, i))
                else:
                    self._add(closure)
                    held -= gain
                    yield held
            if held == before:
                return

    def _closure(self, i: int) -> set[int]:
        """An operator, and those before it whose results nobody keeps anyway."""
        found, waiting = set(), [i]
        while waiting:
            j = waiting.pop()
            if j in found:
                continue
            found.add(j)
            for piece in self._memory.steps[j].inputs:
                maker = self._memory.makers.get(piece)
                is_lost = piece not in self._kept and maker not in self.recomputed
                if is_lost and maker is not None and maker in self._allowed:
                    waiting.append(maker)
        return found

    def _score(self, closure: set[int]) -> tuple[float, int]:
        """The cost of a byte that is freed, and how many are."""
        memory = self._memory
        steps = [memory.steps[i] for i in closure]
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
        """Recomputed operators next to some others."""
        memory = self._memory
        found = set()
        for i in closure:
            found |= {memory.makers.get(piece) for piece in memory.steps[i].inputs}
            for piece in memory.steps[i].made:
                found |= set(memory.readers.get(piece, ()))
        return {i for i in found if i is not None and i in self.recomputed and i not in closure}

    def _add(self, closure: set[int]) -> None:
        memory = self._memory
        around = self._around(closure)
        self.recomputed |= closure
        for i in closure:
            step = memory.steps[i]
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
