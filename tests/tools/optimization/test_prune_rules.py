"""The rules of ``prune``, against searches that try everything."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from amanda_tools._operators.weights import Untreatable, Weight
from amanda_tools.prune import PruneTool
from amanda_tools.prune.rules import Magnitude, NofM, TileWise
from amanda_tools.prune.static import Schedule

Array = np.ndarray[Any, Any]


def random(*shape: int) -> Array:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def best_pattern(values: Array, n: int) -> list[bool]:
    """Of all ways to keep n of some values the one with the largest sum, by trying them all."""
    patterns = list(itertools.combinations(range(len(values)), n))
    best = max(patterns, key=lambda kept: sum(abs(float(values[i])) for i in kept))
    return [i in best for i in range(len(values))]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (1, 2), (3, 3)])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [("OI", (6, 24)), ("IO", (24, 6)), ("OIHW", (5, 24, 3, 2)), ("HWIO", (3, 2, 24, 5))],
)
def test_n_of_m_masks_equal_a_brute_force_search(
    n: int, m: int, layout: str, shape: tuple[int, ...]
) -> None:
    value = random(*shape)
    weight = Weight(1, value, layout)
    mask = NofM(n, m).mask(value, weight, 0.5)
    axis = layout.index("I")
    for rest in np.ndindex(*(size for i, size in enumerate(shape) if i != axis)):
        row = (*rest[:axis], slice(None), *rest[axis:])
        for start in range(0, shape[axis], m):
            group = value[row][start : start + m]
            assert mask[row][start : start + m].tolist() == best_pattern(group, n)


def test_of_equal_weights_the_first_stay() -> None:
    value = np.ones((1, 4), np.float32)
    assert NofM(2, 4).mask(value, Weight(1, value, "OI"), 0).tolist() == [
        [True, True, False, False]
    ]


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.99])
def test_magnitude_drops_exactly_the_smallest(sparsity: float) -> None:
    value = random(7, 11)
    mask = Magnitude().mask(value, Weight(1, value, "OI"), sparsity)
    count = round(sparsity * 77)
    smallest = sorted(abs(v) for v in value.ravel().tolist())[:count]
    assert sorted(abs(v) for v in value[~mask].tolist()) == smallest


def test_of_equal_magnitudes_the_first_go() -> None:
    value = np.array([1.0, -2.0, 2.0, 0.5, 2.0, -2.0, 3.0, 3.0])
    mask = Magnitude().mask(value, Weight(1, value, "I"), 0.5)
    assert mask.tolist() == [False, False, False, False, True, True, True, True]


def tile_mask_by_hand(matrix: Array, sparsity: float, size: int) -> Array:
    """The definition, entry by entry, in plain Python."""
    rows, columns = matrix.shape
    strength = {c: sum(abs(matrix[r, c]) for r in range(rows)) / rows for c in range(columns)}
    dropped = sorted(range(columns), key=strength.__getitem__)[
        : round((1 - math.sqrt(1 - sparsity)) * columns)
    ]
    left = [c for c in range(columns) if c not in dropped]
    tiles = [left[i : i + size] for i in range(0, len(left), size)]
    parts = [(sum(abs(matrix[r, c]) for c in t) / len(t), r, t) for t in tiles for r in range(rows)]
    mask = np.ones(matrix.shape, bool)
    mask[:, dropped] = False
    zeros = len(dropped) * rows
    for _, row, tile in sorted(parts, key=lambda part: part[0]):
        zeros += len(tile)
        if zeros > sparsity * matrix.size:
            break
        mask[row, tile] = False
    return mask


@pytest.mark.parametrize("sparsity", [0.0, 0.4, 0.75, 0.95])
@pytest.mark.parametrize("size", [1, 5, 8, 64])
def test_tile_wise_masks_equal_the_definition(sparsity: float, size: int) -> None:
    matrix = random(20, 23)
    expected = tile_mask_by_hand(matrix, sparsity, size)
    rule = TileWise(size)
    assert np.array_equal(rule.mask(matrix, Weight(1, matrix, "IO"), sparsity), expected)
    transposed = np.ascontiguousarray(matrix.T)
    mask = rule.mask(transposed, Weight(1, transposed, "OI"), sparsity)
    assert np.array_equal(mask.T, expected)


def test_tile_wise_masks_of_a_convolution_are_those_of_its_matrix() -> None:
    value = random(16, 4, 3, 3)
    mask = TileWise(8).mask(value, Weight(1, value, "OIHW"), 0.6)
    matrix = value.reshape(16, -1).T
    expected = tile_mask_by_hand(matrix, 0.6, 8)
    assert np.array_equal(mask.reshape(16, -1).T, expected)


@pytest.mark.parametrize(
    ("rule", "weight", "reason"),
    [
        (NofM(2, 4), Weight(1, random(8, 3, 1, 1), "OIHW"), "its input axis, 3, is not a multiple"),
        (
            NofM(2, 4),
            Weight(1, random(8, 4, 1, 1), "IOHW", 4),
            "its input axis, 2, is not a multiple",
        ),
        (NofM(2, 4), Weight(1, random(9, 4), "VE"), "a weight with the layout VE has no one input"),
        (TileWise(8), Weight(1, random(8, 1, 3, 3), "OIHW", 8), "it has 8 groups"),
    ],
)
def test_what_a_rule_cannot_treat_it_says(rule: Any, weight: Weight, reason: str) -> None:
    with pytest.raises(Untreatable, match=reason):
        rule.check(weight)


def test_the_schedule_grows_as_published() -> None:
    """Zhu and Gupta (2017), equation 1, from 0 to 1."""
    schedule = Schedule(start=10, end=20, every=4)
    assert [schedule.share(step) for step in (10, 15, 20, 50)] == [0.0, 1 - 0.5**3, 1.0, 1.0]
    assert [schedule.next_due(step) for step in (10, 14, 18, 20)] == [14, 18, 20, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1}, r"sparsity=1.0 is not in \[0, 1\)"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"method": "random"}, "method=random is not one of magnitude, nm"),
        ({"method": "nm", "n": 5}, "n=5 of m=4"),
        ({"method": "nm", "scope": "global"}, "scope=global is for method=magnitude"),
        ({"start": 5, "end": 3}, "start=5, end=3"),
        ({"method": "channel", "end": 3}, "method=channel has no schedule"),
        ({"every": 0}, "every=0"),
        ({"tile": 0}, "tile=0"),
        ({"block": 0}, "block=0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruneTool(**options)
