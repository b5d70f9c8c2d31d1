"""When each operator ran: spans, streamed to disk while the program runs."""

from __future__ import annotations

import array
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import IO

import attrs
import numpy as np
import numpy.typing as npt

from amanda import OpContext
from amanda.tools.description import OpDescription, describe
from amanda_tools._operators.handover import Handover
from amanda_tools._timelines.memory import device_bytes, resident_bytes

Numbers = npt.NDArray[np.int64]

_WAITING = 4 * 1024
"""Numbers that wait as they are before they are counted; four make a record."""

_BUFFERED = 4 * 4096
"""Numbers that wait in memory before they go to the disk."""

_SAMPLE = 1_000_000
"""Nanoseconds between two looks at the memory, and at what waits."""


@attrs.frozen
class Span:
    """One execution of an operator.

    Attributes:
        op: the operator.
        start: nanoseconds since the timeline began.
        duration: nanoseconds between the routines before and after the operator.
        thread: the thread's native id.
    """

    op: OpDescription
    start: int
    duration: int
    thread: int

    @property
    def end(self) -> int:
        """Nanoseconds since the timeline began."""
        return self.start + self.duration


@attrs.frozen
class MemorySample:
    """How much memory was in use at a moment.

    Attributes:
        time: nanoseconds since the timeline began.
        resident: bytes of the process in main memory.
        device: bytes of tensors on the current CUDA device.
    """

    time: int
    resident: int
    device: int


@attrs.define
class Total:
    """What the executions of one operator add up to.

    Attributes:
        calls: how many there were.
        nanoseconds: how long they took together.
        longest, shortest: how long one took, in nanoseconds.
    """

    calls: int = 0
    nanoseconds: int = 0
    longest: int = 0
    shortest: int = 1 << 62

    @property
    def seconds(self) -> float:
        """How long they took together."""
        return self.nanoseconds / 1e9


class Sums:
    """The totals of all operators, by their numbers, of which many are added at once."""

    def __init__(self) -> None:
        self._columns = self._rows(0)

    @staticmethod
    def _rows(count: int) -> list[Numbers]:
        empty = Total()
        first = (empty.calls, empty.nanoseconds, empty.longest, empty.shortest)
        return [np.full(count, value, np.int64) for value in first]

    def add(self, numbers: Numbers, durations: Numbers) -> None:
        """One more execution of each of these operators."""
        missing = int(numbers.max(initial=-1)) + 1 - len(self._columns[0])
        if missing > 0:
            more = self._rows(missing + len(self._columns[0]))
            pairs = zip(self._columns, more, strict=True)
            self._columns = [np.concatenate(pair) for pair in pairs]
        calls, nanoseconds, longest, shortest = self._columns
        np.add.at(calls, numbers, 1)
        np.add.at(nanoseconds, numbers, durations)
        np.maximum.at(longest, numbers, durations)
        np.minimum.at(shortest, numbers, durations)

    def totals(self) -> list[Total]:
        """The total of each number, up to the highest that has one."""
        rows = zip(*(column.tolist() for column in self._columns), strict=True)
        return [Total(*row) for row in rows]


class _ThreadId(threading.local):
    """What belongs to one thread.

    Attributes:
        native: the thread's native id; asking for it takes a system call.
    """

    def __init__(self) -> None:
        self.native = threading.get_native_id()


class Timeline:
    """The spans of all executions, up to a limit, in a temporary file.

    A span lies between two instrumentation routines, so that it holds the cost
    of the instrumentation of this one operator too. Operators of a device that
    works asynchronously show the time of their launch. What is in memory does
    not grow with the number of executions.

    Args:
        limit: spans to keep; those after are counted only.
        memory: look at the memory too, at most once in a millisecond.
        settle: called before each look at the clock, to wait for a device; None for nothing.
    """

    def __init__(
        self, limit: int, *, memory: bool = True, settle: Callable[[], None] | None = None
    ) -> None:
        self._settle = settle
        self._kept = 0
        self._dropped = 0
        self._ops: list[OpDescription] = []
        self._numbers: dict[str, int] = {}
        self._sums = Sums()
        self._limit = limit
        # Operator, start, end and thread of each execution, as the routines leave them.
        self._waiting: list[int] = []
        self._buffer = array.array("q")
        self._file: IO[bytes] | None = None
        self._is_lost = False
        self._samples = memory
        self._due = 0
        self._thread = _ThreadId()
        self._began = time.perf_counter_ns()

    # -- recording --------------------------------------------------------

    def watch(self, context: OpContext) -> None:
        """Insert the routines that time an operator; called in an analysis before it."""
        op = describe(context)
        number = self._numbers.setdefault(op.id, len(self._ops))
        if number == len(self._ops):
            self._ops.append(op)
        start, stop = self._routines(number)
        if context.is_forward():
            context.insert_before_op(start, inputs=[])
            context.insert_after_op(stop, outputs=[])
        else:
            context.insert_before_backward_op(start, grad_outputs=[])
            context.insert_after_backward_op(stop, grad_inputs=[])

    def _routines(self, number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """The routines before and after one operator."""
        started = Handover[int]()
        leave, take, clock, waiting = (
            started.leave,
            started.take,
            time.perf_counter_ns,
            self._waiting,
        )
        this = self._thread

        def start() -> None:
            leave(clock())

        def stop() -> None:
            end = clock()
            begin = take()
            if begin is not None:
                waiting.extend((number, begin, end, this.native))
                if end >= self._due:
                    self._look(end)

        settle = self._settle
        if settle is None:
            return start, stop

        def settled_start() -> None:
            settle()
            start()

        def settled_stop() -> None:
            settle()
            stop()

        return settled_start, settled_stop

    def _look(self, now: int) -> None:
        """What is not done at every execution."""
        self._due = now + _SAMPLE
        if self._samples:
            self._waiting.extend((-1, now, resident_bytes(), device_bytes()))
        if len(self._waiting) >= _WAITING:
            self._take()

    def _take(self) -> None:
        """Count what waits, and keep of it what is to be kept."""
        waiting = self._waiting
        count = len(waiting)
        records = np.fromiter(waiting, np.int64, count).reshape(-1, 4)
        del waiting[:count]
        is_span = records[:, 0] >= 0
        records[is_span, 2] -= records[is_span, 1]
        records[:, 1] -= self._began
        self._sums.add(records[is_span, 0], records[is_span, 2])
        room = 0 if self._is_lost else self._limit - self._kept
        # With the samples between them.
        kept = records[np.cumsum(is_span) <= room] if room else records[:0]
        spans = int(is_span.sum())
        self._kept += min(spans, room)
        self._dropped += max(0, spans - room)
        self._buffer.frombytes(kept.tobytes())
        if len(self._buffer) >= _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="amanda-timeline-")  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.write(self._buffer.tobytes())
            # A forked child would write what waits in its copy of the file's buffer once more.
            self._file.flush()
        except OSError:
            # The program goes on without the rest of its timeline.
            lost = sum(number >= 0 for number in self._buffer[::4])
            self._is_lost = True
            self._kept -= lost
            self._dropped += lost
        del self._buffer[:]

    # -- reading ----------------------------------------------------------

    @property
    def kept(self) -> int:
        """How many spans were kept."""
        self._take()
        return self._kept

    @property
    def dropped(self) -> int:
        """How many were not, for the limit or for want of space on the disk."""
        self._take()
        return self._dropped

    @property
    def buffered(self) -> int:
        """How many records, of spans and of memory, wait in memory to be written to the disk."""
        return len(self._buffer) // 4

    def records(self) -> Iterator[Span | MemorySample]:
        """Spans and memory samples, in the order in which they ended, from the disk."""
        self._take()
        if self._file is not None:
            self._file.flush()
            self._file.seek(0)
            while chunk := self._file.read(_BUFFERED * self._buffer.itemsize):
                part = array.array("q")
                part.frombytes(chunk[: len(chunk) - len(chunk) % 32])
                yield from self._parsed(part)
            self._file.seek(0, 2)
        yield from self._parsed(self._buffer)

    def _parsed(self, numbers: array.array[int]) -> Iterator[Span | MemorySample]:
        for i in range(0, len(numbers), 4):
            number, first, second, third = numbers[i : i + 4]
            if number < 0:
                yield MemorySample(first, second, third)
            else:
                yield Span(self._ops[number], first, second, third)

    @property
    def spans(self) -> list[Span]:
        """All spans that were kept, in the order in which they ended."""
        return [record for record in self.records() if isinstance(record, Span)]

    def seconds(self) -> dict[str, float]:
        """Total time of each operator, by id, of spans that were not kept too."""
        return {op_id: total.seconds for op_id, total in self.totals().items()}

    def totals(self) -> dict[str, Total]:
        """What the executions of each operator add up to, by id, spans that were not kept too."""
        self._take()
        # Operators that were met last may not have run to their end.
        pairs = zip(self._ops, self._sums.totals(), strict=False)
        return {op.id: total for op, total in pairs if total.calls}
