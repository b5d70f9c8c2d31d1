"""Numbers with units, as people read them."""

from __future__ import annotations


def quantity(amount: float, unit: str) -> str:
    """A number for people, in powers of a thousand: ``35.128 GFLOP``, ``86.568 M``."""
    if not amount:
        return f"0 {unit}".rstrip()
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(amount) >= factor:
            return f"{amount / factor:.3f} {prefix}{unit}".rstrip()
    return f"{amount:g} {unit}".rstrip()
