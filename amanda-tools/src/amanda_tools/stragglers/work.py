"""The work of operators: their time without what other processes of a busy machine take of it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from amanda_tools._timelines.memory import synchronize

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # Windows, macOS
    getrusage = None  # type: ignore[assignment]

_NOTICEABLE = 20_000
"""Nanoseconds beside the processor that may be a switch to another thread."""


_NONE = 1 << 62


@attrs.define
class Work:
    """The executions of an operator.

    Attributes:
        calls: their number.
        nanoseconds: the sum of their durations.
        shortest: the shortest duration of those to which the processor was left.
        processor: the shortest time of the processor.
    """

    calls: int = 0
    nanoseconds: int = 0
    shortest: int = _NONE
    processor: int = _NONE

    def add(self, other: Work) -> None:
        """Add executions."""
        self.calls += other.calls
        self.nanoseconds += other.nanoseconds
        self.shortest = min(self.shortest, other.shortest)
        self.processor = min(self.processor, other.processor)

    @property
    def least(self) -> int:
        """The work of an execution, in nanoseconds."""
        return self.processor if self.shortest == _NONE else self.shortest


class Stopwatch:
    """Times operators by routines before and after them.

    The operating system may give the processor to another thread meanwhile; a thread that sleeps or
    waits gives it up by itself, which is work of the operator.

    Args:
        sync: wait for CUDA devices before reading the clock, and take durations.

    Attributes:
        waiting: numbers of operators that have waited for other processes, in themselves or in an
            operator within them.
    """

    def __init__(self, *, sync: bool) -> None:
        self.waiting: set[int] = set()
        self._sync = sync
        self._step: dict[int, Work] = {}
        self._window: dict[int, Work] = {}
        self._running: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)
        self._switches: dict[int, int] = {}

    def routines(
        self, number: int, *, waits: bool
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Make the routines before and after an operator.

        Args:
            number: of the operator.
            waits: whether its time is that of other processes.
        """

        def start() -> None:
            if self._sync:
                synchronize()
            running = self._running[threading.get_ident()]
            running.append((number, time.perf_counter_ns(), time.thread_time_ns()))

        def stop() -> None:
            if self._sync:
                synchronize()
            end, end_of_work = time.perf_counter_ns(), time.thread_time_ns()
            running = self._running[threading.get_ident()]
            # Operators that have raised are still there.
            while running:
                other, began, began_work = running.pop()
                if other == number:
                    break
            else:
                return
            if waits:
                self.waiting.update((number, *(each[0] for each in running)))
            duration, processor = end - began, end_of_work - began_work
            is_beside = duration - processor > _NOTICEABLE
            is_kept = self._sync or not (is_beside and self._was_switched())
            work = Work(1, duration, duration if is_kept else _NONE, processor)
            self._step.setdefault(number, Work()).add(work)

        return start, stop

    def _was_switched(self) -> bool:
        """True if the system may have taken the processor since this was called the last time."""
        if getrusage is None:
            return True
        thread, now = threading.get_ident(), getrusage(RUSAGE_THREAD).ru_nivcsw
        before, self._switches[thread] = self._switches.get(thread), now
        return now != before

    def drop(self) -> None:
        """Forget executions since the last step."""
        self._step = {}

    def end_step(self) -> None:
        """Add the executions since the last step to the window."""
        step, self._step = self._step, {}
        self._running.clear()  # of operators that have raised
        for number, work in step.items():
            self._window.setdefault(number, Work()).add(work)

    def take(self) -> Mapping[int, Work]:
        """Return the window by the number of the operator, and begin another one."""
        window, self._window = self._window, {}
        return window
