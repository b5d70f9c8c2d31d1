"""Pairs the operators of two runs, by id or by value.

::

    run, reference, ops = align_ops(run, reference, "auto", tolerance=1e-3)
    ops["Net.fc/linear:0"].id       # id of the corresponding operator of the reference
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda_tools._values.recordings import Recording, TensorRecord
from amanda_tools.diff.comparison import Counterpart, compare_tensors
from amanda_tools.diff.fused import split_fused

# Scores of a pair of operators that are not equal in value. An alignment maximizes their sum; only
# their order and that a better pair outweighs one or two worse ones matter.

_COPY = "identity"
"""Type of operators that return their input; graphs contain them without any computation."""

_EQUAL_CONSTANTS = 12
"""Score of a pair of the same type and the same single value, as of a loop counter or zeros."""

_USUAL_TYPES = 8
"""Equal shapes, of the two types that are most often equal in value."""

_KNOWN_TYPES = 6
"""Equal shapes, and types that are equal or paired elsewhere in the runs."""

_SAME_TYPE_IN_COMPOSITE = 3
"""Equal shapes and types, but one operator is probably a part of a paired composite."""

_ONLY_SHAPE_AT_END = 2
"""Equal shapes after the last equal values, of types that the other run lacks."""

_ONLY_TYPE = 1
"""Score of a pair of the same type with other shapes, of as many axes."""

_NORM_TOLERANCE = 1e-9
"""Relative margin for rounding when candidates are looked up by their norms."""


def align_ops(
    run: Recording, reference: Recording, align: str, tolerance: float
) -> tuple[Recording, Recording, dict[str, Counterpart]]:
    """Return both runs, in which fused operators may be split, and corresponding operators: id in
    the run to the one in the reference.

    Args:
        run: the run.
        reference: the run to compare with.
        align: ``id``: pairs operators of equal id and type. ``value``: pairs operators of equal
            values, whatever their types, and the rest by order. ``auto``: by id if most operators
            have a counterpart, else by value.
        tolerance: relative error up to which values are equal.
    """
    ours, theirs = run.ops(), reference.ops()
    by_id = {i: i for i, r in ours.items() if i in theirs and theirs[i].type == r.type}
    are_most = 2 * len(by_id) >= min(len(ours), len(theirs))
    if align == "id" or (align == "auto" and are_most):
        return run, reference, {i: Counterpart(i, "id") for i in by_id}
    run, reference, parts = split_fused(run, reference)
    done = {counterpart.id for counterpart in parts.values()}
    pairs: dict[str, Counterpart] = {}
    for direction in ("forward", "backward"):
        mine, other = (
            [r for r in of.ops().values() if r.direction == direction and r.id not in paired]
            for of, paired in ((run, parts), (reference, done))
        )
        pairs |= _by_value(mine, other, pairs, tolerance)
    return run, reference, pairs | parts


def _by_value(
    mine: Sequence[TensorRecord],
    other: Sequence[TensorRecord],
    forward: Mapping[str, Counterpart],
    tolerance: float,
) -> dict[str, Counterpart]:
    """Pair operators of equal values, and the rest by order; `forward` are pairs so far."""
    values = [*map(_OpValue.of, mine)], [*map(_OpValue.of, other)]
    equal = _pair_equal_values(*values, tolerance)
    rest = _pair_rest(*values, equal, {i: c.id for i, c in forward.items()})
    pairs = {mine[i].id: Counterpart(other[j].id, "value") for i, j in equal.items()}
    return pairs | {mine[i].id: Counterpart(other[j].id, "order") for i, j in rest.items()}


@attrs.frozen
class _OpValue:
    """Properties of an operator's first tensor.

    Attributes:
        record: the tensor's record.
        shape: sizes of the axes, sorted: layouts may differ.
        norm: Euclidean norm; NaN if an element is not finite.
        value: the value of all its elements; None if they differ.
        is_telling: True if its elements differ; tensors of zeros are all equal.
    """

    record: TensorRecord
    shape: tuple[int, ...]
    norm: float
    value: float | None
    is_telling: bool

    @classmethod
    def of(cls, record: TensorRecord) -> _OpValue:
        """Compute the properties; the tensor is not kept."""
        array = record.load()
        flat = array.astype(np.float64).ravel()
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.linalg.norm(flat))
        is_constant = math.isfinite(norm) and flat.size > 0 and bool(flat.min() == flat.max())
        value = float(flat[0]) if is_constant else None
        is_telling = math.isfinite(norm) and flat.size > 1 and not is_constant
        return cls(record, tuple(sorted(array.shape)), norm, value, is_telling)


def _pair_rest(
    mine: Sequence[_OpValue],
    other: Sequence[_OpValue],
    equal: Mapping[int, int],
    forward: Mapping[str, str],
) -> dict[int, int]:
    """Pair positions of operators without an equal value, by the order with the best score.

    If one program computes in one operator what the other computes in several, the last of those is
    equal in value.

    Args:
        equal: pairs of positions of equal values.
        forward: paired ids of forward operators. A gradient is paired only with a gradient of the
            paired forward operator.
    """
    types = Counter((mine[i].record.type, other[j].record.type) for i, j in equal.items())
    known = {value.record.type for value in mine} & {value.record.type for value in other}
    numbers = {module: n for n, module in enumerate(_modules(mine) & _modules(other))}
    left, free = _unpaired(mine, equal.keys()), _unpaired(other, equal.values())
    counterparts = {"": "", **forward}
    ours, theirs = defaultdict(list), defaultdict(list)
    for position, kind in left:
        ours[counterparts.get(mine[position].record.forward)].append((position, kind))
    known_forward = set(counterparts.values())
    for position, kind in free:
        of = other[position].record.forward
        theirs[of if of in known_forward else None].append((position, kind))
    pairs: dict[int, int] = {}
    for key, part in ours.items():
        # Forward operators that the other run lacks: pair constants.
        score = _score if key is not None else _score_constants
        scores = _scores(part, theirs[key], functools.partial(score, types=types, known=known))
        # Operators of two modules that both runs have do not correspond.
        rows, columns = (
            np.array([numbers.get(of[i].record.module, -1) for i, _ in own], np.int32)
            for of, own in ((mine, part), (other, theirs[key]))
        )
        is_other = (rows[:, None] != columns) & (rows[:, None] >= 0) & (columns >= 0)
        for row, column in _best_pairs(np.where(is_other, 0, scores)):
            pairs[part[row][0]] = theirs[key][column][0]
    return pairs


def _modules(values: Iterable[_OpValue]) -> set[str]:
    """Return the paths of the modules of operators, and of those around them."""
    found = set[str]()
    for module in {value.record.module for value in values}:
        parts = module.split(".")
        found.update(".".join(parts[:count]) for count in range(len(parts) + 1))
    return found


def _scores(
    left: Sequence[tuple[int, _Class]],
    free: Sequence[tuple[int, _Class]],
    score: Callable[[_Class, _Class], int],
) -> Any:
    """Return the score of each pair, int32 of shape (left, free)."""
    # Scores are computed per pair of classes, of which there are far fewer than pairs of operators.
    scored = {
        (ours, theirs): score(ours, theirs)
        for ours in {kind for _, kind in left}
        for theirs in {kind for _, kind in free}
    }
    found = [[scored[row, column] for _, column in free] for _, row in left]
    return np.array(found, np.int32).reshape(len(left), len(free))


def _pair_equal_values(
    mine: Sequence[_OpValue], other: Sequence[_OpValue], tolerance: float
) -> dict[int, int]:
    """Pair positions of equal values; prefer candidates of the same type, then the nearest."""
    # Equal values have equal norms: no other tensors need be read again.
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
        # The relative error is relative to the reference: its norm is within these bounds.
        low = bisect.bisect_left(norms, (value.norm / (1 + tolerance) * (1 - _NORM_TOLERANCE), -1))
        high = bisect.bisect_right(
            norms, (value.norm / (1 - tolerance) * (1 + _NORM_TOLERANCE), len(other))
        )
        candidates = [j for _, j in norms[low:high] if j not in taken]
        candidates.sort(
            key=lambda j: (other[j].record.type != value.record.type, abs(j - expected))
        )
        for j in candidates:
            if compare_tensors(value.record, other[j].record, tolerance).agrees:
                pairs[i], expected = j, j + 1
                taken.add(j)
                break
    return pairs


def _parts_of_composites(values: Sequence[_OpValue], paired: Container[int]) -> set[int]:
    """Return positions directly before a paired operator of the same module: probably its parts."""
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
    """Properties by which operators without an equal value are paired.

    Attributes:
        type: type of the operator.
        shape: shape of its first tensor.
        value: value of all elements of that tensor; None if they differ.
        is_part: True if the operator is probably a part of a paired composite.
        is_last: True if the operator comes after all operators with an equal value.
    """

    type: str
    shape: tuple[int, ...]
    value: float | None
    is_part: bool
    is_last: bool


def _unpaired(values: Sequence[_OpValue], paired: Iterable[int]) -> list[tuple[int, _Class]]:
    """Return the positions without a pair, and the class of each."""
    taken = set(paired)
    pieces, last = _parts_of_composites(values, taken), max(taken, default=-1)
    return [
        (i, _Class(v.record.type, v.shape, v.value, i in pieces, i > last))
        for i, v in enumerate(values)
        if i not in taken
    ]


def _score_constants(ours: _Class, theirs: _Class, **_: Any) -> int:
    """Return the score of pairing two gradients of unknown forward operators."""
    return _EQUAL_CONSTANTS if _are_equal_constants(ours, theirs) else 0


def _are_equal_constants(ours: _Class, theirs: _Class) -> bool:
    is_same = (ours.type, ours.shape, ours.value) == (theirs.type, theirs.shape, theirs.value)
    return is_same and ours.value is not None


def _score(
    ours: _Class, theirs: _Class, types: Mapping[tuple[str, str], int], known: Container[str]
) -> int:
    """Return the score of pairing two operators, 0 if they cannot correspond.

    Args:
        ours, theirs: classes of the operators.
        types: pairs of types to the number of pairs of operators equal in value.
        known: types that occur in both runs.
    """
    if _are_equal_constants(ours, theirs):
        return _EQUAL_CONSTANTS
    is_part = ours.is_part or theirs.is_part
    if ours.type == theirs.type:
        if ours.shape != theirs.shape:
            return _ONLY_TYPE if len(ours.shape) == len(theirs.shape) else 0
        return _SAME_TYPE_IN_COMPOSITE if is_part else _score_types(ours, theirs, types)
    pair = (ours.type, theirs.type)
    if ours.shape != theirs.shape or _COPY in pair or is_part:
        return 0
    if pair in types:
        return _score_types(ours, theirs, types)
    is_end = ours.is_last and theirs.is_last
    return _ONLY_SHAPE_AT_END if is_end and not all(kind in known for kind in pair) else 0


def _score_types(ours: _Class, theirs: _Class, types: Mapping[tuple[str, str], int]) -> int:
    """Return the score of two types: more if no other pair with one of them is as frequent."""
    pair = (ours.type, theirs.type)
    rivals = [n for key, n in types.items() if key[0] == pair[0] or key[1] == pair[1]]
    return _USUAL_TYPES if types.get(pair, 0) == max(rivals, default=0) else _KNOWN_TYPES


def _best_pairs(scores: Any) -> Iterator[tuple[int, int]]:
    """Yield the pairs of rows and columns with the largest sum of scores, both in ascending order.

    The algorithm of Needleman and Wunsch. Of equal sums the last pairs are taken: of several
    operators the last one has the result.
    """
    height, width = scores.shape
    # Entry (row, column) is the largest sum that the rows and columns from there on can reach.
    total = np.zeros((height + 1, width + 1), np.int32)
    for row in reversed(range(height)):
        with_pair = np.where(scores[row] > 0, total[row + 1, 1:] + scores[row], 0)
        best = np.maximum(total[row + 1, :-1], with_pair)
        # Skipping columns costs nothing: the best of this column and all after it.
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
