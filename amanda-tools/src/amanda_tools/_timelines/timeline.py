"""When each operator ran: spans, streamed to disk while the program runs.

In a tool::

    self.timeline = Timeline(limit=1000)
    self.add_inst_for_op(self.timeline.watch)
    self.add_inst_for_op(self.timeline.watch, backward=True)

    self.add_inst_for_op(self.timeline.watch_outputs, require_outputs=True)
    self.add_inst_for_op(self.timeline.watch_outputs, backward=True, require_outputs=True)
    ...
    self.timeline.close()               # in exit_scope()

Operators of TensorFlow's graphs are timed by its runtime and not by routines, because the executor
may run other operators between two routines. Afterwards ``timeline.totals()`` has the sums by
operator id, ``timeline.records()`` the spans.
"""

from __future__ import annotations

import array
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

import attrs
import numpy as np
import numpy.typing as npt

from amanda import OpContext
from amanda.driver import Driver
from amanda.inline import Log, Timer
from amanda.tools.description import OpDescription, describe
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._timelines.graph_times import GraphTimes

Numbers = npt.NDArray[np.int64]

_WAITING = 4 * 1024
"""Numbers in the list of recent records, four per record, that trigger counting them."""

_BUFFERED = 4 * 4096
"""Numbers in the buffer of counted records that trigger writing them to disk."""

_PAUSE = 16_000_000
"""Nanoseconds between two looks at the list of recent records."""


@attrs.frozen
class TimelineSpan:
    """One execution of an operator.

    Attributes:
        op: the operator.
        start: nanoseconds since the timeline began.
        duration: nanoseconds between the routines before and after the operator; of an operator of
            TensorFlow's graphs, those of its kernel, without kernels within it.
        thread: native id of the thread.
    """

    op: OpDescription
    start: int
    duration: int
    thread: int

    @property
    def end(self) -> int:
        """Nanoseconds since the timeline began."""
        return self.start + self.duration


@attrs.define
class Total:
    """Sums over the executions of one operator.

    Attributes:
        calls: number of executions.
        nanoseconds: their total duration.
        longest, shortest: duration of one execution, in nanoseconds.
    """

    calls: int = 0
    nanoseconds: int = 0
    longest: int = 0
    shortest: int = 1 << 62

    @property
    def seconds(self) -> float:
        """Total duration in seconds."""
        return self.nanoseconds / 1e9


@attrs.frozen(kw_only=True)
class Stretch:
    """A part of a timeline.

    Attributes:
        totals: sums by operator id.
        spans: its spans, in the order in which they began.
        begin: nanoseconds since the timeline began.
    """

    totals: Mapping[str, Total]
    spans: Sequence[TimelineSpan]
    begin: int


class Sums:
    """Totals of all operators, by their numbers; many executions are added at once."""

    def __init__(self) -> None:
        self._columns = self._rows(0)

    @staticmethod
    def _rows(count: int) -> list[Numbers]:
        empty = Total()
        first = (empty.calls, empty.nanoseconds, empty.longest, empty.shortest)
        return [np.full(count, value, np.int64) for value in first]

    def add(self, numbers: Numbers, durations: Numbers) -> None:
        """Add executions: `numbers` of operators and `durations` in nanoseconds, of equal
        length."""
        missing = int(numbers.max(initial=-1)) + 1 - len(self._columns[0])
        if missing > 0:
            more = self._rows(missing + len(self._columns[0]))
            pairs = zip(self._columns, more, strict=True)
            self._columns = [np.concatenate(pair) for pair in pairs]
        calls, nanoseconds, longest, shortest = self._columns
        # Not calls[numbers] += 1, which counts an operator that occurs several times once.
        np.add.at(calls, numbers, 1)
        np.add.at(nanoseconds, numbers, durations)
        np.maximum.at(longest, numbers, durations)
        np.minimum.at(shortest, numbers, durations)

    def copies(self) -> dict[str, Sequence[int]]:
        """Return the calls and the nanoseconds, by operator number."""
        calls, nanoseconds, *_ = self._columns
        return {"calls": calls.tolist(), "nanoseconds": nanoseconds.tolist()}

    def totals(self) -> list[Total]:
        """Return the totals by operator number, up to the highest number that was added."""
        rows = zip(*(column.tolist() for column in self._columns), strict=True)
        return [Total(*row) for row in rows]


class Timeline(Log):
    """The spans of all executions, up to a limit, in a temporary file.

    A span lies between two instrumentation routines, so it contains the cost of instrumenting this
    one operator, and a garbage collection of Python that begins there. Operators of a device that
    works asynchronously show the time of their launch. The timeline's own memory does not grow with
    the number of executions.

    Args:
        limit: spans to keep; later ones are counted only.
        synchronize: called before each look at the clock, to wait for a device; None for no call.
    """

    def __init__(self, limit: int, *, synchronize: Callable[[], None] | None = None) -> None:
        super().__init__(due=0)
        self._synchronize = synchronize
        self._kept = 0
        self._dropped = 0
        self._ops: list[OpDescription] = []
        self._numbers: dict[str, int] = {}
        self._sums = Sums()
        self._limit = limit
        # `numbers` has recent records as timers leave them: number of the operator, start, end,
        # thread.
        self._buffer = array.array("q")
        self._file: IO[bytes] | None = None
        self._is_lost = False
        self._graphs = GraphTimes()
        self._began = time.perf_counter_ns()

    # -- recording --------------------------------------------------------

    def begin(self, drivers: Iterable[Driver]) -> None:
        """Start watching the program's use of TensorFlow's profiler.

        To be called in ``enter_scope()``, any number of times.

        Args:
            drivers: drivers that the scope begins to use.
        """
        if any(driver.namespace.tags[0] == "tensorflow" for driver in drivers):
            self._graphs.watch()

    def watch(self, context: OpContext) -> None:
        """Insert the routines that time an operator; to be called in an analysis before it."""
        op = describe(context)
        number = self._numbers.setdefault(op.id, len(self._ops))
        if number == len(self._ops):
            self._ops.append(op)
        if self._graphs.measures(context):
            self._graphs.begin()
            return
        start, stop = self._routines(number)
        insert_before(context, start)
        insert_after(context, stop)

    def watch_outputs(self, context: OpContext) -> None:
        """Record the names that the runtime has for an operator; to be called in an analysis after
        it."""
        if self._graphs.measures(context):
            self._graphs.names.note(context, describe(context))

    def close(self) -> None:
        """Add the times of operators of graphs; to be called when the scope has ended."""
        for op_id, begin, duration, thread in self._graphs.end():
            number = self._numbers.get(op_id)
            if number is not None:
                self.numbers.extend((number, begin, begin + duration, thread))
                if len(self.numbers) >= _WAITING:
                    self._take()

    def _routines(self, number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Make the routines before and after one operator."""
        timer, synchronize = Timer(self, number), self._synchronize
        if synchronize is None:
            return timer.start, timer.stop

        def synchronized_start() -> None:
            synchronize()
            timer.start()

        def synchronized_stop() -> None:
            synchronize()
            timer.stop()

        return synchronized_start, synchronized_stop

    def look(self, now: int) -> None:
        """Do the occasional work between executions: count recent records."""
        self.due = now + _PAUSE
        if len(self.numbers) >= _WAITING:
            self._take()

    def _take(self) -> None:
        """Count recent records; move those within the limit to the buffer."""
        waiting = self.numbers
        count = len(waiting)
        # A copy: an array with an exported buffer cannot grow, and other threads append meanwhile.
        taken = waiting[:count]
        # Other threads may have appended more.
        del waiting[:count]
        records = np.frombuffer(taken, np.int64).reshape(-1, 4)
        records[:, 2] -= records[:, 1]
        records[:, 1] -= self._began
        self._sums.add(records[:, 0], records[:, 2])
        remaining = 0 if self._is_lost else self._limit - self._kept
        if remaining:
            self._buffer.frombytes(records[:remaining].tobytes())
        self._kept += min(len(records), remaining)
        self._dropped += max(0, len(records) - remaining)
        if len(self._buffer) >= _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        """Write the buffer to the temporary file; if the disk is full, drop it and all later
        records."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="amanda-timeline-")  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.write(self._buffer)
            # Without this a forked child would write its copy of the file object's buffer once
            # more.
            self._file.flush()
        except OSError:
            # The program continues; the rest of its timeline is lost, and counted as dropped.
            lost = len(self._buffer) // 4
            self._is_lost = True
            self._kept -= lost
            self._dropped += lost
        del self._buffer[:]

    # -- reading ----------------------------------------------------------

    @property
    def keeps_all(self) -> bool:
        """True if the spans of all executions have been kept so far."""
        return self._kept + len(self.numbers) // 4 <= self._limit and not self._dropped

    def sums(self) -> dict[str, Sequence[int]]:
        """Return ``calls`` and ``nanoseconds`` of all operators so far, in the order of
        :attr:`op_ids`."""
        self._take()
        return self._sums.copies()

    @property
    def op_ids(self) -> Sequence[str]:
        """The operators that are watched, in the order in which they came."""
        return list(self._numbers)

    @property
    def kept(self) -> int:
        """Number of spans kept."""
        self._take()
        return self._kept

    @property
    def dropped(self) -> int:
        """Number of spans not kept: beyond the limit, or the disk was full."""
        self._take()
        return self._dropped

    def records(self) -> Iterator[TimelineSpan]:
        """Yield the spans kept in the order in which they ended, reading from disk."""
        for part in self._parts():
            yield from self._parsed(part)

    def _parts(self) -> Iterator[array.array[int]]:
        """Yield the kept numbers in parts, reading from disk."""
        self._take()
        if self._file is not None:
            self._file.flush()
            self._file.seek(0)
            while chunk := self._file.read(_BUFFERED * self._buffer.itemsize):
                part = array.array("q")
                part.frombytes(chunk[: len(chunk) - len(chunk) % 32])
                yield part
            self._file.seek(0, 2)
        # A copy: the buffer cannot grow while it is exported.
        yield self._buffer[:]

    def _parsed(self, numbers: array.array[int]) -> Iterator[TimelineSpan]:
        for i in range(0, len(numbers), 4):
            number, *times = numbers[i : i + 4]
            yield TimelineSpan(self._ops[number], *times)

    def between(self, begin: float, end: float) -> Stretch | None:
        """Return the spans that began in a part of the run; None if not all of them were kept.

        Args:
            begin, end: seconds of ``time.perf_counter``.
        """
        if not self._limit or self.dropped:
            return None
        first, last = (round(moment * 1e9) - self._began for moment in (begin, end))
        found = [np.zeros((0, 4), np.int64)]
        for part in self._parts():
            records = np.frombuffer(part, np.int64).reshape(-1, 4)
            found.append(records[(records[:, 1] >= first) & (records[:, 1] < last)])
        spans = np.concatenate(found)
        sums = Sums()
        sums.add(spans[:, 0], spans[:, 2])
        pairs = zip(self._ops, sums.totals(), strict=False)
        ordered = array.array("q", spans[np.argsort(spans[:, 1], kind="stable")].tobytes())
        return Stretch(
            totals={op.id: total for op, total in pairs if total.calls},
            spans=list(self._parsed(ordered)),
            begin=first,
        )

    @property
    def spans(self) -> list[TimelineSpan]:
        """All spans kept, in the order in which they ended."""
        return list(self.records())

    def seconds(self) -> dict[str, float]:
        """Return the total duration in seconds by operator id, of spans that were not kept too."""
        return {op_id: total.seconds for op_id, total in self.totals().items()}

    def totals(self) -> dict[str, Total]:
        """Return the sums by operator id, of spans that were not kept too."""
        self._take()
        # The last operators may have no finished execution, and then no sums.
        pairs = zip(self._ops, self._sums.totals(), strict=False)
        return {op.id: total for op, total in pairs if total.calls}
