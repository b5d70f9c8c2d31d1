"""Garbage collections of Python, which begin within any operator and count in no operator's time.

::

    collections = Collections()
    collections.begin()
    ...
    collections.subtract_gc_pauses(records)
    pauses = collections.take_new()
"""

from __future__ import annotations

import array
import bisect
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
        calls: number of the collections that :meth:`take_new` has given.
        nanoseconds: their total duration.
    """

    def __init__(self) -> None:
        self.calls = self.nanoseconds = 0
        # Start, end and thread of each one, in the order of time. All are kept, 24 bytes each: an
        # operator is recorded when it ends, those of TensorFlow's graphs when the scope ends.
        self._noted = array.array("q")
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
            self._noted.extend((self._started, now, threading.get_native_id()))
            self._started = 0

    def subtract_gc_pauses(self, records: Numbers) -> None:
        """Subtract the collections within operators from their durations.

        Args:
            records: number, start, duration and thread of each operator, of shape (n, 4); changed
                in place.
        """
        if not len(records):
            return
        count, earliest = len(self._noted) // 3, int(records[:, 1].min())
        found = self._since(bisect.bisect_left(range(count), earliest, key=self._start))
        for thread in np.unique(found[:, 2]):
            starts, ends, _ = found[found[:, 2] == thread].T
            sums = np.concatenate(([0], np.cumsum(ends - starts)))
            mine = records[:, 3] == thread
            begins, durations = records[mine, 1], records[mine, 2]
            first = np.searchsorted(starts, begins)
            last = np.searchsorted(ends, begins + durations, "right")
            # A collection may run code of the program: operators within it, with first > last.
            records[mine, 2] -= np.maximum(sums[last] - sums[first], 0)

    def take_new(self) -> Numbers:
        """Return a record for each collection since the last call, in the form of operators."""
        starts, ends, threads = self._since(self.calls).T
        numbers, durations = np.full_like(starts, COLLECTION), ends - starts
        self.calls += len(starts)
        self.nanoseconds += int(durations.sum())
        return np.stack((numbers, starts, durations, threads), axis=1)

    def _start(self, number: int) -> int:
        return self._noted[3 * number]

    def _since(self, number: int) -> Numbers:
        """Start, end and thread of the collections from a number on."""
        # A slice is a copy: an array with an exported buffer cannot grow.
        return np.frombuffer(self._noted[3 * number :], np.int64).reshape(-1, 3)


def _note_collection(reference: weakref.ref[Collections], phase: str, _: dict[str, int]) -> None:
    """Note the start or stop of a collection; called by :mod:`gc`."""
    collections = reference()
    if collections is not None:
        collections.note(phase, time.perf_counter_ns())
