"""Ranges of tensors: of weights at once, of activations over a calibration."""

from __future__ import annotations

import numpy as np

from amanda_tools._values.tensors import Array
from amanda_tools.quantize.numbers import QuantGrid, integers
from amanda_tools.quantize.options import QuantizeOptions

SAMPLES = 2**18
"""Elements per execution that the observers percentile and mse look at, evenly spaced."""

_SHRINKS = np.linspace(1.0, 0.2, 81)
"""Fractions of the full range from which observer=mse chooses."""


class RangeObserver:
    """Collects activations, and gives their range; with smoothing after a division of channels,
    which are on the last axis."""

    def __init__(self, options: QuantizeOptions) -> None:
        self._options = options
        self._low, self._high = np.zeros(1, np.float32), np.zeros(1, np.float32)
        self._samples: list[Array] = []

    def observe(self, value: Array) -> None:
        """Add the activations of one execution; elements that are not finite do not count."""
        rows = value.reshape(-1, value.shape[-1] if self._options.smooth else 1)
        rows = rows[np.isfinite(rows).all(1)].astype(np.float32)
        if rows.size == 0:
            return
        self._low = np.minimum(self._low, rows.min(0))
        self._high = np.maximum(self._high, rows.max(0))
        if self._options.observer != "minmax":
            # Evenly spaced, not random: the result must not depend on a seed.
            stride = -(-rows.size // SAMPLES)
            self._samples.append(rows[::stride])

    def range(self, grid: QuantGrid, factors: Array | float = 1.0) -> tuple[Array, Array]:
        """Return the range of everything observed.

        Args:
            grid: the numbers.
            factors: by which each channel is divided.
        """
        if not self._samples:
            return (self._low / factors).min(), (self._high / factors).max()
        rows = (np.concatenate(self._samples) / factors).reshape(1, -1)
        low, high = range_of(rows, self._options, grid)
        self._samples.clear()
        return low[0], high[0]


def range_of(rows: Array, options: QuantizeOptions, grid: QuantGrid) -> tuple[Array, Array]:
    """Return the range of each row, as the option observer defines it."""
    low, high = np.minimum(rows.min(1), 0), np.maximum(rows.max(1), 0)
    if options.observer == "percentile":
        return _percentiles(rows, options.percentile, grid)
    return _least_error(rows, low, high, grid) if options.observer == "mse" else (low, high)


def _percentiles(rows: Array, percentile: float, grid: QuantGrid) -> tuple[Array, Array]:
    if grid.is_symmetric:
        high = np.percentile(np.abs(rows), percentile, axis=1)
        return -high, high
    low, high = np.percentile(rows, [100 - percentile, percentile], axis=1)
    return np.minimum(low, 0), np.maximum(high, 0)


def _least_error(rows: Array, low: Array, high: Array, grid: QuantGrid) -> tuple[Array, Array]:
    """For each row, return the fraction of the full range with the least squared rounding error."""
    errors = []
    for share in _SHRINKS:
        scale, zero = (part[:, None] for part in grid.fitted(low * share, high * share))
        rounded = (integers(rows, scale, zero, grid) - zero) * scale
        errors.append(np.square(rows - rounded, dtype=np.float64).sum(1))
    best = _SHRINKS[np.argmin(errors, axis=0)]
    return low * best, high * best
