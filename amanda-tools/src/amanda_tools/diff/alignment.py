"""Which operators of two runs belong together."""

from __future__ import annotations

import bisect
import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda_tools.diff.comparison import pair_of
from amanda_tools.diff.recordings import Record, Recording

_USUAL, _KNOWN, _PIECE, _LIKELY, _RESHAPED = 8, 6, 3, 2, 1
"""What a pair is worth: its types usually correspond; they did once, or are equal; one is likely to
be a part of what corresponds as a whole; only the shapes fit, where one side lacks the other's type
and nothing later is equal; only the types do."""


def aligned(run: Recording, reference: Recording, align: str, tolerance: float) -> dict[str, str]:
    """The operators of a run, by id, and those of the reference that they correspond to.

    Args:
        run: the run at hand.
        reference: the other one.
        align: ``id``: operators of one id and type correspond. ``order``: those that the longest
            common order of types pairs. ``value``: those of equal values, whatever their types,
            and the rest by order. ``auto``: by id if most operators have their like there, else
            by value.
        tolerance: relative error of values that are equal.
    """
    ours, theirs = run.ops(), reference.ops()
    by_id = {i: i for i, r in ours.items() if i in theirs and theirs[i].type == r.type}
    if align == "id" or (align == "auto" and 2 * len(by_id) >= min(len(ours), len(theirs))):
        return by_id
    pairs: dict[str, str] = {}
    for direction in ("forward", "backward"):
        mine = [record for record in ours.values() if record.direction == direction]
        other = [record for record in theirs.values() if record.direction == direction]
        if align == "order":
            found = _by_order(mine, other)
        else:
            found = _by_value([*map(_Value.of, mine)], [*map(_Value.of, other)], tolerance)
        pairs |= {mine[i].id: other[j].id for i, j in found.items()}
    return pairs


def _by_order(mine: Sequence[Record], other: Sequence[Record]) -> dict[int, int]:
    ours, theirs = ([record.type for record in records] for records in (mine, other))
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    blocks = matcher.get_matching_blocks()
    return {block.a + k: block.b + k for block in blocks for k in range(block.size)}


@attrs.frozen
class _Value:
    """What finds an operator's like.

    Attributes:
        record: its first tensor.
        shape: the sizes of its axes in no order, as layouts differ.
        norm: of its elements, NaN where it is not finite.
        is_telling: whether it has more than one value. A zero equals any other.
    """

    record: Record
    shape: tuple[int, ...]
    norm: float
    is_telling: bool

    @classmethod
    def of(cls, record: Record) -> _Value:
        """Read the tensor; it is not kept."""
        array = record.load()
        flat = array.astype(np.float64).ravel()
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.linalg.norm(flat))
        is_telling = math.isfinite(norm) and flat.size > 1 and bool(flat.min() < flat.max())
        return cls(record, tuple(sorted(array.shape)), norm, is_telling)


def _by_value(mine: Sequence[_Value], other: Sequence[_Value], tolerance: float) -> dict[int, int]:
    """Positions that belong together: equal values first, then the order of what is left.

    A part of a network that one program computes in one operator and the other in several is equal
    at its end, and branches are equal in whichever order they run.
    """
    pairs = _equal(mine, other, tolerance)
    types = Counter((mine[i].record.type, other[j].record.type) for i, j in pairs.items())
    left, rows = _left(mine, pairs.keys())
    free, columns = _left(other, pairs.values())
    known = {value.record.type for value in mine} & {value.record.type for value in other}
    table = [[_worth(ours, theirs, types, known) for theirs in columns[0]] for ours in rows[0]]
    if left and free:
        worth = np.array(table, np.int32)[np.ix_(rows[1], columns[1])]
        pairs.update((left[row], free[column]) for row, column in _best(worth))
    return pairs


def _equal(mine: Sequence[_Value], other: Sequence[_Value], tolerance: float) -> dict[int, int]:
    """Positions of equal values; of several the one of the same type, then the nearest."""
    # The norms of equal values are equal: nothing else need be read again.
    by_shape: dict[tuple[int, ...], list[tuple[float, int]]] = defaultdict(list)
    for j, value in enumerate(other):
        if value.is_telling:
            by_shape[value.shape].append((value.norm, j))
    for found in by_shape.values():
        found.sort()
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    expected = 0
    for i, value in enumerate(mine):
        if not value.is_telling or tolerance >= 1:
            continue
        norms = by_shape[value.shape]
        low = bisect.bisect_left(norms, (value.norm / (1 + tolerance) * (1 - 1e-9), -1))
        high = bisect.bisect_right(norms, (value.norm / (1 - tolerance) * (1 + 1e-9), len(other)))
        candidates = [j for _, j in norms[low:high] if j not in taken]
        candidates.sort(
            key=lambda j: (other[j].record.type != value.record.type, abs(j - expected))
        )
        for j in candidates:
            if pair_of(value.record, other[j].record, tolerance).agrees:
                pairs[i], expected = j, j + 1
                taken.add(j)
                break
    return pairs


def _pieces(values: Sequence[_Value], paired: Container[int]) -> set[int]:
    """Positions just before a paired operator of their module: likely parts of it."""
    found: set[int] = set()
    module: str | None = None
    for i in reversed(range(len(values))):
        if i in paired:
            module = values[i].record.module
        elif values[i].record.module == module:
            found.add(i)
        else:
            module = None
    return found


@attrs.frozen
class _Class:
    """Operators that are alike for what has no equal: ``is_last`` after all that has one."""

    type: str
    shape: tuple[int, ...]
    is_piece: bool
    is_last: bool


def _left(
    values: Sequence[_Value], paired: Iterable[int]
) -> tuple[list[int], tuple[list[_Class], list[int]]]:
    """Positions that are not paired; their classes, and which of those each position has."""
    taken = set(paired)
    pieces, last = _pieces(values, taken), max(taken, default=-1)
    positions = [i for i in range(len(values)) if i not in taken]
    numbers: dict[_Class, int] = {}
    which = []
    for i in positions:
        kind = _Class(values[i].record.type, values[i].shape, i in pieces, i > last)
        which.append(numbers.setdefault(kind, len(numbers)))
    return positions, (list(numbers), which)


def _worth(
    ours: _Class, theirs: _Class, types: Mapping[tuple[str, str], int], known: Container[str]
) -> int:
    """What it is worth to pair two operators.

    Args:
        ours, theirs: what they are.
        types: how often types are equal in value.
        known: types of both sides.
    """
    pair = (ours.type, theirs.type)
    is_same = ours.type == theirs.type
    if ours.shape != theirs.shape:
        return _RESHAPED if is_same else 0
    if ours.is_piece or theirs.is_piece:
        return _PIECE if is_same else 0
    if is_same or pair in types:
        rivals = [n for key, n in types.items() if key[0] == pair[0] or key[1] == pair[1]]
        return _USUAL if types.get(pair, 0) == max(rivals, default=0) else _KNOWN
    is_end = ours.is_last and theirs.is_last
    return _LIKELY if is_end and any(kind not in known for kind in pair) else 0


def _best(worth: Any) -> Iterator[tuple[int, int]]:
    """The pairs of rows and columns that are worth most, both in order (Needleman and Wunsch).

    Of pairs of equal worth the last: what several operators compute is there after them.
    """
    height, width = worth.shape
    # What can still be gained from a row and a column on.
    total = np.zeros((height + 1, width + 1), np.int32)
    for row in reversed(range(height)):
        with_pair = np.where(worth[row] > 0, total[row + 1, 1:] + worth[row], 0)
        best = np.maximum(total[row + 1, :-1], with_pair)
        total[row, :-1] = np.maximum.accumulate(best[::-1])[::-1]
    row = column = 0
    while row < height and column < width:
        here = total[row, column]
        if here == total[row, column + 1]:
            column += 1
        elif here == total[row + 1, column]:
            row += 1
        else:
            yield row, column
            row, column = row + 1, column + 1
