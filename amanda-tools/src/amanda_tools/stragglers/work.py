"""The work of operators: their time without what other processes of a busy machine take of it."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from amanda_tools._timelines.memory import synchronize

_NOTICEABLE = 20_000
"""Nanoseconds beside the processor from which on the thread may have been waiting for it."""

SCHEDSTAT = "/proc/thread-self/schedstat"
"""Nanoseconds on a processor, nanoseconds of waiting for one, and times it was given one."""

_MOST = 1000
"""Executions of an operator that are kept."""


@attrs.define
class Work:
    """The executions of an operator.

    Attributes:
        calls: their number.
        nanoseconds: the sum of their durations.
        times: the nanoseconds of work in each of the first ones.
    """

    calls: int = 0
    nanoseconds: int = 0
    times: list[int] = attrs.field(factory=list)

    def add(self, duration: int, time: int | None) -> None:
        """Add an execution of so many nanoseconds; `time` is that of its work, if it is known."""
        self.calls += 1
        self.nanoseconds += duration
        if time is not None and len(self.times) < _MOST:
            self.times.append(time)

    def add_all(self, other: Work) -> None:
        """Add other executions."""
        self.calls += other.calls
        self.nanoseconds += other.nanoseconds
        if len(self.times) < _MOST:
            self.times += other.times

    @property
    def usual(self) -> float:
        """The nanoseconds of an execution: the mean of the faster half; NaN if there is none."""
        kept = sorted(self.times)[: (len(self.times) + 1) // 2]
        return sum(kept) / len(kept) if kept else float("nan")


class Stopwatch:
    """Times operators by routines before and after them.

    The operating system may give the processor to another thread meanwhile, and Linux tells for how
    long (:data:`SCHEDSTAT`). That a thread sleeps or waits by itself is work of the operator. Other
    systems tell the time of the processor only.

    Args:
        sync: wait for CUDA devices before reading the clock.

    Attributes:
        waiting: numbers of operators that have waited for other processes, in themselves or in an
            operator within them.
    """

    def __init__(self, *, sync: bool) -> None:
        self.waiting: set[int] = set()
        self._sync = sync
        self._step: dict[int, Work] = {}
        self._window: dict[int, Work] = {}
        self._running: dict[int, list[tuple[int, int | None, int, int]]] = collections.defaultdict(
            list
        )
        # By process, since a forked child has other threads, and by thread.
        self._files: dict[tuple[int, int], int] = {}
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
            delay = self._delay() if number in self._interrupted else None
            running = self._running[threading.get_ident()]
            running.append((number, delay, time.perf_counter_ns(), time.thread_time_ns()))

        def stop() -> None:
            if self._sync:
                synchronize()
            end, end_of_work = time.perf_counter_ns(), time.thread_time_ns()
            running = self._running[threading.get_ident()]
            # Operators that have raised are still there.
            while running:
                other, delay, began, began_work = running.pop()
                if other == number:
                    break
            else:
                return
            if waits:
                self.waiting.update((number, *(each[0] for each in running)))
            duration, processor = end - began, end_of_work - began_work
            work: int | None = duration
            if duration - processor > _NOTICEABLE:
                # Its next execution asks before it, too; what this one has waited is not known.
                self._interrupted.add(number)
                if (delayed := self._delay()) is None:
                    work = duration if self._sync else processor
                elif delay is None:
                    work = None
                else:
                    # It may have waited between reading the delay and the clocks, too.
                    work = max(processor, duration - (delayed - delay))
            step = self._step
            (step.get(number) or step.setdefault(number, Work())).add(duration, work)

        return start, stop

    def _delay(self) -> int | None:
        """Return the nanoseconds for which this thread has waited for a processor, or None."""
        thread = os.getpid(), threading.get_ident()
        for _ in range(2):
            try:
                if thread not in self._files:
                    self._files[thread] = os.open(SCHEDSTAT, os.O_RDONLY)
                return int(os.pread(self._files[thread], 64, 0).split()[1])
            except ProcessLookupError:
                # Of a thread that has ended; its identifier is used again.
                os.close(self._files.pop(thread))
            except (OSError, IndexError, ValueError):
                # There is no such file, or a daemon has closed all files of its process.
                self._files.pop(thread, None)
                break
        return None

    def close(self) -> None:
        """Close the files of the threads."""
        while self._files:
            with contextlib.suppress(OSError):  # a daemon has closed it
                os.close(self._files.popitem()[1])

    def drop(self) -> None:
        """Forget executions since the last step."""
        self._step = {}

    def end_step(self) -> None:
        """Add the executions since the last step to the window."""
        step, self._step = self._step, {}
        self._running.clear()  # of operators that have raised
        for number, work in list(step.items()):  # other threads may add
            self._window.setdefault(number, Work()).add_all(work)

    def take(self) -> Mapping[int, Work]:
        """Return the window by the number of the operator, and begin another one."""
        window, self._window = self._window, {}
        return window
