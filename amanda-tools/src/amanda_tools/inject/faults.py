"""Draws faults: which elements of a tensor, and their new values. All randomness is NumPy's."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda_tools._values.tensors import Arithmetic, Array, arithmetic_of
from amanda_tools.inject.options import InjectOptions


@attrs.frozen
class Fault:
    """One element that was changed.

    Attributes:
        op: id of the operator.
        execution: number of the operator's execution, from 0.
        position: of the element in the flattened tensor.
        bit: the bit that was changed; None for faults that change the whole number.
        before, after: value of the element.
    """

    op: str
    execution: int
    position: int
    bit: int | None
    before: float
    after: float


def make_generator(*keys: int | str) -> np.random.Generator:
    """Make a random generator from these keys alone: equal on every machine."""
    # Not hash(), which differs from process to process.
    # A name may hold what UTF-8 lacks.
    texts = [k.encode("utf-8", "backslashreplace") if isinstance(k, str) else k for k in keys]
    numbers = [zlib.crc32(key) if isinstance(key, bytes) else key for key in texts]
    return np.random.default_rng(numbers)


def draw_positions(options: InjectOptions, size: int, random: np.random.Generator) -> Array:
    """Draw the positions of the elements that are hit, in ascending order."""
    rate = options.rate
    count = options.count if rate is None else random.binomial(size, rate)
    # Sorted: the values of value-changing faults are drawn in this order.
    return np.sort(random.choice(size, min(count, size), replace=False, shuffle=False))


def draw_execution(
    sizes: Mapping[tuple[str, int], int], random: np.random.Generator
) -> tuple[str, int]:
    """Draw an (op id, execution) pair with probability proportional to its number of elements."""
    ends = np.cumsum(list(sizes.values()))
    chosen = np.searchsorted(ends, random.integers(0, ends[-1]), side="right")
    return list(sizes)[int(chosen)]


def inject_faults(
    options: InjectOptions, tensor: Any, positions: Array, random: np.random.Generator
) -> tuple[Any, Sequence[tuple[int, int | None, float, float]]]:
    """Put faults into a copy of a tensor.

    Returns:
        The copy, and for each fault position, bit, value before and after.

    Raises:
        TypeError: the elements are neither real floating-point numbers nor integers.
    """
    arithmetic = arithmetic_of(tensor)
    before = arithmetic.bits(tensor, positions)
    if options.fault in ("bitflip", "stuck0", "stuck1"):
        bits: Sequence[int | None] = _draw_bits(options, before, random)
        after = _changed_bits(options.fault, before, np.array(bits, before.dtype))
    else:
        bits = [None] * len(positions)
        after = _changed_values(options, arithmetic, tensor, before, random)
    values = [arithmetic.from_bits(found, tensor).tolist() for found in (before, after)]
    changes = list(zip(positions.tolist(), bits, *values, strict=True))
    return arithmetic.with_bits(tensor, positions, after), changes


def _draw_bits(options: InjectOptions, before: Array, random: np.random.Generator) -> list[int]:
    width = 8 * before.dtype.itemsize
    drawn: list[int] = random.integers(0, width, len(before)).tolist()
    # In a narrower type its highest bit stands for bits that it does not have.
    return drawn if options.bit < 0 else [min(options.bit, width - 1)] * len(before)


def _changed_bits(fault: str, before: Array, bits: Array) -> Array:
    masks = np.left_shift(np.ones_like(before), bits)
    if fault == "bitflip":
        return before ^ masks
    return before & ~masks if fault == "stuck0" else before | masks


def _changed_values(
    options: InjectOptions,
    arithmetic: Arithmetic,
    tensor: Any,
    before: Array,
    random: np.random.Generator,
) -> Array:
    count = len(before)
    if options.fault == "value":
        values = np.full(count, options.value)
    elif options.fault == "uniform":
        values = random.uniform(options.low, options.high, count)
    else:
        noise = random.normal(0, options.std, count)
        values = arithmetic.from_bits(before, tensor) + noise
    return arithmetic.to_bits(values, tensor)
