"""Routines that drivers recognize, and run without Python where they can.

A tool inserts them like any other routine::

    counter = amanda.inline.Counter()
    context.insert_before_op(counter, inputs=[])
    timer = amanda.inline.Timer()
    context.insert_before_op(timer.start, inputs=[])
    context.insert_after_op(timer.stop, outputs=[])
    check = amanda.inline.Check(lambda tensor: bool(tensor.isfinite().all()), print)
    context.insert_before_op(check.before)
    context.insert_after_op(check.after)
    change = amanda.inline.MemoryChange(memory)     # memory = amanda.inline.MemoryUse(), of all
    context.insert_before_op(change.before, inputs=[])
    context.insert_after_op(change.after, outputs=[])
    ring = amanda.inline.Ring(1000, amanda.inline.resident_bytes)
    mark = amanda.inline.Mark(ring, ring.name({"id": context.get_op_id()}))
    context.insert_before_op(mark.before, inputs=[])
    context.insert_after_op(mark.after, outputs=[])
    ...
    print(counter.count, timer.nanoseconds, change.bytes)

These routines have the effect of the Python code below, in every mode. A driver may replace the
code: the graph drivers of TensorFlow count the runs of a graph, instead of calling Python at each
of its operators; the gate of the PyTorch driver runs the routines in C. The method ``lowered()``
gives the step (:mod:`amanda.inline.steps`) that stands for a routine. Drivers call the routines of
subclasses, whose effect may differ.
"""

from __future__ import annotations

import array
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from amanda.inline.ring import Ring as Ring
from amanda.inline.steps import Inline, Step, StepKind


class Counter(Inline):
    """Counts executions: of the operators, and at the points, at which it is inserted.

    One counter may be inserted many times; it then counts all of them together. The count may be
    read and set at any time outside of the program's operators.

    Attributes:
        count: the executions so far. A driver that adds up whole runs of a graph does so when
            a run has ended; a run that raises is then not counted.
    """

    __slots__ = ("__weakref__", "count")

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __call__(self, *tensors: Any) -> None:
        """Count one execution; the tensors at the point are ignored."""
        self.count += 1

    def lowered(self, action: Any, method: Any) -> Step:
        """COUNT if no tensors are selected; a routine that takes part in AD is lowered, too."""
        if type(self) is Counter and method is None and not action.select:
            return Step(StepKind.COUNT, action, self)
        return Step(StepKind.CALL, action)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count})"


class Log:
    """The log into which timers write their measurements.

    Attributes:
        numbers: an ``array.array`` of 64-bit integers, four for each execution that has ended, one
            execution after the other: the number of the timer, start and end as
            ``time.perf_counter_ns()`` gives them, and the native id of the thread. A reader may
            delete the numbers that it has read.
        due: :meth:`look` is called at executions that end from this time on; None to never call it.
    """

    __slots__ = ("__weakref__", "due", "numbers")

    def __init__(self, due: int | None = None) -> None:
        self.numbers = array.array("q")
        self.due = due

    def look(self, now: int) -> None:
        """An execution has ended at or after `due`. A subclass reads the numbers, and sets `due`.

        Args:
            now: the end of the execution, in nanoseconds.
        """
        self.due = None


class _Thread(threading.local):
    """Native id of the current thread, cached, since reading it takes a system call."""

    def __init__(self) -> None:
        self.native = threading.get_native_id()


_THREAD = _Thread()


_OVERLAPPING = 64
"""Executions of one timer that may overlap."""

_NUMBERS = itertools.count(1)


class Timer(Inline):
    """Measures the time from one point to another.

    One timer may be inserted at several operators, if none of them runs within another one.

    Args:
        log: records each execution, in addition to the sums; None for none.
        number: identifies this timer in the log.

    Raises:
        TypeError: `log` is not a :class:`Log`.

    Attributes:
        executions: how often :attr:`stop` was reached after :attr:`start`. An operator that raises
            is not counted.
        nanoseconds: the total time between them.
    """

    __slots__ = ("__weakref__", "_started", "executions", "log", "nanoseconds", "number")

    def __init__(self, log: Log | None = None, number: int = 0) -> None:
        if log is not None and not isinstance(log, Log):
            raise TypeError(f"Timer() needs a Log or None as log, got {log!r}")
        self.log = log
        self.number = number
        self.executions = 0
        self.nanoseconds = 0
        self._started: dict[int, int] = {}

    def start(self, *tensors: Any) -> None:
        """The routine at the first point; the tensors there are ignored."""
        started, thread = self._started, threading.get_ident()
        # The executor of TensorFlow's graphs may begin a second operator on a thread before the
        # first one ends. Start times of operators that raised stay, too, but not for ever.
        if thread in started and len(started) < _OVERLAPPING:
            started[-next(_NUMBERS)] = started[thread]
        started[thread] = time.perf_counter_ns()

    def stop(self, *tensors: Any) -> None:
        """The routine at the second point; the tensors there are ignored."""
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
        """Add an execution that was measured in another way.

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

    STEP = StepKind.CLOCK, start, stop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.executions} executions, {self.nanoseconds} ns)"


class Mark(Inline):
    """Notes in a :class:`Ring` when an operator begins and ends.

    :attr:`before` and :attr:`after` are two routines. An operator that raises has no end.

    Args:
        ring: where they are noted.
        number: what :meth:`Ring.name` has given for the operator.
    """

    __slots__ = ("__weakref__", "number", "ring")

    def __init__(self, ring: Ring, number: int) -> None:
        if not isinstance(ring, Ring):
            raise TypeError(f"Mark() needs a Ring as ring, got {ring!r}")
        self.ring = ring
        self.number = number

    def before(self, *tensors: Any) -> None:
        """The routine before the operator; the tensors there are ignored."""
        self.ring.begin(self.number)

    def after(self, *tensors: Any) -> None:
        """The routine after the operator; the tensors there are ignored."""
        self.ring.end(self.number)

    STEP = StepKind.MARK, before, after

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.number})"


class Check(Inline):
    """Checks whether all outputs of an operator are finite, and calls a function if not.

    :attr:`before` and :attr:`after` are two routines, for all inputs and all outputs. One check
    belongs to one operator; at a backward operator the gradients that it consumes are the inputs.

    Args:
        is_finite: checks one tensor; True for one whose numbers cannot be read, if these are to
            pass.
        found: ``found(inputs, outputs, was_finite)``, called after an execution with an output
            that is not finite. `was_finite` is False if the operator overwrites inputs and one
            of them was not finite before.
        overwrites: whether the operator may write into its inputs, so that these are checked, too,
            before it runs; None to decide at the first execution: True if an output is one of the
            inputs.
        trail: `name` is appended to it after each execution, before `found` is called.

    Attributes:
        overwrites: as given; not None after the first execution.
    """

    __slots__ = ("__weakref__", "_held", "found", "is_finite", "name", "overwrites", "trail")

    def __init__(
        self,
        is_finite: Callable[[Any], bool],
        found: Callable[[Sequence[Any], Sequence[Any], bool], object],
        *,
        overwrites: bool | None = False,
        trail: deque[str] | None = None,
        name: str = "",
    ) -> None:
        _check_callable("Check()", is_finite=is_finite, found=found)
        self.is_finite = is_finite
        self.found = found
        self.overwrites = overwrites
        self.trail = trail
        self.name = name
        # By thread, from one routine to the other.
        self._held: dict[int, tuple[Sequence[Any], bool]] = {}

    def before(self, *inputs: Any) -> None:
        """The routine before the operator, with all inputs; absent ones are None."""
        was_finite = self.overwrites is False or self._are_finite(inputs)
        self._held[threading.get_ident()] = inputs, was_finite

    def after(self, *outputs: Any) -> None:
        """The routine after the operator, with all outputs; absent ones are None."""
        inputs, was_finite = _taken(self._held, ((), True))
        self.note_execution(inputs, outputs, was_finite)

    def note_execution(
        self, inputs: Sequence[Any], outputs: Sequence[Any], was_finite: bool | None = None
    ) -> None:
        """Check an execution after it, without the two routines if it has overwritten no input.

        Args:
            inputs, outputs: all tensors of it; absent ones are None.
            was_finite: False if an input was not finite before; None if that can be seen now.
        """
        if self._held:
            # The first execution may have begun by the routine.
            self._held.pop(threading.get_ident(), None)
        if self.trail is not None:
            self.trail.append(self.name)
        if self.overwrites is None:
            self.overwrites = any(o is t for o in outputs if o is not None for t in inputs)
        if not self._are_finite(outputs):
            if was_finite is None:
                was_finite = not self.overwrites or self._are_finite(inputs)
            self.found(inputs, outputs, was_finite or not self.overwrites)

    def _are_finite(self, tensors: Sequence[Any]) -> bool:
        is_finite = self.is_finite
        for tensor in tensors:  # noqa: SIM110 - a generator would cost a frame for each tensor
            if tensor is not None and not is_finite(tensor):
                return False
        return True

    STEP = StepKind.CHECK, before, after

    def _fits(self, action: Any, ends: bool) -> bool:
        # All tensors are given, and inputs may be checked later.
        is_whole = action.select is None and not action.differentiable
        return is_whole and self.overwrites is not True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _taken(held: dict[int, Any], default: Any) -> Any:
    """Take what the first routine of a pair left in this thread, or else the oldest of another one.

    The two routines may run in different threads.
    """
    thread = threading.get_ident()
    try:
        return held.pop(thread if thread in held else next(iter(held)))
    except (StopIteration, KeyError):
        return default


def _check_callable(where: str, **functions: Any) -> None:
    """Check that the arguments can be called: otherwise the error would come much later."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{where} needs a function as {name}, got {function!r}")


def shapes_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes of tensors as their framework represents them; None for absent ones."""
    return tuple([None if tensor is None else tensor.shape for tensor in tensors])


class ShapeSum(Inline):
    """Sums, over the executions of an operator, a number that depends on its tensors' shapes.

    :attr:`before` and :attr:`after` are two routines, for all inputs, and for all outputs or none.
    An execution that raises is not added.

    Args:
        weigh: ``weigh((inputs, outputs))``, the number for an execution with tensors of these
            shapes; None if it is not known.
        total: the sum is added to its count, together with other sums.
        shapes_of: gives the shapes of tensors, as a tuple.
        of: another sum, if the number also depends on its last shapes, as that of a backward
            operator depends on those of its forward operator; None for none.

    Raises:
        TypeError: `weigh` cannot be called, or `total` or `of` has another type.

    Attributes:
        executions: the number of executions so far.
        amount: the sum of their numbers.
        unknown: the number of executions whose number is not known.
        last: the shapes of the inputs and of the outputs of the last one.
    """

    __slots__ = (
        *("__weakref__", "_held", "amount", "executions", "last", "of", "shapes_of", "total"),
        *("unknown", "weigh"),
    )

    def __init__(
        self,
        weigh: Callable[[tuple[Any, Any]], int | None],
        total: Counter | None = None,
        *,
        shapes_of: Callable[[Sequence[Any]], tuple[Any, ...]] = shapes_of,
        of: ShapeSum | None = None,
    ) -> None:
        _check_callable("ShapeSum()", weigh=weigh)
        # No helper function: tools create one sum for each operator.
        if total is not None and not isinstance(total, Counter):
            raise TypeError(f"ShapeSum() needs a Counter or None as total, got {total!r}")
        if of is not None and not isinstance(of, ShapeSum):
            raise TypeError(f"ShapeSum() needs a ShapeSum or None as of, got {of!r}")
        self.weigh = weigh
        self.total = total
        self.shapes_of = shapes_of
        self.of = of
        self.executions = self.amount = self.unknown = 0
        self.last: tuple[Any, Any] = ((), ())
        # By thread: shapes of inputs.
        self._held: dict[int, tuple[Any, ...]] = {}

    def before(self, *inputs: Any) -> None:
        """The routine before the operator, with all inputs; absent ones are None."""
        self._held[threading.get_ident()] = self.shapes_of(inputs)

    def after(self, *outputs: Any) -> None:
        """The routine after the operator, with all outputs or none."""
        found = _taken(self._held, ()), self.shapes_of(outputs)
        self.add(self.weigh(found), found)

    def note_execution(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Add an execution after it, without the two routines if it has overwritten no input.

        Args:
            inputs: all inputs of the operator; absent ones are None.
            outputs: all outputs, or none.
        """
        found = self.shapes_of(inputs), self.shapes_of(outputs) if outputs else ()
        self.add(self.weigh(found), found)

    def add(self, weight: int | None, shapes: tuple[Any, Any]) -> None:
        """Add an execution that a driver has noticed in another way.

        Args:
            weight: the result of :attr:`weigh` for it.
            shapes: those of its inputs and of its outputs.
        """
        self.last = shapes
        self.executions += 1
        if weight is None:
            self.unknown += 1
            return
        self.amount += weight
        if self.total is not None:
            self.total.count += weight

    STEP = StepKind.SHAPE_SUM, before, after

    def _fits(self, action: Any, ends: bool) -> bool:
        # All tensors are given, to the second one perhaps none.
        is_whole = action.select is None or (ends and action.select == ())
        return is_whole and not action.differentiable

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.amount} of {self.executions} executions)"


# -- memory -------------------------------------------------------------------

_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

_OPEN: dict[int, int] = {}
"""Open file of :data:`_STATM` by process id: opening takes ten times as long as reading."""


def resident_bytes() -> int:
    """The bytes of the process in main memory; 0 on systems that do not provide them."""
    process = os.getpid()
    try:
        if process not in _OPEN:
            _OPEN[process] = os.open(_STATM, os.O_RDONLY)
        return int(os.pread(_OPEN[process], 128, 0).split(None, 2)[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        # There is no such file, or a daemon has closed all files of its process.
        _OPEN.pop(process, None)
        return 0


class MemoryUse:
    """The memory in use, as the two routines of :class:`MemoryChange` read it.

    Args:
        used: gives the bytes in use, such as those on a device; None for :func:`resident_bytes`,
            which a driver need not call to read them.

    Attributes:
        used: as given. It may be set at any time outside of the program's operators.
        peak: the most bytes that were read. It may be set, too. A driver that adds executions when
            the run of a graph has ended may leave out executions that raise.
    """

    __slots__ = ("__weakref__", "peak", "used")

    def __init__(self, used: Callable[[], int] | None = None) -> None:
        if used is not None:
            _check_callable("MemoryUse()", used=used)
        self.used = used
        self.peak = 0

    def read(self) -> int:
        """The bytes in use now; updates the peak."""
        amount = resident_bytes() if self.used is None else self.used()
        self.note(amount)
        return amount

    def note(self, amount: int) -> None:
        """Update the peak with bytes that the driver has read."""
        if amount > self.peak:
            self.peak = amount

    def __repr__(self) -> str:
        return f"{type(self).__name__}(peak {self.peak})"


class MemoryChange(Inline):
    """Measures by how much the executions of an operator change the memory in use.

    :attr:`before` and :attr:`after` are two routines. An execution that raises is not counted.

    Args:
        use: the memory that is read.

    Raises:
        TypeError: `use` is not a :class:`MemoryUse`.

    Attributes:
        use: as given.
        bytes: the sum over all executions, which may be negative.
    """

    __slots__ = ("__weakref__", "_held", "bytes", "use")

    def __init__(self, use: MemoryUse) -> None:
        if not isinstance(use, MemoryUse):
            raise TypeError(f"MemoryChange() needs a MemoryUse as use, got {use!r}")
        self.use = use
        self.bytes = 0
        # By thread, from one routine to the other.
        self._held: dict[int, int] = {}

    def before(self, *tensors: Any) -> None:
        """The routine before the operator; the tensors there are ignored."""
        self._held[threading.get_ident()] = self.use.read()

    def after(self, *tensors: Any) -> None:
        """The routine after the operator; the tensors there are ignored."""
        before = _taken(self._held, None)
        if before is not None:
            self.bytes += self.use.read() - before

    def add(self, before: int, after: int) -> None:
        """Add an execution that was measured in another way.

        Args:
            before, after: the bytes that were in use then.
        """
        self.use.note(before)
        self.use.note(after)
        self.bytes += after - before

    STEP = StepKind.MEMORY, before, after

    def _fits(self, action: Any, ends: bool) -> bool:
        return type(self.use) is MemoryUse and super()._fits(action, ends)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bytes} bytes)"
