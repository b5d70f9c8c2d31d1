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
"""Nanoseconds beside the processor from which on the thread has not had it."""


_MOST = 1000
"""Executions of an operator that are kept."""


@attrs.define
class Work:
    """The executions of an operator.

    Attributes:
        calls: their number.
        nanoseconds: the sum of their durations.
        processor: times of the processor, of the first ones.
        beside: the rest of the durations, of those to which the processor was left.
    """

    calls: int = 0
    nanoseconds: int = 0
    processor: list[int] = attrs.field(factory=list)
    beside: list[int] = attrs.field(factory=list)

    def add(self, other: Work) -> None:
        """Add executions."""
        self.calls += other.calls
        self.nanoseconds += other.nanoseconds
        if len(self.processor) < _MOST:
            self.processor += other.processor
            self.beside += other.beside

    @property
    def usual(self) -> float:
        """The nanoseconds of an execution: the mean of the faster half."""
        return _mean_of_least(self.processor) + _mean_of_least(self.beside)


def _mean_of_least(times: list[int]) -> float:
    kept = sorted(times)[: (len(times) + 1) // 2]
    return sum(kept) / len(kept) if kept else 0.0


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
        self._interrupted: set[int] = set()

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
            if number in self._interrupted:
                # The question after it is then about this execution only.
                self._was_switched()
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
            if self._sync:
                processor = duration
            beside = duration - processor
            work = Work(1, duration, [processor], [0])
            if beside > _NOTICEABLE:
                self._interrupted.add(number)
                work.beside = [] if self._was_switched() else [beside]
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
        for number, work in list(step.items()):  # other threads may add
            self._window.setdefault(number, Work()).add(work)

    def take(self) -> Mapping[int, Work]:
        """Return the window by the number of the operator, and begin another one."""
        window, self._window = self._window, {}
        return window
