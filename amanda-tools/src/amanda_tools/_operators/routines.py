"""Pairs of routines around an operator: inserting them, and handing a value from one to the other.

::

    handover = Handover[int]()
    insert_before(context, lambda: handover.leave(time.perf_counter_ns()))
    insert_after(context, lambda: print(time.perf_counter_ns() - handover.take()))
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from amanda import OpContext

ValueT = TypeVar("ValueT")


def insert_before(context: OpContext, routine: Callable[[], Any]) -> None:
    """Insert a routine without tensors before a forward or backward operator."""
    if context.is_forward():
        context.insert_before_op(routine, inputs=[])
    else:
        context.insert_before_backward_op(routine, grad_outputs=[])


def insert_after(context: OpContext, routine: Callable[[], Any]) -> None:
    """Insert a routine without tensors after a forward or backward operator."""
    if context.is_forward():
        context.insert_after_op(routine, outputs=[])
    else:
        context.insert_after_backward_op(routine, grad_inputs=[])


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
