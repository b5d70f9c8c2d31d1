"""What is known of a tensor over many executions, without keeping any of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from amanda_tools._values.numerics import Array

_SMALLEST, _LARGEST = -30, 30
"""Powers of two that the histogram tells apart; what is beyond goes into the last bins."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "relu6": (-math.inf, 6.0),
}
"""Types whose outputs saturate, and where."""

_CHUNK = 1 << 16
"""Elements that are looked at together: so many stay in a processor's cache."""

_FIELDS = 1 << 11
"""Exponents that a number of 64 bits may have, as it is stored; 0 is zero, and what is tiny."""

_FIRST, _LAST = 1023 + _SMALLEST, 1023 + _LARGEST
"""Those of the first and the last power of the histogram."""

_NEAR = 0.01
"""How near to a bound a value is saturated, as a share of the distance of the bounds, or of 1."""


@attrs.define(eq=False)
class Moments:
    """Moments, extremes, zeros, saturation, dead units and a histogram, merged exactly.

    The mean and the variance are merged as Chan, Golub and LeVeque (1979) do, so that no
    sum of squares is formed.

    Attributes:
        bounds: where the values saturate, None if they do not.
        unit_axis: which axis counts units, None to look for no dead ones.
        executions: tensors that were seen.
        elements: their elements; the finite ones enter mean, deviation, extremes, histogram.
        zeros, nan, inf, saturated: how many elements are so.
        mean: of the finite elements.
        minimum, maximum: of the finite elements.
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
        """One more execution's values."""
        values = array.astype(np.float64, copy=False)
        is_finite = np.isfinite(values)
        self.executions += 1
        self.elements += values.size
        zeros = values.size - int(np.count_nonzero(values))
        self.zeros += zeros
        if is_finite.all():
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
            others = tuple(i for i in range(values.ndim) if i != self.unit_axis)
            self._note_alive((values != 0).any(axis=others))

    def merge(self, other: Moments) -> None:
        """All executions that another one has seen, with the same bounds and axis."""
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
        fields = np.zeros(2 * _FIELDS, np.int64)
        for start in range(0, finite.size, _CHUNK):
            chunk = finite[start : start + _CHUNK]
            mean = float(chunk.mean())
            self._combine(chunk.size, mean, float(np.square(chunk - mean).sum()))
            self.minimum = min(self.minimum, float(chunk.min()))
            self.maximum = max(self.maximum, float(chunk.max()))
            # Sign and exponent are the first bits of a number.
            first = (chunk.view(np.int64) >> 52) & (2 * _FIELDS - 1)
            fields += np.bincount(first, minlength=fields.size)
        by_sign = fields.reshape(2, _FIELDS)[::-1]
        self._bins[:, 0] += by_sign[:, 1 : _FIRST + 1].sum(axis=1)
        self._bins[:, 1:-1] += by_sign[:, _FIRST + 1 : _LAST]
        self._bins[:, -1] += by_sign[:, _LAST:].sum(axis=1)
        if by_sign[:, 0].sum() > zeros:
            tiny = finite[np.abs(finite) < np.finfo(np.float64).tiny]
            self._bins[:, 0] += [(tiny < 0).sum(), (tiny > 0).sum()]

    def _combine(self, count: int, mean: float, squares: float) -> None:
        total = self._finite + count
        shift = mean - self.mean
        self._squares += squares + shift * shift * self._finite * count / total
        self.mean += shift * count / total
        self._finite = total

    def _note_alive(self, alive: Array) -> None:
        if self._alive is None or self._alive.shape != alive.shape:
            self._alive = alive
        else:
            self._alive |= alive

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite elements, of all as one population."""
        return math.sqrt(self._squares / self._finite) if self._finite else math.nan

    @property
    def sparsity(self) -> float:
        """The share of the elements that are zero."""
        return self.zeros / self.elements if self.elements else 0.0

    def histogram(self) -> list[list[float]]:
        """``[low, high, count]`` of the powers of two that occur, from the lowest; zeros are
        one bin ``[0, 0, count]``, and the outermost powers hold what lies beyond."""
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
        """The figures as plain data; null where there is none."""
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


def _saturated(finite: Array, bounds: tuple[float, float]) -> int:
    low, high = bounds
    width = high - low
    near = _NEAR * (width if math.isfinite(width) else 1.0)
    return int(((finite <= low + near) | (finite >= high - near)).sum())
