"""The rule of ``stragglers``: which rank is late in what, by times of operators of all ranks.

::

    comparison = Comparison(size=8, late=10.0, windows=3)
    for window in range(10):
        comparison.compare(window, {rank: (names, seconds) for rank in range(8)})
    comparison.found

A rank's lateness in all operators is the sum of its times less the medians of the ranks that have
each. Its lateness in one operator is what that takes longer than the median and the rank's own
pace, the median over operators, make expected; that in a module is the sum over its operators, so
that ranks with different operators, as stages of a pipeline, need no alignment. A rank is late
where the mean lateness of the last ``windows``

- is over ``late`` times the median absolute deviation (MAD) of the ranks, which is 1.5 % of the
  median at least, so that nearly equal ranks are not late for a microsecond, and what the windows
  before make expected, since that of a few ranks is small by chance now and then;
- is 0.1 % of the time of a step at least: what nobody would feel is not named, and small operators
  are the noisy ones;
- comes from each of the windows: none has less than half of these.

Ten MAD are 6.7 standard deviations of a normal distribution, since a thousand ranks have a
million operators that may be late by chance; ``tests/tools/test_stragglers.py`` simulates it.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from amanda.python.text import printable

Numbers: TypeAlias = npt.NDArray[np.float64]
Key: TypeAlias = tuple[str, str, str]
"""An operator's id, its module and its direction."""

FEWEST = 3
"""Ranks with an operator, for which a median and deviations mean something."""

_LEAST_MAD = 0.015
"""The least MAD, as a part of the median."""

_LEAST_SHARE = 0.001
"""The least lateness, as a part of the time of a step in all operators."""

_MOST = 0.7
"""The part of a module's lateness for which one part of it is named in its place."""

_POOLED = 20
"""Windows whose MAD are averaged."""


@attrs.frozen(eq=False)
class Names:
    """The operators of a rank, in the order of its times.

    Attributes:
        keys: of each its :data:`Key`.
    """

    keys: Sequence[Key]


@attrs.frozen(eq=False)
class Part:
    """An operator, or the operators of a module and of the modules within it.

    Attributes:
        what: the operator's id, or the path of the module; "" for all.
        direction: of the operators; "" for both.
        members: the columns of the operators.
    """

    what: str
    direction: str
    members: frozenset[int]

    def overlaps(self, other: Part) -> bool:
        """True if they have an operator in common."""
        return not self.members.isdisjoint(other.members)


@attrs.frozen
class Straggler:
    """A rank that is late in a part.

    Attributes:
        rank: its number.
        part: what it is late in.
        mads: its lateness in MAD.
        seconds: its lateness in a step.
        median: the seconds of a step that the middle rank takes.
        window: the last one in which it was late.
    """

    rank: int
    part: Part
    mads: float
    seconds: float
    median: float
    window: int

    def __str__(self) -> str:
        where = f"{self.part.what or 'the whole model'} {self.part.direction}".rstrip()
        more = f"+{self.seconds / self.median:.0%}, {1000 * self.seconds:.3g} ms a step"
        return printable(f"rank {self.rank} is {self.mads:.1f} MAD late in {where} ({more})")

    def row(self, steps: int) -> dict[str, Any]:
        """Return it as plain data, for windows of so many steps."""
        return {
            "rank": self.rank,
            "what": self.part.what,
            "direction": self.part.direction,
            "mads": self.mads,
            "seconds": self.seconds,
            "median": self.median,
            "last_step": self.window * steps,
        }


class Comparison:
    """Compares the ranks, window by window.

    Args:
        size: the number of ranks.
        late: the MAD from which on a rank is late.
        windows: the windows over which the lateness is averaged.

    Attributes:
        found: the stragglers so far, in the order in which they were named.
        operators: of the last window, by the operator's id, the ``median``, the ``mad``, the
            ``slowest`` time and the ``slowest_rank``.
    """

    def __init__(self, size: int, late: float, windows: int) -> None:
        self._size, self._late = size, late
        self._columns: dict[Key, int] = {}
        self._places: dict[Names, npt.NDArray[np.intp]] = {}
        self._parts: list[Part] = []
        self._last: collections.deque[Numbers] = collections.deque(maxlen=windows)
        self._mad, self._mads = np.zeros(0), 0
        self.found: list[Straggler] = []
        self.operators: dict[str, dict[str, Any]] = {}

    def compare(
        self, window: int, ranks: Mapping[int, tuple[Names, Numbers]]
    ) -> Sequence[Straggler]:
        """Compare a window; return the stragglers that are named for the first time.

        Args:
            window: its number.
            ranks: by rank the operators, and the seconds of each in a step; NaN for one that has
                not run. Ranks may be missing.
        """
        table = self._table(ranks)
        table[:, np.count_nonzero(~np.isnan(table), axis=0) < FEWEST] = np.nan
        median = median_of(table)
        self._note_operators(table, median)
        lateness, medians = self._by_part(table, median)
        self._last.append(lateness - median_of(lateness))
        pooled = self._pooled(median_of(np.abs(self._last[-1])))
        if len(self._last) < (self._last.maxlen or 0):
            return []
        mean = np.mean(self._last, axis=0)
        mad = median_of(np.abs(mean - median_of(mean)))
        mad = np.maximum(mad, pooled / math.sqrt(len(self._last)))
        mad = np.maximum(mad, _LEAST_MAD * medians)
        limit = np.maximum(self._late * mad, _LEAST_SHARE * np.nansum(median))
        is_late = (mean > limit) & (np.min(self._last, axis=0) > limit / 2)
        late: dict[int, list[Straggler]] = {}
        for rank, j in np.argwhere(is_late).tolist():
            seconds, usual = float(mean[rank, j]), float(medians[j])
            of = Straggler(rank, self._parts[j], seconds / float(mad[j]), seconds, usual, window)
            late.setdefault(rank, []).append(of)
        return [new for of in late.values() for one in _innermost(of) for new in self._note(one)]

    def _pooled(self, mad: Numbers) -> Numbers:
        """The mean of the MAD of the windows so far, of the last ones mainly."""
        self._mads = min(self._mads + 1, _POOLED)
        known = self._mad if self._mads > 1 else mad
        self._mad = np.where(np.isnan(known), mad, known + (mad - known) / self._mads)
        return self._mad

    def _note(self, straggler: Straggler) -> Sequence[Straggler]:
        """Keep it; return it if nothing that it overlaps was known of the rank."""
        for i, known in enumerate(self.found):
            if known.rank == straggler.rank and known.part.overlaps(straggler.part):
                if known.part.what == straggler.part.what:
                    self.found[i] = straggler
                return []
        self.found.append(straggler)
        return [straggler]

    def _table(self, ranks: Mapping[int, tuple[Names, Numbers]]) -> Numbers:
        """One row for each rank and one column for each operator, NaN where one is missing."""
        columns, before = self._columns, len(self._columns)
        for names in {names: None for names, _ in ranks.values() if names not in self._places}:
            places = [columns.setdefault(key, len(columns)) for key in names.keys]
            self._places[names] = np.array(places, np.intp)
        if len(columns) > before:
            self._parts = _parts_of(list(columns))
            self._last.clear()
            self._mads = 0
        table = np.full((self._size, len(columns)), np.nan)
        for rank, (names, seconds) in ranks.items():
            table[rank, self._places[names]] = seconds
        return table

    def _by_part(self, table: Numbers, median: Numbers) -> tuple[Numbers, Numbers]:
        """The lateness of ranks in each part, NaN for a rank without it, and the parts' medians."""
        pace = median_of((table / median).T)
        lateness = table - pace[:, None] * median
        members = [list(part.members) for part in self._parts[len(median) :]]
        modules = np.zeros((len(table), len(members)))
        for column, of in zip(modules.T, members, strict=True):
            parts = (table - median if len(of) == len(median) else lateness)[:, of]
            column[:] = np.where(np.isnan(parts).all(axis=1), np.nan, np.nansum(parts, axis=1))
        medians = [np.nansum(median[of]) for of in members]
        return np.concatenate([lateness, modules], axis=1), np.append(median, medians)

    def _note_operators(self, table: Numbers, median: Numbers) -> None:
        mad = median_of(np.abs(table - median))
        slowest = np.argmax(np.nan_to_num(table, nan=-1.0), axis=0)
        self.operators = {
            key[0]: {
                "median": float(median[i]),
                "mad": float(mad[i]),
                "slowest": float(table[slowest[i], i]),
                "slowest_rank": int(slowest[i]),
            }
            for key, i in self._columns.items()
            if not np.isnan(median[i])
        }


def median_of(table: Numbers) -> Numbers:
    """The median of each column, of its numbers that are not NaN; NaN for one without any."""
    # Those that are NaN are sorted to the end.
    ordered, counts = np.sort(table, axis=0), np.count_nonzero(~np.isnan(table), axis=0)
    every = np.arange(table.shape[1])
    middle: Numbers = (ordered[(counts - 1) // 2, every] + ordered[counts // 2, every]) / 2
    return middle


def _parts_of(keys: Sequence[Key]) -> list[Part]:
    """Each operator, in order, then each module in each direction and in both; of several with the
    same operators the inmost one."""
    modules: dict[tuple[str, str], set[int]] = {}
    for i, (_, module, direction) in enumerate(keys):
        names = module.split(".") if module else []
        for path in itertools.accumulate(["", *names], lambda a, b: f"{a}.{b}" if a else b):
            for way in ("", direction):
                modules.setdefault((path, way), set()).add(i)
    single = [
        Part(op_id, direction, frozenset([i])) for i, (op_id, _, direction) in enumerate(keys)
    ]
    ordered = sorted(modules.items(), key=lambda item: (len(item[0][0]), len(item[0][1])))
    several = {frozenset(of): key for key, of in ordered if len(of) > 1}
    return single + [Part(*key, of) for of, key in several.items()]


def _innermost(found: Sequence[Straggler]) -> list[Straggler]:
    """Of parts that overlap, the smallest one with most of the lateness of the latest one."""
    rest, kept = list(found), []
    while rest:
        latest = max(rest, key=lambda each: each.seconds)
        within = [
            each
            for each in rest
            if each.part.members <= latest.part.members and each.seconds >= _MOST * latest.seconds
        ]
        kept.append(min(within, key=lambda each: len(each.part.members)))
        rest = [each for each in rest if not each.part.overlaps(kept[-1].part)]
    return kept
