"""The rule of ``stragglers``: which rank is late in what, by the times of operators of all ranks.

A rank's pace is the median over its operators of its time by the median of the ranks. It is late in
an operator by what this takes beyond the ranks' median at that pace, and as a whole by its pace. It
is a straggler where the median lateness of the last windows exceeds all of

- ``late`` times the median of the windows' median absolute deviations (MAD) of the ranks;
- :data:`LEAST` of the ranks' median, since some operators vary little among the ranks;
- :data:`LEAST_OF_STEP` of the time of all operators in a step, since small operators vary most, and
  nobody misses their time;

and the lateness of each window half of these.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from amanda.python.text import printable
from amanda.results import plural

Numbers: TypeAlias = npt.NDArray[np.float64]

Key: TypeAlias = tuple[str, str, str]
"""An operator's id, its module and its direction."""

FEWEST = 3
"""Ranks with an operator from which on it is compared."""

LEAST = 0.15
"""The least lateness, as a part of the ranks' median of the same."""

LEAST_OF_STEP = 0.01
"""The least lateness, as a part of the time of a step in all operators."""

_WHOLE: Key = ("", "", "")


@attrs.frozen
class Straggler:
    """A rank that is late.

    Attributes:
        rank: its number.
        operator: the id of the operator in which it loses most; "" for all at one pace.
        direction: of the operator.
        mads: its lateness in MAD; infinite where the other ranks agree.
        seconds: its lateness in a step.
        median: the seconds of a step that the middle rank takes.
        step: the steps that had ended.
        others: number of further operators in which it is late, too.
        module: the innermost one that has all of these operators.
    """

    rank: int
    operator: str
    direction: str
    mads: float
    seconds: float
    median: float
    step: int
    others: int
    module: str

    def __str__(self) -> str:
        where = f"{self.operator} {self.direction}" if self.operator else "all operators"
        more = f"+{self.seconds / self.median:.0%}, {1000 * self.seconds:.3g} ms a step"
        if self.others:
            within = f" of {self.module}" if self.module else ""
            more += f"; and in {plural(self.others, 'more operator')}{within}"
        return printable(f"rank {self.rank} is {self.mads:.1f} MAD late in {where} ({more})")


class Comparison:
    """Compares the ranks, window by window.

    Args:
        size: the number of ranks.
        late: the MAD from which on a rank is late.
        windows: consecutive windows in which it has to be.

    Attributes:
        found: the stragglers so far, in the order in which they were named.
        operators: of the last window, by the operator's id, the ``median`` of the ranks, the
            ``mad``, the ``slowest`` time and the ``slowest_rank``.
    """

    def __init__(self, size: int, late: float, windows: int) -> None:
        self._size, self._late = size, late
        self._columns: dict[Key, int] = {_WHOLE: 0}
        self._last: collections.deque[Numbers] = collections.deque(maxlen=windows)
        self._named: set[tuple[int, int]] = set()
        self.found: list[Straggler] = []
        self.operators: dict[str, dict[str, Any]] = {}

    def compare(
        self, step: int, ranks: Mapping[int, tuple[Sequence[Key], Numbers]]
    ) -> Sequence[Straggler]:
        """Compare a window; return the stragglers that are named for the first time.

        Args:
            step: the steps that have ended.
            ranks: by rank the operators, and the seconds of each in a step; NaN for one that has
                not run. Ranks may be missing.
        """
        table = self._table(ranks)
        table[:, median_of(table) == 0] = np.nan  # of coarse clocks
        median = median_of(table)
        total = np.nansum(median)
        pace = median_of((table / median).T)[:, None]
        # The first column is that of the whole.
        median[0], lateness = total, table - pace * median
        lateness[:, 0] = (pace[:, 0] - 1) * total
        mad = median_of(np.abs(lateness - median_of(lateness)))
        self._note_operators(table, median, mad)
        self._last.append(np.vstack([lateness, mad]))
        if len(self._last) < (self._last.maxlen or 0):
            return []
        # What was not there in an earlier window is NaN, and its minimum, too.
        missing = [((0, 0), (0, table.shape[1] - of.shape[1])) for of in self._last]
        padded = map(functools.partial(np.pad, constant_values=np.nan), self._last, missing)
        several = np.stack([*padded])
        *_, mad = middle = np.sort(several, axis=0)[len(several) // 2]
        lateness = middle[:-1]
        limit = np.maximum(self._late * mad, np.maximum(LEAST * median, LEAST_OF_STEP * total))
        is_late = (lateness > limit) & (np.min(several, axis=0)[:-1] > limit / 2)
        new = []
        for rank in np.flatnonzero(is_late.any(axis=1)).tolist():
            columns = np.flatnonzero(is_late[rank]).tolist()
            if not self._named.issuperset((rank, column) for column in columns):
                self._named.update((rank, column) for column in columns)
                new.append(self._describe(step, rank, columns, lateness[rank], median, mad))
        self.found += new
        return new

    def _table(self, ranks: Mapping[int, tuple[Sequence[Key], Numbers]]) -> Numbers:
        """One row for each rank and one column for each operator, NaN where one is missing."""
        columns = self._columns
        for keys in {id(keys): keys for keys, _ in ranks.values()}.values():
            for key in keys:
                columns.setdefault(key, len(columns))
        table = np.full((self._size, len(columns)), np.nan)
        for rank, (keys, seconds) in ranks.items():
            table[rank, [columns[key] for key in keys]] = seconds
        table[:, np.count_nonzero(~np.isnan(table), axis=0) < FEWEST] = np.nan
        return table

    def _describe(
        self,
        step: int,
        rank: int,
        columns: Sequence[int],
        lateness: Numbers,
        median: Numbers,
        mad: Numbers,
    ) -> Straggler:
        worst = max(columns, key=lambda column: lateness[column])
        keys = list(self._columns)
        paths = [keys[column][1].split(".") for column in columns if column]
        common = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
        seconds = float(lateness[worst])
        return Straggler(
            rank=rank,
            operator=keys[worst][0],
            direction=keys[worst][2],
            mads=seconds / float(mad[worst]) if mad[worst] else np.inf,
            seconds=seconds,
            median=float(median[worst]),
            step=step,
            others=len(paths) - (worst > 0),
            module=".".join(names[0] for names in common),
        )

    def _note_operators(self, table: Numbers, median: Numbers, mad: Numbers) -> None:
        slowest = np.argmax(np.nan_to_num(table, nan=-1.0), axis=0)
        self.operators = {
            key[0]: {
                "median": float(median[i]),
                "mad": float(mad[i]),
                "slowest": float(table[slowest[i], i]),
                "slowest_rank": int(slowest[i]),
            }
            for key, i in self._columns.items()
            if i and not np.isnan(median[i])
        }


def median_of(table: Numbers) -> Numbers:
    """The median of each column, of its numbers that are not NaN; NaN for one without any."""
    # Those that are NaN are sorted to the end. np.nanmedian warns where there are no others, and
    # filters of warnings are not for threads.
    ordered, counts = np.sort(table, axis=0), np.count_nonzero(~np.isnan(table), axis=0)
    every = np.arange(table.shape[1])
    middle: Numbers = (ordered[(counts - 1) // 2, every] + ordered[counts // 2, every]) / 2
    return middle
