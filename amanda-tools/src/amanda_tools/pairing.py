"""What a routine before an operator leaves for the routine after it."""

from __future__ import annotations

from typing import TypeVar

HeldT = TypeVar("HeldT")


def left_elsewhere(held: dict[int, HeldT]) -> HeldT | None:
    """What was left by another thread than the one that asks, the oldest; None if nothing was.

    Both routines run in the operator's thread where operators run at once. What executes a
    graph may run the two in different threads.

    Args:
        held: thread's number to what its routine left; the entry is removed.
    """
    return held.pop(next(iter(held))) if held else None
