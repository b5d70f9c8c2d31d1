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

from amanda import OpContext
from amanda.tools.reporting import OpDescription, describe
from amanda_tools.memory import device_bytes, resident_bytes
from amanda_tools.pairing import left_elsewhere

_BUFFERED = 4 * 4096
"""Numbers that wait in memory; four make a record."""

_SAMPLE = 1_000_000
"""Nanoseconds between two looks at the memory."""


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

    def add(self, duration: int) -> None:
        """One more execution."""
        self.calls += 1
        self.nanoseconds += duration
        if duration > self.longest:
            self.longest = duration
        if duration < self.shortest:
            self.shortest = duration


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

    Attributes:
        kept: how many spans were kept.
        dropped: how many were not, for the limit or for want of space on the disk.
    """

    def __init__(
        self, limit: int, *, memory: bool = True, settle: Callable[[], None] | None = None
    ) -> None:
        self._settle = settle
        self.kept = 0
        self.dropped = 0
        self._ops: list[OpDescription] = []
        self._numbers: dict[str, int] = {}
        self._totals: list[Total] = []
        self._limit = limit
        self._buffer = array.array("q")
        self._file: IO[bytes] | None = None
        self._is_lost = False
        # Without a look at the memory the next one is due never.
        self._next_sample: float = 0 if memory else float("inf")
        self._began = time.perf_counter_ns()

    # -- recording --------------------------------------------------------

    def watch(self, context: OpContext) -> None:
        """Insert the routines that time an operator; called in an analysis before it."""
        op = describe(context)
        number = self._numbers.setdefault(op.id, len(self._ops))
        if number == len(self._ops):
            self._ops.append(op)
            self._totals.append(Total())
        start, stop = self._routines(number)
        if context.is_forward():
            context.insert_before_op(start, inputs=[])
            context.insert_after_op(stop, outputs=[])
        else:
            context.insert_before_backward_op(start, grad_outputs=[])
            context.insert_after_backward_op(stop, grad_inputs=[])

    def _routines(self, number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """The routines before and after one operator."""
        started: dict[int, int] = {}
        thread, clock, add = threading.get_ident, time.perf_counter_ns, self._add

        def start() -> None:
            started[thread()] = clock()

        def stop() -> None:
            end = clock()
            begin = started.pop(thread(), None)
            if begin is None:
                begin = left_elsewhere(started)
            if begin is not None:
                add(number, begin, end)

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

    def _add(self, number: int, start: int, end: int) -> None:
        self._totals[number].add(end - start)
        if self.kept >= self._limit or self._is_lost:
            self.dropped += 1
            return
        self.kept += 1
        buffer = self._buffer
        buffer.extend((number, start - self._began, end - start, threading.get_native_id()))
        if end >= self._next_sample:
            self._next_sample = end + _SAMPLE
            buffer.extend((-1, end - self._began, resident_bytes(), device_bytes()))
        if len(buffer) >= _BUFFERED:
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
            self.kept -= lost
            self.dropped += lost
        del self._buffer[:]

    # -- reading ----------------------------------------------------------

    def records(self) -> Iterator[Span | MemorySample]:
        """Spans and memory samples, in the order in which they ended, from the disk."""
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
        pairs = zip(self._ops, self._totals, strict=True)
        return {op.id: total for op, total in pairs if total.calls}
