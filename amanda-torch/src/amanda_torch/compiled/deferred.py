"""Counters, sums, timers and changes of memory of ``amanda.inline`` in a graph whose code runs
without Python.

The code of an operator only says that it has been reached, what the clock says, and how much memory
is in use. What follows from it is done once, when the run has ended or raised::

    deferred = Deferred(native)
    lines = deferred.around(plan, ["x = relu(y)"])      # the operator, between its routines
    deferred.beginning(), deferred.ending()             # of the graph's function
    deferred.names                                      # the globals that all of these use
"""

from __future__ import annotations

import array
import bisect
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import attrs
import torch
from torch import nn

from amanda.engine.plan import ActionPlan
from amanda.inline import (
    Counter,
    Log,
    MemoryChange,
    MemoryUse,
    ShapeSum,
    Timer,
    begun_by,
    ended_by,
    started_by,
    stopped_by,
    summed_by,
)
from amanda.interface.action import Action
from amanda.interface.points import Point
from amanda.state import TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.routines import (
    RoutineDispatcher,
    inlined_around,
    is_measuring,
    look,
    measures_around,
    selected,
    used_bytes,
    warn_of_change,
)

_NEVER = 1 << 63
"""Nanoseconds at which no log is due."""


def is_deferrable(plan: ActionPlan) -> bool:
    """Whether all routines of an operator are of those that can be written so."""
    before, after, _ = inlined_around(plan.before, plan.after)
    if before is None or after is None or not all(map(_is_known, (*before, *after))):
        return False
    begun, ended = ([one for r in point if (one := summed_by(r))] for point in (before, after))
    if [*map(id, begun)] != [*map(id, ended)]:
        return False
    # A timer that is stopped elsewhere runs as everything else does.
    return measures_around(before, after) is not None


def _is_known(routine: Any) -> bool:
    if type(routine) is Counter:
        return True
    return is_measuring(routine) or summed_by(routine) is not None


_Execution = tuple[Timer, int, int]
"""An operator's execution for a timer, with the places of start and end among a run's times."""

_Change = tuple[MemoryChange, int, int]
"""Likewise for a change of memory, with the places of the bytes in use before and after it."""


Shapes = tuple[Any, Any]
"""The shapes of the inputs and of the outputs of an execution."""


class StaticSum:
    """A constant that one operator adds to a sum in each run, as sizes in a graph are fixed.

    Args:
        to: the sum.
        known: what it adds, and the shapes of its tensors; None before the first run.
    """

    __slots__ = ("known", "to")

    def __init__(self, to: ShapeSum, known: tuple[int | None, Shapes] | None = None) -> None:
        self.to = to
        self.known = known

    @classmethod
    def of(cls, to: ShapeSum, inputs: Sequence[Any], outputs: Sequence[Any]) -> Self:
        """The addition of an operator with these tensors."""
        found = cls(to)
        found.learn(inputs, outputs)
        return found

    def learn(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Look at the tensors of an execution, whose shapes are those of all."""
        if self.known is None:
            shapes_of = self.to.shapes_of
            shapes = TOOL_LOCK.hold(lambda: (shapes_of(inputs), shapes_of(outputs)))
            self.known = TOOL_LOCK.hold(self.to.weigh, shapes), shapes


class DeferredCall:
    """A routine that is called when the code has run, see :func:`amanda.deferrable`.

    Args:
        dispatcher: runs it.
        action: its action.
        tensors: all tensors of its point; they are kept without their values.

    Attributes:
        dispatcher, action: see above.
        watched: the tensors of which it is seen whether they are changed.
        function: the routine with what it selects; None where that is not there.
    """

    __slots__ = ("_tensors", "_versions", "action", "dispatcher", "function", "watched")

    def __init__(
        self, dispatcher: RoutineDispatcher, action: Action, tensors: Sequence[Any]
    ) -> None:
        self.dispatcher = dispatcher
        self.action = action
        self._tensors = [None if tensor is None else stand_in(tensor) for tensor in tensors]
        self.watched = [t for t in self._tensors if _internals.versions_of([t]) != [None]]
        self._versions = _internals.versions_of(self.watched)
        self.function: Callable[[], Any] | None = None
        # Where the dispatcher has to say what is wrong, it runs the routine.
        count = len(tensors)
        if all(0 <= index < count for index in action.positions(count)):
            given = selected(action, self._tensors)
            self.function = functools.partial(action.func, *given, **action.kwargs)

    def run(self) -> None:
        """Call it."""
        self.dispatcher.run_all((self.action,), self._tensors)

    def put(self, result: Any) -> None:
        """Do with what it has returned what is done in eager mode."""
        given = selected(self.action, self._tensors)
        self.dispatcher.put(self.action, self._tensors, given, result)

    def warn_of_change(self) -> None:
        """Warn if the routine has changed a tensor in place since this was asked."""
        before, self._versions = self._versions, _internals.versions_of(self.watched)
        if self._versions != before:
            warn_of_change(self.action)


class DeferredPoint:
    """The routines at the entry or the exit of a module, called when the code has run.

    Args:
        dispatcher: runs them.
        point: which of the two.
        called: the call of the module.
        inputs, outputs: the tensors there; they are kept without their values.

    Attributes:
        dispatcher: see above.
    """

    __slots__ = ("_called", "_inputs", "_outputs", "_point", "_scopes", "dispatcher")

    action = None
    watched: Sequence[Any] = ()

    def __init__(
        self,
        dispatcher: RoutineDispatcher,
        point: Point,
        called: CalledModule,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
    ) -> None:
        self.dispatcher = dispatcher
        self._point = point
        self._called = called
        self._inputs = [*map(_internals.valueless, inputs)]
        self._outputs = None if outputs is None else [*map(_internals.valueless, outputs)]
        # In tools' code no scope is active. Those of a run are always the ones of the first.
        self._scopes = dispatcher.scopes()

    def run(self) -> None:
        """Call them."""
        self._called.tell(self.dispatcher, self._point, self._inputs, self._outputs)

    def function(self) -> None:
        """Call them where the code of tools runs already."""
        facts = self._called.facts(self._inputs, self._outputs)
        self.dispatcher.points.module_among_tools(self._scopes, self._point, **facts)

    def warn_of_change(self) -> None:
        """Nothing: tensors without values cannot be written into."""


@attrs.frozen
class CalledModule:
    """A call of a module in a graph.

    Attributes:
        path: of the module within the outermost one.
        id: what the ids of its operators begin with.
        module: the module.
    """

    path: str
    id: str
    module: weakref.ref[nn.Module]

    def tell(
        self,
        dispatcher: RoutineDispatcher,
        point: Point,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
    ) -> None:
        """Run the routines at its entry or exit."""
        dispatcher.points.module(dispatcher.scopes(), point, **self.facts(inputs, outputs))

    def facts(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> dict[str, Any]:
        """The facts for routines at the entry or exit of the module."""
        return {
            "module": self.path,
            "id": self.id,
            "target": self.module(),
            "inputs": inputs,
            "outputs": outputs,
        }


def is_deferrable_routine(action: Action) -> bool:
    """Whether a routine may be called so."""
    return is_marked_deferrable(action.func) and not action.differentiable


def is_marked_deferrable(routine: Any) -> bool:
    """Whether a tool has marked a routine so."""
    func = getattr(routine, "__func__", routine)
    return bool(getattr(func, "amanda_deferrable", False))


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without values."""
    return tensor.detach().to("meta")


class Deferred:
    """The counters, sums, timers and changes of memory of one graph.

    Args:
        native: the extension of the gate; None without the gate.

    Attributes:
        names: the globals that the code uses.
    """

    def __init__(self, native: Any) -> None:
        self._used_bytes = used_bytes if native is None else native.used_bytes
        self._counters: list[Added] = []
        self._every: Additions | None = None
        self._has_sums = self._is_learned = False
        self._executions: list[_Execution] = []
        self._changes: list[_Change] = []
        self._uses: dict[MemoryUse, str] = {}
        self._logs: list[Log] = []
        self._sorted: Executions | None = None
        self._times = 0
        self.names: dict[str, Any] = {
            "amanda_count": self._count,
            "amanda_has_new": self._has_new,
            "amanda_timed": self._timed,
            "amanda_now": time.perf_counter_ns,
        }

    def around(
        self, plan: ActionPlan, lines: Sequence[str], inputs: Sequence[str], output: str
    ) -> list[str]:
        """An operator's statements, with those of its routines.

        Args:
            plan: one that :func:`is_deferrable`.
            inputs, output: expressions.
        """
        starts: dict[int, int] = {}
        before = [
            self._statement(action, starts)
            for action in plan.before
            if summed_by(action.func) is None
        ]
        after = [
            self._statement(action, starts)
            if summed_by(action.func) is None
            else self._sum(action, inputs, output)
            for action in plan.after
        ]
        return [*before, *lines, *after]

    def _sum(self, action: Action, inputs: Sequence[str], output: str) -> str:
        """The statements of the routine of a sum after an operator."""
        to = summed_by(action.func)
        assert to is not None
        one = StaticSum(to)
        self._counters.append(one)
        self._has_sums = True
        number = len(self._counters)
        self.names[f"amanda_learn_{number}"] = one.learn
        outputs = "" if action.select == () else f"{output},"
        given = "".join(f"{value}, " for value in inputs)
        return (
            f"if amanda_is_new: amanda_learn_{number}(({given}), ({outputs}))\n"
            f"amanda_counted = {number}"
        )

    def _statement(self, action: Action, starts: dict[int, int]) -> str:
        """The statements of one routine.

        Args:
            starts: by timer, where it has put its start.
        """
        routine = action.func
        if type(routine) is Counter:
            self._counters.append(routine)
            return f"amanda_counted = {len(self._counters)}"
        place = self._times
        self._times += 1
        change = begun_by(routine) or ended_by(routine)
        if change is not None:
            if begun_by(routine) is not None:
                starts[id(change)] = place
            else:
                self._changes.append((change, starts[id(change)], place))
            return f"amanda_note({self._name_of(change.use)}())"
        timer = started_by(routine)
        if timer is not None:
            starts[id(timer)] = place
            return "amanda_note(amanda_now())"
        timer = stopped_by(routine)
        assert timer is not None
        self._executions.append((timer, starts[id(timer)], place))
        if timer.log is not None and timer.log not in self._logs:
            self._logs.append(timer.log)
        return (
            "amanda_note(amanda_end := amanda_now())\n"
            "if amanda_end >= amanda_due: amanda_due = amanda_run.flush()"
        )

    def _name_of(self, use: MemoryUse) -> str:
        """The name of the function that reads a memory."""
        name = self._uses.setdefault(use, f"amanda_used_{len(self._uses)}")
        self.names[name] = functools.partial(self._used_bytes, use)
        return name

    def beginning(self) -> list[str]:
        """The statements before those of the graph."""
        lines = ["amanda_counted = 0"] if self._counters else []
        if self._has_sums:
            lines += ["amanda_is_new = amanda_has_new()"]
        if self._times:
            lines += ["amanda_run = amanda_timed()"]
            lines += ["amanda_note, amanda_due = amanda_run.times.append, amanda_run.due()"]
        return lines

    def ending(self) -> list[str]:
        """The statements behind them, also after an error."""
        lines = ["amanda_count(amanda_counted)"] if self._counters else []
        return [*lines, "amanda_run.flush()"] if self._times else lines

    # -- called by the code -----------------------------------------------

    def _count(self, reached: int) -> None:
        """Count one execution in the counters that a run has reached."""
        if reached < len(self._counters) or not (self._is_learned or not self._has_sums):
            every = [one for one in self._counters[:reached] if _is_learned(one)]
            TOOL_LOCK.hold(Additions(every).add)
            return
        if self._every is None:
            self._every = Additions(self._counters)
        TOOL_LOCK.hold(self._every.add)

    def _has_new(self) -> bool:
        """Whether a run has yet to reach all sums."""
        if self._is_learned:
            return False
        sums = [one for one in self._counters if type(one) is StaticSum]
        self._is_learned = all(one.known is not None for one in sums)
        return not self._is_learned

    def _timed(self) -> _TimedRun:
        if self._sorted is None:
            self._sorted = Executions(self._executions, self._logs)
        return _TimedRun(self._sorted, self._changes)


Added = Counter | StaticSum | DeferredCall | DeferredPoint
"""A counter or sum that an execution adds to, or a function that it calls."""


class Additions:
    """The additions and calls of each run, sorted once: a run repeats no work that is the same in
    all.

    Args:
        every: in the order of the operators; no sum without its number.
    """

    __slots__ = ("_parts",)

    def __init__(self, every: Iterable[Added]) -> None:
        self._parts: list[_Part] = []
        # Between two routines the order of counters and sums cannot be seen.
        for is_called, found in itertools.groupby(every, key=_is_called):
            if not is_called or not self._parts or self._parts[-1].calls is not None:
                self._parts.append(_Part())
            self._parts[-1].fill(list(found), is_called=is_called)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self) -> None:
        """Add one run; with the lock of tools."""
        # In one function, without a call for each operator: a step may take half a millisecond.
        # Most have counted as often as the one before: then all have one number, which is in the
        # caches, and no new ones are made.
        before, now = -1, 0
        for part in self._parts:
            for counter in part.counters:
                if (count := counter.count) is not before:
                    before, now = count, count + 1
                counter.count = now
            for to, weight, shapes in part.sums:
                if to.last is not shapes:
                    to.last = shapes
                if (count := to.executions) is not before:
                    before, now = count, count + 1
                to.executions = now
                to.amount += weight
            for to in part.unknown:
                to.unknown += 1
            for total, weight in part.totals:
                total.count += weight
            if part.calls is not None:
                part.calls.run()


class _Part:
    """Counters and sums, and the routines that are called after these."""

    __slots__ = ("calls", "counters", "sums", "totals", "unknown")

    def __init__(self) -> None:
        self.counters: list[Counter] = []
        self.sums: list[tuple[ShapeSum, int, Shapes]] = []
        self.unknown: list[ShapeSum] = []
        self.totals: list[tuple[Counter, int]] = []
        self.calls: _Calls | None = None

    def fill(self, found: Sequence[Any], *, is_called: bool) -> None:
        """Sort them: routines, or the others."""
        if is_called:
            self.calls = _Calls(found)
            return
        totals: dict[Counter, int] = {}
        for one in found:
            if type(one) is Counter:
                self.counters.append(one)
                continue
            weight, shapes = one.known
            self.sums.append((one.to, weight or 0, shapes))
            if weight is None:
                self.unknown.append(one.to)
            if weight and one.to.total is not None:
                totals[one.to.total] = totals.get(one.to.total, 0) + weight
        self.totals = [*totals.items()]


def _is_learned(one: Added) -> bool:
    return type(one) is not StaticSum or one.known is not None


def _is_called(one: Added) -> bool:
    return isinstance(one, (DeferredCall, DeferredPoint))


class _Calls:
    """Routines that are called one after the other, for which the code of tools is entered once."""

    __slots__ = ("_are_known", "_calls", "_dispatcher", "_versions", "_watched")

    def __init__(self, calls: Sequence[DeferredCall | DeferredPoint]) -> None:
        self._calls = calls
        self._dispatcher = calls[0].dispatcher
        self._are_known = all(call.function is not None for call in calls)
        self._watched: list[Any] = [tensor for call in calls for tensor in call.watched]
        self._versions = sum(map(_internals.version_of, self._watched))

    def run(self) -> None:
        """Call them."""
        if not (self._are_known and self._dispatcher.runs_together()):
            for call in self._calls:
                call.run()
            self._versions = sum(map(_internals.version_of, self._watched))
            return
        calls = self._calls
        while (found := self._dispatcher.run_deferred(calls)) is not None:
            number, result = found
            call = calls[number]
            assert type(call) is DeferredCall
            call.put(result)
            calls = calls[number + 1 :]
        # They count up only.
        versions = sum(map(_internals.version_of, self._watched))
        if versions != self._versions:
            self._versions = versions
            for call in self._calls:
                call.warn_of_change()


class Executions:
    """The executions that are added to timers in each run of a graph, in the order of their ends.

    Args:
        every: those of a whole run.
        logs: those of its timers.

    Attributes:
        logs: see above.
    """

    def __init__(self, every: Sequence[_Execution], logs: Sequence[Log]) -> None:
        self.logs = logs
        self._timers = [timer for timer, _, _ in every]
        self._starts = [start for _, start, _ in every]
        self._ends = [end for _, _, end in every]
        # By log, of which there is one as a rule: which executions are noted there.
        self._of_log = [
            (log, [n for n, t in enumerate(self._timers) if t.log is log]) for log in logs
        ]
        self._rows: dict[int, Sequence[tuple[Log, Sequence[int], array.array[int]]]] = {}

    def ended(self, times: Sequence[int]) -> int:
        """How many of them have ended where so much has been noted."""
        return bisect.bisect_left(self._ends, len(times))

    def place_of_end(self, number: int) -> int:
        """Where the end of one of them is noted."""
        return self._ends[number]

    def add(self, times: Sequence[int], first: int, count: int) -> None:
        """Add executions to their timers, and to the logs; with the lock of tools.

        Args:
            times: nanoseconds, by place.
            first, count: of those that are added, the first one, and the one after the last.
        """
        timers, starts, ends = self._timers, self._starts, self._ends
        if count - first < len(timers):
            timers, starts, ends = timers[first:count], starts[first:count], ends[first:count]
        begun = [times[place] for place in starts]
        ended = [times[place] for place in ends]
        # Most of the time is the way of objects to the caches: no tuple for each of them, and one
        # number for all that have been executed as often as the one before.
        before, now = -1, 0
        for timer, start, end in zip(timers, begun, ended, strict=True):
            if (executions := timer.executions) is not before:
                before, now = executions, executions + 1
            timer.executions = now
            timer.nanoseconds += end - start
        for log, numbers, rows in self._rows_of(threading.get_native_id()):
            if len(numbers) == len(self._timers):
                here, their_starts, their_ends = rows[4 * first : 4 * count], begun, ended
            else:
                low, high = (bisect.bisect_left(numbers, number) for number in (first, count))
                here = rows[4 * low : 4 * high]
                their_starts = [begun[number - first] for number in numbers[low:high]]
                their_ends = [ended[number - first] for number in numbers[low:high]]
            here[1::4] = array.array("q", their_starts)
            here[2::4] = array.array("q", their_ends)
            log.numbers.extend(here)

    def _rows_of(self, native: int) -> Sequence[tuple[Log, Sequence[int], array.array[int]]]:
        """For each log its executions, and what they write there but for start and end.

        Args:
            native: the native id of the thread.
        """
        found = self._rows.get(native)
        if found is None:
            found = [
                (log, numbers, array.array("q", self._row(numbers, native)))
                for log, numbers in self._of_log
            ]
            self._rows = {native: found}
        return found

    def _row(self, numbers: Sequence[int], native: int) -> Iterator[int]:
        for number in numbers:
            yield from (self._timers[number].number, 0, 0, native)


class _TimedRun:
    """The times measured in one run, and the memory in use.

    Args:
        executions: those of a whole run.
        changes: of memory in a whole run, in the order of their ends.

    Attributes:
        times: nanoseconds, and bytes in use, in the order of the code.
    """

    __slots__ = ("_changed", "_changes", "_executions", "_taken", "times")

    def __init__(self, executions: Executions, changes: Sequence[_Change]) -> None:
        self._executions = executions
        self._changes = changes
        self._taken = self._changed = 0
        self.times: list[int] = []

    def due(self) -> int:
        """When the first log is due."""
        found = _NEVER
        for log in self._executions.logs:
            if log.due is not None and log.due < found:
                found = log.due
        return found

    def flush(self) -> int:
        """Note the executions that have ended; when a log is due again."""
        executions, times, first = self._executions, self.times, self._taken
        if self._changes:
            TOOL_LOCK.hold(self._add_changes)
        count = executions.ended(times)
        if count > first:
            # Before: an error of a log leaves what has been noted, and it is not noted again.
            self._taken = count
            TOOL_LOCK.hold(executions.add, times, first, count)
            # All of them are there when a log is looked at, which has not been due before the last.
            last = times[executions.place_of_end(count - 1)]
            for log in executions.logs:
                if log.due is not None and last >= log.due:
                    look(log, last)
        return self.due()

    def _add_changes(self) -> None:
        """Add the changes of memory that have ended; with the lock of tools."""
        changes, times, first = self._changes, self.times, self._changed
        # Those that have not ended are the last ones.
        while self._changed < len(changes) and changes[self._changed][2] < len(times):
            self._changed += 1
        # MemoryChange.add(), inlined: no function for each operator.
        for change, begun, ended in changes[first : self._changed]:
            before, after, use = times[begun], times[ended], change.use
            if before > use.peak:
                use.peak = before
            if after > use.peak:
                use.peak = after
            change.bytes += after - before
