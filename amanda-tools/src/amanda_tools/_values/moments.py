"""Statistics of a tensor over many executions; no values are kept.

A :class:`Moments` is filled with :meth:`~Moments.add`, two are joined with :meth:`~Moments.merge`,
and :meth:`~Moments.row` gives the figures.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
from xxhash import xxh3_128_digest

from amanda_tools._values.tensors import Array

_SMALLEST, _LARGEST = -30, 30
"""Exponents of the first and the last bin of the histogram, which also hold what lies beyond."""

_CHUNK = 1 << 16
"""Elements processed together: as many as stay in a processor's cache."""


_KNOWN = 1 << 12
"""Arrays whose moments are remembered, with 1.2 kB each."""


class _Float:
    """The place of the exponent in a type of floating-point numbers, for the histogram.

    Sign and exponent are the first bits of a number: they give its bin without a logarithm. Field
    0 stands for zeros and subnormal numbers, the last one for NaN and infinities.

    Args:
        bits: the unsigned integers of the same size.
        fraction: bits after sign and exponent.

    Attributes:
        fields: number of exponent fields.
        edges: where a bin begins among the fields of both signs; of either sign the first is that
            of field 0 and the last that of the numbers that are not finite, which are not bins.
    """

    def __init__(self, bits: type[np.unsignedinteger[Any]], fraction: int) -> None:
        self.bits = bits
        self.shift = bits(fraction)
        self.fields = 1 << (8 * np.dtype(bits).itemsize - fraction - 1)
        bias = self.fields // 2 - 1
        inner = range(bias + _SMALLEST + 1, bias + _LARGEST + 1)
        of_one_sign = np.array([0, 1, *inner, self.fields - 1])
        self.edges = np.concatenate([of_one_sign, self.fields + of_one_sign])


_FLOAT32, _FLOAT64 = _Float(np.uint32, 23), _Float(np.uint64, 52)

_SUM, _MINIMUM, _MAXIMUM = np.add.reduce, np.minimum.reduce, np.maximum.reduce
_SUMS = np.add.reduceat

_NEAR = 0.01
"""Distance to a bound within which a value is saturated: this fraction of the bounds' distance, or
this much where one bound is infinite."""


@attrs.define(eq=False)
class Moments:
    """Moments, extremes, zeros, saturation, dead units and a histogram of powers of two.

    Means and deviations are merged as in Chan, Golub and LeVeque (1979), without a sum of squares,
    which would lose precision, and leave the range of float64 for large and small numbers. Mean,
    deviation, extremes and histogram are of the finite elements.

    Attributes:
        bounds: lower and upper bound for :attr:`saturated`; None to count none.
        unit_axis: the axis of units (channels) for dead units; None to look for none.
        zeros_only: count elements, zeros and dead units, and leave all other figures at 0.
        executions: tensors added.
        elements: their elements.
        zeros, nan, inf, saturated: number of such elements.
        mean, minimum, maximum: of the finite elements.
    """

    bounds: tuple[float, float] | None = None
    unit_axis: int | None = None
    zeros_only: bool = attrs.field(default=False, kw_only=True)
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
    _deviation: float = 0.0
    _bins: Array = attrs.field(
        factory=lambda: np.zeros((2, _LARGEST - _SMALLEST + 1), dtype=np.int64)
    )
    _alive: Array | None = None

    def add(self, array: Array, known: Moments | None = None) -> None:
        """Add the values of one execution.

        Args:
            array: the values, in any order of memory.
            known: moments, without bounds and units, of an array with the same elements.
        """
        before = self.zeros
        if known is None:
            self.executions += 1
            self.elements += array.size
            self._take(array)
        else:
            self.merge(known)
        if self.bounds is not None:
            self.saturated += _saturated(array, self.bounds)
        if self.unit_axis is not None and array.ndim > self.unit_axis:
            self._note_alive(_alive(array, self.unit_axis, self.zeros - before))

    def merge(self, other: Moments) -> None:
        """Add all executions of another object with the same bounds and unit axis."""
        self.executions += other.executions
        self.elements += other.elements
        self.zeros += other.zeros
        self.nan += other.nan
        self.inf += other.inf
        self.saturated += other.saturated
        if other._finite:
            self._combine(other._finite, other.mean, other._deviation)
            self.minimum = min(self.minimum, other.minimum)
            self.maximum = max(self.maximum, other.maximum)
            self._bins += other._bins
        if other._alive is not None:
            self._note_alive(other._alive)

    def _take(self, array: Array) -> None:
        """Count zeros and what is not finite; update mean, squares, extremes and histogram."""
        if self.zeros_only:
            self.zeros += array.size - int(np.count_nonzero(array))
            return
        form = _FLOAT32
        if array.dtype.itemsize < 4:
            array = array.astype(np.float32)
        elif array.dtype != np.float32:
            array, form = array.astype(np.float64, copy=False), _FLOAT64
        values = array.ravel(order="K")
        # Chunk by chunk: one pass over data that is in the cache costs less than several over all
        # of it. By ufuncs: on the small tensors of most layers, what the methods mean(), sum(),
        # min() and max() do in Python takes longer than the numbers.
        for start in range(0, values.size, _CHUNK):
            chunk = values[start : start + _CHUNK]
            fields = (chunk.view(form.bits) >> form.shift).astype(np.intp)
            counts = np.bincount(fields, minlength=2 * form.fields)
            # The sign bit is 1 for negative numbers, whose bins come first.
            by_sign = _SUMS(counts, form.edges).reshape(2, -1)[::-1]
            self._bins += by_sign[:, 1:-1]
            if by_sign[0, 0] or by_sign[1, 0]:
                self._count_small(chunk, int(by_sign[0, 0] + by_sign[1, 0]))
            if by_sign[0, -1] or by_sign[1, -1]:
                nan = int(np.isnan(chunk).sum())
                self.nan += nan
                self.inf += int(by_sign[0, -1] + by_sign[1, -1]) - nan
                chunk = chunk[np.isfinite(chunk)]
                if not chunk.size:
                    continue
            low, high = float(_MINIMUM(chunk)), float(_MAXIMUM(chunk))
            # float64 for all types: sums of many float32 elements would lose precision.
            wide = chunk.astype(np.float64)
            if (unit := _unit(max(-low, high))) != 1:
                wide /= unit
            mean = float(_SUM(wide) / wide.size)
            wide -= mean
            deviation = math.sqrt(_SUM(np.square(wide, out=wide)) / wide.size)
            self._combine(wide.size, mean * unit, deviation * unit)
            self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)

    def _count_small(self, chunk: Array, small: int) -> None:
        """Count the zeros among elements whose exponent field is 0, of which there are `small`.

        The others are subnormal numbers, and belong to the first bin.
        """
        zeros = chunk.size - int(np.count_nonzero(chunk))
        self.zeros += zeros
        if small > zeros:
            tiny = chunk[np.abs(chunk) < np.finfo(chunk.dtype).tiny]
            self._bins[:, 0] += [(tiny < 0).sum(), (tiny > 0).sum()]

    def _combine(self, count: int, mean: float, deviation: float) -> None:
        """Merge a count, a mean and a standard deviation into the totals."""
        self._finite += count
        share, shift = count / self._finite, mean - self.mean
        old, new = math.sqrt(1 - share), math.sqrt(share)
        self._deviation = math.hypot(self._deviation * old, deviation * new, shift * old * new)
        self.mean += shift * share

    def _note_alive(self, alive: Array) -> None:
        """Note which units had an element other than zero."""
        if self._alive is None or self._alive.shape != alive.shape:
            self._alive = alive
        else:
            self._alive |= alive

    @property
    def deviation(self) -> float:
        """Standard deviation (of the population) of the finite elements; NaN without any."""
        return self._deviation if self._finite else math.nan

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

    def samples(self) -> dict[str, Any]:
        """Return the columns of a table of results, of the finite elements.

        The histogram is of all elements, by the bound of a bin that is nearer to zero; infinities
        of both signs are one bin. With ``zeros_only`` a sample is 1 for a zero, and 0 for another
        element.
        """
        if self.zeros_only:
            return {"count": self.elements, "sum": self.zeros, "sum_squares": self.zeros}
        bins = {min(low, high, key=abs): n for low, high, n in self.histogram()}
        special = {math.nan: self.nan, math.inf: self.inf}
        found = {"histogram": bins | {key: n for key, n in special.items() if n}}
        if not (n := self._finite):
            return {"count": 0, **found}
        sums = {"sum": self.mean * n, "sum_squares": (self.mean**2 + self._deviation**2) * n}
        known = {key: value for key, value in sums.items() if math.isfinite(value)}
        return {"count": n, "min": self.minimum, "max": self.maximum, **known, **found}

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


class KnownMoments:
    """Moments of the arrays that came last, by a hash of their elements.

    Many tensors of a training step have the same elements in the same order of memory: the gradient
    of a weight and that of its transposed view, activations and their reshaped views, weights
    from one inference to the next. To hash them takes a twentieth of the time of their figures.

    Args:
        zeros_only: of all moments, see :class:`Moments`.
    """

    def __init__(self, *, zeros_only: bool) -> None:
        self._zeros_only = zeros_only
        self._known: dict[tuple[str, bytes], Moments] = {}

    def of(
        self, array: Array, bounds: tuple[float, float] | None, unit_axis: int | None
    ) -> Moments:
        """Return the moments of an array, computed once; they are shared: do not change them."""
        # The hash has 128 bits: two arrays of a run that differ do not share one.
        key = array.dtype.str, xxh3_128_digest(array.ravel(order="K").data)
        # The one that was asked for last stands last.
        known = self._known.pop(key, None)
        if known is None:
            known = Moments(zeros_only=self._zeros_only)
            known.add(array)
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
        self._known[key] = known
        if bounds is None and unit_axis is None:
            return known
        moments = Moments(bounds, unit_axis, zeros_only=self._zeros_only)
        moments.add(array, known)
        return moments


def _unit(largest: float) -> float:
    """Return 1, or a power of two near a number whose square is out of the range of float64."""
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, exponent - 1) if abs(exponent) > 400 else 1.0


def _alive(values: Array, axis: int, zeros: int) -> Array:
    """Return a bool per unit along an axis: True if an element is not zero.

    Args:
        zeros: number of zeros in `values`.
    """
    if values.size and not zeros:
        return np.ones(values.shape[axis], dtype=np.bool_)
    others = tuple(i for i in range(values.ndim) if i != axis)
    alive: Array = (values != 0).any(axis=others)
    return alive


def _saturated(values: Array, bounds: tuple[float, float]) -> int:
    """Count the finite elements within :data:`_NEAR` of a bound or beyond it."""
    low, high = bounds
    width = high - low
    near = _NEAR * (width if math.isfinite(width) else 1.0)
    # In float64, in which the bounds are given.
    values = values.astype(np.float64, copy=False)
    is_near = (values <= low + near) | (values >= high - near)
    return int((is_near & np.isfinite(values)).sum())
