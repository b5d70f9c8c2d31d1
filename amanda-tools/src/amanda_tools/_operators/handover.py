"""Hands a value from the routine before an operator to the routine after it."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Handover(Generic[ValueT]):
    """One value per thread, left by a routine before an operator for the routine after it.

    Eager operators run both routines in one thread. TensorFlow's graph executor may run them in
    different threads: then the oldest value that any thread has left is taken.
    """

    def __init__(self) -> None:
        self._held: dict[int, ValueT] = {}

    def leave(self, value: ValueT) -> None:
        """Keep a value for the routine that follows."""
        self._held[threading.get_ident()] = value

    def take(self) -> ValueT | None:
        """Return and forget the value of this thread, else the oldest one; None without any."""
        held = self._held
        thread = threading.get_ident()
        if thread in held:
            return held.pop(thread)
        return held.pop(next(iter(held))) if held else None
