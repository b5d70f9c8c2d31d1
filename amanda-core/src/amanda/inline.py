"""Routines that drivers know, and run without Python where they can.

A tool inserts them like any other routine::

    counter = amanda.inline.Counter()
    context.insert_before_op(counter, inputs=[])
    timer = amanda.inline.Timer()
    context.insert_before_op(timer.start, inputs=[])
    context.insert_after_op(timer.stop, outputs=[])
    record = amanda.inline.Record(["shape", "dtype"])
    context.insert_before_op(record)
    ...
    print(counter.count, timer.nanoseconds, record.changes)

Their meaning is that of the Python code below, in every mode. A driver that recognises one may
have its effect in another way: the graph drivers of TensorFlow add up how often a graph was run,
instead of calling Python at each of its operators; that of PyTorch runs them in C.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from types import MethodType
from typing import Any


class Counter:
    """Counts executions: of the operators, and at the points, at which it is inserted.

    One counter may be inserted many times; it then counts all of them together. The count may be
    read at any time outside of the program's operators, and set.

    Attributes:
        count: the executions so far. A driver that adds up whole runs of a graph does so when
            a run has ended; a run that raises is then not counted.
    """

    __slots__ = ("__weakref__", "count")

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __call__(self, *tensors: Any) -> None:
        """Count one execution; the tensors at the point are not looked at."""
        self.count += 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count})"


class Log:
    """Where timers write what they have measured.

    Attributes:
        numbers: four for each execution that has ended, one execution after the other: the number
            of the timer, start and end as ``time.perf_counter_ns()`` gives them, and the native id
            of the thread. Whoever reads them may delete what was read.
        due: the end of an execution from which on :meth:`look` is called; None to call it never.
    """

    __slots__ = ("__weakref__", "due", "numbers")

    def __init__(self, due: int | None = None) -> None:
        self.numbers: list[int] = []
        self.due = due

    def look(self, now: int) -> None:
        """An execution has ended at or after `due`. A subclass reads the numbers, and sets `due`.

        Args:
            now: the end of the execution, in nanoseconds.
        """
        self.due = None


class _Thread(threading.local):
    """Native id of the current thread, kept because asking for it takes a system call."""

    def __init__(self) -> None:
        self.native = threading.get_native_id()


_THREAD = _Thread()


_OVERLAPPING = 64
"""Executions of one timer that may overlap."""

_NUMBERS = itertools.count(1)


class Timer:
    """Measures the time between two points, of which one is passed before the other.

    One timer may be inserted at several operators, if none of them runs within another one.

    Args:
        log: where each execution is noted, beside the sums; None for none.
        number: names this timer in the log.

    Attributes:
        executions: how often :attr:`stop` was reached after :attr:`start`. An operator that raises
            is not counted.
        nanoseconds: the time between them, in all.
    """

    __slots__ = ("__weakref__", "_started", "executions", "log", "nanoseconds", "number")

    def __init__(self, log: Log | None = None, number: int = 0) -> None:
        self.log = log
        self.number = number
        self.executions = 0
        self.nanoseconds = 0
        self._started: dict[int, int] = {}

    def start(self, *tensors: Any) -> None:
        """The routine at the first point; the tensors there are not looked at."""
        started, thread = self._started, threading.get_ident()
        # The executor of TensorFlow's graphs may begin a second operator on a thread before the
        # first one ends. Beginnings of operators that have raised stay, too: not for ever.
        if thread in started and len(started) < _OVERLAPPING:
            started[-next(_NUMBERS)] = started[thread]
        started[thread] = time.perf_counter_ns()

    def stop(self, *tensors: Any) -> None:
        """The routine at the second point; the tensors there are not looked at."""
        end = time.perf_counter_ns()
        start = self._started.pop(threading.get_ident(), None)
        if start is None:
            # The executor of TensorFlow's graphs may run the two points in different threads.
            try:
                _, start = self._started.popitem()
            except KeyError:
                return
        self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Note an execution that was measured otherwise.

        Args:
            start, end: as ``time.perf_counter_ns()`` gives them.
        """
        self.executions += 1
        self.nanoseconds += end - start
        log = self.log
        if log is not None:
            log.numbers.extend((self.number, start, end, _THREAD.native))
            if log.due is not None and end >= log.due:
                log.look(end)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.executions} executions, {self.nanoseconds} ns)"


class Record:
    """Notes shapes and the like of tensors where they are not those of the last execution.

    One record belongs to one point of one operator.

    Args:
        fields: the attributes of tensors that are noted; shapes are noted as tuples.

    Attributes:
        fields: them.
        executions: the executions so far.
        changes: for each execution that has differed from the one before it, and for the first
            one, its number, from 0 on, and for each tensor a tuple of the values of the fields;
            None for a tensor that is absent, and for a field that the framework does not have.
    """

    __slots__ = ("__weakref__", "changes", "executions", "fields")

    def __init__(self, fields: Sequence[str] = ("shape", "dtype")) -> None:
        self.fields = tuple(fields)
        self.executions = 0
        self.changes: list[tuple[int, tuple[Any, ...]]] = []

    def __call__(self, *tensors: Any) -> None:
        """Note one execution."""
        found = tuple([self._values(tensor) for tensor in tensors])
        if not self.changes or self.changes[-1][1] != found:
            self.changes.append((self.executions, found))
        self.executions += 1

    def _values(self, tensor: Any) -> tuple[Any, ...] | None:
        if tensor is None:
            return None
        values = []
        for field in self.fields:
            value = getattr(tensor, field, None)
            values.append(tuple(value) if field == "shape" and value is not None else value)
        return tuple(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.fields)}, {self.executions} executions)"


def is_counter(routine: object) -> bool:
    """Whether a routine is a :class:`Counter`, which a driver may run in its own way.

    An instance of a subclass is not: it may do something else.
    """
    return type(routine) is Counter


def started_by(routine: object) -> Timer | None:
    """The timer whose ``start`` a routine is, which a driver may run in its own way."""
    return _timer_of(routine, Timer.start)


def stopped_by(routine: object) -> Timer | None:
    """The timer whose ``stop`` a routine is, which a driver may run in its own way."""
    return _timer_of(routine, Timer.stop)


def _timer_of(routine: object, function: object) -> Timer | None:
    if type(routine) is not MethodType or routine.__func__ is not function:
        return None
    timer = routine.__self__
    return timer if type(timer) is Timer else None
