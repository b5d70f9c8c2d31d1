"""Statistics of a tensor over many executions; no values are kept.

A :class:`Moments` is filled with :meth:`~Moments.add`, two are joined with :meth:`~Moments.merge`,
and :meth:`~Moments.row` gives the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from amanda_tools._values.tensors import Array

_SMALLEST, _LARGEST = -30, 30
"""Exponents of the first and the last bin of the histogram, which also hold what lies beyond."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu6": (-math.inf, 6.0),
}
"""Lower and upper bound of the outputs of saturating types."""

_CHUNK = 1 << 16
"""Elements processed together: as many as stay in a processor's cache."""

_FIELDS = 1 << 11
"""Number of exponent fields of a float64; field 0 stands for zeros and subnormal numbers."""

_FIRST, _LAST = 1023 + _SMALLEST, 1023 + _LARGEST
"""Exponent fields of the first and the last bin of the histogram; 1023 is float64's bias."""

_FRACTION = np.uint64(52)
"""Bits of a float64 after sign and exponent field."""

_OF_ONE_SIGN = np.array([0, 1, *range(_FIRST + 1, _LAST + 1)])

_EDGES = np.concatenate([_OF_ONE_SIGN, _FIELDS + _OF_ONE_SIGN])
"""Where a bin begins among the fields of both signs. The first of either sign is that of field 0,
which belongs to no bin."""

_SUM, _MINIMUM, _MAXIMUM = np.add.reduce, np.minimum.reduce, np.maximum.reduce
_SUMS, _ALL = np.add.reduceat, np.logical_and.reduce

_NEAR = 0.01
"""Distance to a bound within which a value is saturated: this fraction of the bounds' distance, or
this much where one bound is infinite."""


@attrs.define(eq=False)
class Moments:
    """Moments, extremes, zeros, saturation, dead units and a histogram of powers of two.

    Means and variances are merged as in Chan, Golub and LeVeque (1979), without a sum of squares,
    which would lose precision. Mean, deviation, extremes and histogram are of the finite elements.

    Attributes:
        bounds: lower and upper bound for :attr:`saturated`; None to count none.
        unit_axis: the axis of units (channels) for dead units; None to look for none.
        executions: tensors added.
        elements: their elements.
        zeros, nan, inf, saturated: number of such elements.
        mean, minimum, maximum: of the finite elements.
    """

    bounds: tuple[float, float] | None = None
    unit_axis: int | None = None
    executions: int = 0
    elements: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    saturated: int = 0
    mean: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    _finite: int = 0
    _squares: float = 0.0
    _bins: Array = attrs.field(
        factory=lambda: np.zeros((2, _LARGEST - _SMALLEST + 1), dtype=np.int64)
    )
    _alive: Array | None = None

    def add(self, array: Array) -> None:
        """Add the values of one execution."""
        # float64 for all types: sums of many float16 or float32 elements would lose precision.
        values = array.astype(np.float64, copy=False)
        is_finite = np.isfinite(values)
        self.executions += 1
        self.elements += values.size
        zeros = values.size - int(np.count_nonzero(values))
        self.zeros += zeros
        if _ALL(is_finite, axis=None):
            finite = values.ravel()
        else:
            finite = values[is_finite]
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.inf += values.size - finite.size - nan
        if self.bounds is not None:
            self.saturated += _saturated(finite, self.bounds)
        if finite.size:
            self._take(finite, zeros)
        if self.unit_axis is not None and values.ndim > self.unit_axis:
            self._note_alive(_alive(values, self.unit_axis, zeros))

    def merge(self, other: Moments) -> None:
        """Add all executions of another object with the same bounds and unit axis."""
        for name in ("executions", "elements", "zeros", "nan", "inf", "saturated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other._finite:
            self._combine(other._finite, other.mean, other._squares)
            self.minimum = min(self.minimum, other.minimum)
            self.maximum = max(self.maximum, other.maximum)
            self._bins += other._bins
        if other._alive is not None:
            self._note_alive(other._alive)

    def _take(self, finite: Array, zeros: int) -> None:
        """Update mean, squares, extremes and histogram with finite elements, `zeros` of which are
        zero."""
        # Chunk by chunk: one pass over data that is in the cache costs less than several over all
        # of it. By ufuncs: on the small tensors of most layers, what the methods mean(), sum(),
        # min() and max() do in Python takes longer than the numbers.
        fields: Array | None = None
        for start in range(0, finite.size, _CHUNK):
            chunk = finite[start : start + _CHUNK]
            mean = float(_SUM(chunk) / chunk.size)
            away = chunk - mean
            self._combine(chunk.size, mean, float(_SUM(np.square(away, out=away))))
            self.minimum = min(self.minimum, float(_MINIMUM(chunk)))
            self.maximum = max(self.maximum, float(_MAXIMUM(chunk)))
            # The first 12 bits of a float64 are sign and exponent: they give the bin without a
            # logarithm.
            first = (chunk.view(np.uint64) >> _FRACTION).view(np.int64)
            found = np.bincount(first, minlength=2 * _FIELDS)
            fields = found if fields is None else fields + found
        assert fields is not None
        # The sign bit is 1 for negative numbers, whose bins come first.
        by_sign = _SUMS(fields, _EDGES).reshape(2, -1)[::-1]
        self._bins += by_sign[:, 1:]
        # Exponent field 0 holds zeros and subnormal numbers; the latter belong to the first bin.
        if int(by_sign[0, 0]) + int(by_sign[1, 0]) > zeros:
            tiny = finite[np.abs(finite) < np.finfo(np.float64).tiny]
            self._bins[:, 0] += [(tiny < 0).sum(), (tiny > 0).sum()]

    def _combine(self, count: int, mean: float, squares: float) -> None:
        """Merge a count, a mean and a sum of squared deviations into the totals."""
        total = self._finite + count
        shift = mean - self.mean
        self._squares += squares + shift * shift * self._finite * count / total
        self.mean += shift * count / total
        self._finite = total

    def _note_alive(self, alive: Array) -> None:
        """Note which units had an element other than zero."""
        if self._alive is None or self._alive.shape != alive.shape:
            self._alive = alive
        else:
            self._alive |= alive

    @property
    def deviation(self) -> float:
        """Standard deviation (of the population) of the finite elements; NaN without any."""
        return math.sqrt(self._squares / self._finite) if self._finite else math.nan

    @property
    def sparsity(self) -> float:
        """Fraction of the elements that are zero."""
        return self.zeros / self.elements if self.elements else 0.0

    def histogram(self) -> list[list[float]]:
        """Return ``[low, high, count]`` of each power of two that occurs, in ascending order.

        Zeros are one bin ``[0, 0, count]``; the outermost bins hold what lies beyond them as well.
        """
        powers = [2.0**e for e in range(_SMALLEST, _LARGEST + 2)]
        negative, positive = self._bins
        found: list[list[float]] = [
            [-powers[i + 1], -powers[i], int(n)]
            for i, n in reversed(list(enumerate(negative)))
            if n
        ]
        if self.zeros:
            found.append([0.0, 0.0, self.zeros])
        return found + [[powers[i], powers[i + 1], int(n)] for i, n in enumerate(positive) if n]

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data; None for those that do not exist."""
        found: dict[str, Any] = {
            "executions": self.executions,
            "elements": self.elements,
            "mean": self.mean if self._finite else None,
            "std": self.deviation if self._finite else None,
            "min": self.minimum if self._finite else None,
            "max": self.maximum if self._finite else None,
            "zeros": self.zeros,
            "sparsity": self.sparsity,
            "nan": self.nan,
            "inf": self.inf,
            "saturated": self.saturated if self.bounds is not None else None,
            "units": None,
            "dead_units": None,
            "histogram": self.histogram(),
        }
        if self._alive is not None:
            found["units"] = int(self._alive.size)
            found["dead_units"] = int((~self._alive).sum())
        return found


def _alive(values: Array, axis: int, zeros: int) -> Array:
    """For each unit along an axis, whether an element is not zero; `zeros` of all elements are."""
    if values.size and not zeros:
        return np.ones(values.shape[axis], dtype=np.bool_)
    others = tuple(i for i in range(values.ndim) if i != axis)
    alive: Array = (values != 0).any(axis=others)
    return alive


def _saturated(finite: Array, bounds: tuple[float, float]) -> int:
    """Count the elements within :data:`_NEAR` of a bound or beyond it."""
    low, high = bounds
    width = high - low
    near = _NEAR * (width if math.isfinite(width) else 1.0)
    return int(((finite <= low + near) | (finite >= high - near)).sum())
