"""Garbage collections of Python, which begin within any operator and count in no operator's time.

::

    collections = Collections()
    collections.begin()
    ...
    pauses = collections.subtract_gc_pauses(records)
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref

import attrs
import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

COLLECTION = -2
"""Number in the records of garbage collections, in place of an operator's number."""


@attrs.frozen
class Collection:
    """A garbage collection of Python.

    Attributes:
        start: nanoseconds since the timeline began.
        duration: nanoseconds.
        thread: native id of the thread.
    """

    start: int
    duration: int
    thread: int


class Collections:
    """The garbage collections of Python, which may begin within any operator.

    Attributes:
        calls: number of the collections that :meth:`subtract_gc_pauses` has seen.
        nanoseconds: their total duration.
    """

    def __init__(self) -> None:
        self.calls = self.nanoseconds = 0
        self._waiting: list[tuple[int, int, int]] = []
        self._started = 0
        # Weakly, for a tool that is given up within a scope.
        self._note = functools.partial(_note_collection, weakref.ref(self))

    def begin(self) -> None:
        """Start recording collections."""
        if self._note not in gc.callbacks:
            gc.callbacks.append(self._note)

    def end(self) -> None:
        """Stop recording collections."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def note(self, phase: str, now: int) -> None:
        """Record the start or stop of a collection; collections do not overlap.

        Args:
            phase: ``start`` or ``stop``, as in callbacks of :mod:`gc`.
            now: ``time.perf_counter_ns()``.
        """
        if phase == "start":
            self._started = now
        elif self._started:
            self._waiting.append((self._started, now, threading.get_native_id()))
            self._started = 0

    def subtract_gc_pauses(self, records: Numbers) -> Numbers:
        """Subtract the collections recorded since the last call from operators around them.

        Args:
            records: number, start, duration and thread of each operator, of shape (n, 4); changed
                in place.

        Returns:
            A record for each collection, in the same form.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return np.zeros((0, 4), np.int64)
        found = np.array(
            [(COLLECTION, start, end - start, thread) for start, end, thread in waiting], np.int64
        ).reshape(-1, 4)
        for _, start, duration, thread in found.tolist():
            is_around = records[:, 3] == thread
            is_around &= records[:, 1] <= start
            is_around &= records[:, 1] + records[:, 2] >= start + duration
            records[is_around, 2] -= duration
            self.nanoseconds += duration
        self.calls += len(found)
        return found


def _note_collection(reference: weakref.ref[Collections], phase: str, _: dict[str, int]) -> None:
    """Note the start or stop of a collection; called by :mod:`gc`."""
    collections = reference()
    if collections is not None:
        collections.note(phase, time.perf_counter_ns())
