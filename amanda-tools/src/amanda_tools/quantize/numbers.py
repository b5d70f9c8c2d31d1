"""Grids of numbers that tensors are rounded to, and the rounding."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

import amanda
from amanda_tools._values.tensors import Arithmetic, Array, arithmetic_of

FLOATS = {"e4m3": ("float8_e4m3fn", 448.0), "e5m2": ("float8_e5m2", 57344.0)}
"""Type name in the frameworks and largest finite number (OCP 8-bit floating point, 2023)."""


@attrs.frozen
class QuantGrid:
    """Integers from `low` to `high`, or 8-bit floating-point numbers scaled to their largest one.

    Attributes:
        number: int, e4m3 or e5m2.
        low, high: smallest and largest number.
        is_symmetric: the zero point is 0.
    """

    number: str
    low: float
    high: float
    is_symmetric: bool

    @classmethod
    def of(cls, number: str, bits: int, *, symmetric: bool) -> QuantGrid:
        """Make the signed grid of some bits; a symmetric one leaves its lowest number out."""
        if number != "int":
            return cls(number, -FLOATS[number][1], FLOATS[number][1], True)
        high = 2 ** (bits - 1) - 1
        return cls(number, -high if symmetric else -high - 1, high, symmetric)

    @classmethod
    def unsigned(cls, bits: int) -> QuantGrid:
        """Make the grid from 0, for tensors that are never negative."""
        return cls("int", 0, 2**bits - 1, True)

    def fitted(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Return scale and zero point for a range, of one or per channel; zero is always
        representable."""
        low, high = np.minimum(low, 0).astype(np.float64), np.maximum(high, 0).astype(np.float64)
        if self.is_symmetric:
            scale = np.maximum(-low, high) / self.high
        else:
            scale = (high - low) / (self.high - self.low)
        # A range of zeros can have any scale.
        scale = np.where(scale > np.finfo(np.float32).tiny, scale, 1.0).astype(np.float32)
        if self.is_symmetric:
            return scale, np.zeros_like(scale)
        zero = np.clip(np.round(self.low - low / scale), self.low, self.high)
        return scale, zero.astype(np.float32)


def integers(value: Array, scale: Array, zero: Array, grid: QuantGrid) -> Array:
    """Return the integers that stand for values, with NumPy in float32 arithmetic."""
    # As `fake_quantize` computes: a division would round some values differently.
    inverse = np.float32(1) / scale.astype(np.float32)
    rounded: Array = np.round(value.astype(np.float32) * inverse) + zero
    return np.clip(rounded, grid.low, grid.high)


@amanda.traceable
def fake_quantize(tensor: Any, scale: Any, zero: Any, low: float, high: float) -> Any:
    """Instrumentation routine: round to values that integers represent."""
    arithmetic = arithmetic_of(tensor)
    wide = arithmetic.widen(tensor)
    scale, zero = arithmetic.cast_like(scale, wide), arithmetic.cast_like(zero, wide)
    rounded = arithmetic.round(wide * (1 / scale)) + zero
    return arithmetic.cast_like((arithmetic.clip(rounded, low, high) - zero) * scale, tensor)


@amanda.traceable
def fake_float(tensor: Any, scale: Any, number: str) -> Any:
    """Instrumentation routine: round to values that 8-bit floating-point numbers represent."""
    arithmetic = arithmetic_of(tensor)
    dtype, largest = FLOATS[number]
    wide = arithmetic.widen(tensor)
    scale = arithmetic.cast_like(scale, wide)
    scaled = arithmetic.divide(wide, scale)
    rounded = arithmetic.round_trip(arithmetic.clip(scaled, -largest, largest), dtype)
    return arithmetic.cast_like(rounded * scale, tensor)


def dynamic_fit(
    arithmetic: Arithmetic, tensor: Any, grid: QuantGrid, axis: int | None = None
) -> tuple[Any, Any]:
    """Compute :meth:`QuantGrid.fitted` in the framework of a tensor, for its range or for the
    ranges along an axis."""
    low, high = arithmetic.min_max(tensor, axis)
    low, high = arithmetic.clip(low, -np.inf, 0.0), arithmetic.clip(high, 0.0, np.inf)
    if grid.is_symmetric:
        span = arithmetic.divide(arithmetic.where(-low > high, -low, high), grid.high)
    else:
        span = arithmetic.divide(high - low, grid.high - grid.low)
    scale = arithmetic.where(span > float(np.finfo(np.float32).tiny), span, 1.0)
    if grid.is_symmetric:
        return scale, scale * 0
    return scale, arithmetic.clip(arithmetic.round(grid.low - low / scale), grid.low, grid.high)
