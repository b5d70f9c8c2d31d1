"""The last executions of operators, in memory that a file can outlive the process with.

The memory holds 64-bit integers: the fields of :data:`HEADER`, then records of :data:`RECORD`. A
file goes on with a line of JSON about the process, and one for each operator, which records name by
its number. The kernel keeps what is in memory that is mapped to a file, however the process ends.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAGIC = int.from_bytes(b"amanda\x00\x01", "little")
"""The first number of a file; its last byte is the version of the format."""

HEADER = ("magic", "size", "begun", "step", "memory", "due", "epoch", "process")
"""The fields of the header.

``size``: number of records; ``begun``: executions that have begun; ``step``: number of the
iteration, -1 before the first; ``memory``: bytes in use when they were read last; ``due``: when
they are read again; ``epoch``: nanoseconds of ``time.time_ns()`` at the zero of
``time.perf_counter_ns()``; ``process``: its id.
"""

RECORD = ("index", "number", "step", "memory", "begin", "end", "thread")
"""The fields of a record.

``index``: how many executions had begun with this one, 0 for none; ``number``: of the operator;
``step`` and ``memory``: those of the header when it began; ``begin`` and ``end`` in nanoseconds of
``time.perf_counter_ns()``, the latter 0 before the end; ``thread``: native id. The record of an
execution is at its index modulo the number of records.
"""

_BEGUN, _STEP, _MEMORY, _DUE = map(HEADER.index, ("begun", "step", "memory", "due"))
_NUMBER, _END, _THREAD = map(RECORD.index, ("number", "end", "thread"))

_PAUSE = 1_000_000
"""Nanoseconds between two looks at the memory in use."""


class Ring:
    """The last executions of operators, see :mod:`amanda.inline.ring`.

    Args:
        size: number of executions that it keeps.
        used: gives the bytes in use.
        path: the file; it is created, or overwritten. None for memory of the process only.
        facts: what the file says about the process.

    Raises:
        OSError: the file cannot be written.

    Attributes:
        numbers: the memory.
        names: what :meth:`name` was given.
    """

    __slots__ = ("__weakref__", "_file", "_size", "_used", "names", "numbers")

    def __init__(
        self,
        size: int,
        used: Callable[[], int],
        path: Path | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._size, self._used = size, used
        self.names: list[Mapping[str, Any]] = []
        length = 8 * (len(HEADER) + len(RECORD) * size)
        self._file: int | None = None
        if path is not None:
            # Written, so that the disk has room for it: without, a store would end the process.
            path.write_bytes(bytes(length) + _line(facts or {}))
            # No object, which would warn that it is open when the process ends.
            self._file = os.open(path, os.O_RDWR | os.O_APPEND)
            weakref.finalize(self, os.close, self._file).atexit = False
        memory = mmap.mmap(-1 if self._file is None else self._file, length)
        self.numbers = memoryview(memory).cast("q")
        epoch = time.time_ns() - time.perf_counter_ns()
        first = (size, 0, -1, 0, 0, epoch, os.getpid())
        for place, value in enumerate(first, 1):
            self.numbers[place] = value
        self.numbers[0] = MAGIC

    @property
    def begun(self) -> int:
        """The executions that have begun."""
        return self.numbers[_BEGUN]

    def name(self, about: Mapping[str, Any]) -> int:
        """Give an operator a number.

        Args:
            about: plain data that the file keeps.
        """
        self.names.append(about)
        if self._file is not None:
            try:
                os.write(self._file, _line(about))
            except OSError:
                # The disk is full; later operators have no name in the file.
                self._file = None
        return len(self.names) - 1

    def set_step(self, step: int) -> None:
        """Note the number of the iteration, from 0."""
        self.numbers[_STEP] = step

    def look(self, now: int) -> None:
        """Read the bytes in use."""
        self.numbers[_MEMORY] = self._used()
        self.numbers[_DUE] = now + _PAUSE

    def begin(self, number: int) -> None:
        """Note that an execution of an operator begins in this thread."""
        numbers, now = self.numbers, time.perf_counter_ns()
        if now >= numbers[_DUE]:
            self.look(now)
        index = numbers[_BEGUN] + 1
        at = self._place(index)
        thread = threading.get_native_id()
        record = (index, number, numbers[_STEP], numbers[_MEMORY], now, 0, thread)
        for place, value in enumerate(record, at):
            numbers[place] = value
        # Last: a reader takes no record beyond it.
        numbers[_BEGUN] = index

    def end(self, number: int) -> None:
        """Note that the last execution of an operator ends.

        It is the last one of this thread; or else the last one, as the executor of TensorFlow's
        graphs may end it in another thread.
        """
        numbers, now = self.numbers, time.perf_counter_ns()
        thread, found = threading.get_native_id(), 0
        index = numbers[_BEGUN]
        for each in range(index, max(0, index - self._size), -1):
            at = self._place(each)
            if numbers[at + _NUMBER] == number and not numbers[at + _END]:
                found = found or at
                if numbers[at + _THREAD] == thread:
                    found = at
                    break
        if found:
            numbers[found + _END] = now

    def _place(self, index: int) -> int:
        return len(HEADER) + len(RECORD) * (index % self._size)


def _line(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
