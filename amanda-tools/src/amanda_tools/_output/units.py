"""Numbers with units, formatted for people.

``format_short(35_128_000_000, "FLOP")`` is ``35.1 GFLOP``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))

_ROUNDED_UP = 0.9995
"""Numbers from this multiple of a prefix on are shown with it: they round to 1.00 of it."""


def format_short(amount: float, unit: str) -> str:
    """Format with three digits and a prefix: ``1.23 GFLOP``, ``4.5 µs``, ``12 %``.

    Only seconds get prefixes of small numbers.
    """
    if not math.isfinite(amount):
        return f"{amount} {unit}".rstrip()
    if unit != "%" and amount:
        for factor, prefix in (*_LARGE, (1.0, ""), *(_SMALL if unit == "s" else ())):
            if abs(amount) >= factor * _ROUNDED_UP:
                value = amount / factor
                digits = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
                return f"{digits} {prefix}{unit}".rstrip()
    return f"{amount:.3g} {unit}".rstrip()


def share_text(part: float, total: float) -> str:
    """Format a share: ``12.5 %``; "-" of nothing."""
    return f"{100 * part / total:.1f} %" if total else "-"


def whole_text(part: str, tensor: Mapping[str, Any], text_of: Callable[[Any], str]) -> str:
    """Format the shape of a tensor with that of the distributed tensor that it is a part of.

    Args:
        part: the shape of the part.
        tensor: the tensor as results have it.
        text_of: formats a shape.

    Returns:
        ``64x128 of 128x128 Shard(0)``; `part` for a tensor that is not distributed.
    """
    if "placement" not in tensor:
        return part
    return f"{part} of {text_of(tensor['global_shape'])} {tensor['placement']}"
