"""Counters, sums and timers of ``amanda.inline`` in a graph's code, of which nothing else runs.

The code of an operator only says that it has been reached, and what the clock says. What follows
from it is done once, when the run has ended or raised::

    deferred = Deferred()
    lines = deferred.around(plan, ["x = relu(y)"])      # the operator, between its routines
    deferred.beginning(), deferred.ending()             # of the graph's function
    deferred.names                                      # the globals that all of these use
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Self

import attrs
import torch
from torch import nn

from amanda.engine.plan import ActionPlan
from amanda.inline import Counter, Log, ShapeSum, Timer, started_by, stopped_by, summed_by
from amanda.interface.action import Action
from amanda.interface.points import Point
from amanda.state import TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.routines import RoutineDispatcher, inlined_around, look, timers_around

_NEVER = 1 << 63
"""Nanoseconds at which no log is due."""


def is_deferrable(plan: ActionPlan) -> bool:
    """Whether all routines of an operator are counters and timers that can be written so."""
    before, after, _ = inlined_around(plan.before, plan.after)
    if before is None or after is None or not all(map(_is_known, (*before, *after))):
        return False
    begun, ended = ([one for r in point if (one := summed_by(r))] for point in (before, after))
    if [*map(id, begun)] != [*map(id, ended)]:
        return False
    # A timer that is stopped elsewhere runs as everything else does.
    return timers_around(before, after) is not None


def _is_known(routine: Any) -> bool:
    if type(routine) is Counter:
        return True
    return bool(started_by(routine) or stopped_by(routine) or summed_by(routine))


_Execution = tuple[Timer, int, int]
"""What one operator leaves for a timer, with the places of start and end among a run's times."""


class StaticSum:
    """What one operator adds to a sum in each run: in a graph, sizes are always the same.

    Args:
        to: the sum.

    Attributes:
        known: what it adds, and the shapes of its tensors; None before the first run.
    """

    __slots__ = ("known", "to")

    def __init__(self, to: ShapeSum) -> None:
        self.to = to
        self.known: tuple[int | None, tuple[Any, Any]] | None = None

    @classmethod
    def of(cls, to: ShapeSum, inputs: Sequence[Any], outputs: Sequence[Any]) -> Self:
        """That of an operator with these tensors."""
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
    """

    __slots__ = ("_action", "_dispatcher", "_tensors")

    def __init__(
        self, dispatcher: RoutineDispatcher, action: Action, tensors: Sequence[Any]
    ) -> None:
        self._dispatcher = dispatcher
        self._action = action
        self._tensors = [None if tensor is None else stand_in(tensor) for tensor in tensors]

    def run(self) -> None:
        """Call it."""
        self._dispatcher.run_all((self._action,), self._tensors)


class DeferredPoint:
    """The routines at the entry or the exit of a module, called when the code has run.

    Args:
        dispatcher: runs them.
        point: which of the two.
        called: the call of the module.
        inputs, outputs: the tensors there; they are kept without their values.
    """

    __slots__ = ("_called", "_dispatcher", "_inputs", "_outputs", "_point")

    def __init__(
        self,
        dispatcher: RoutineDispatcher,
        point: Point,
        called: CalledModule,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._point = point
        self._called = called
        self._inputs = [*map(_internals.valueless, inputs)]
        self._outputs = None if outputs is None else [*map(_internals.valueless, outputs)]

    def run(self) -> None:
        """Call them."""
        self._called.tell(self._dispatcher, self._point, self._inputs, self._outputs)


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
        dispatcher.points.module(
            dispatcher.scopes(),
            point,
            module=self.path,
            id=self.id,
            target=self.module(),
            inputs=inputs,
            outputs=outputs,
        )


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
    """The counters, sums and timers of one graph.

    Args:
        native: the extension of the gate, which adds executions to timers; None without the gate.

    Attributes:
        names: the globals that the code uses.
    """

    def __init__(self, native: Any = None) -> None:
        self._native = native
        self._counters: list[Added] = []
        self._has_sums = self._is_learned = False
        self._executions: list[_Execution] = []
        self._logs: list[Log] = []
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

    def beginning(self) -> list[str]:
        """The statements before those of the graph."""
        lines = ["amanda_counted = 0"] if self._counters else []
        if self._has_sums:
            lines += ["amanda_is_new = amanda_has_new()"]
        if self._executions:
            lines += ["amanda_run = amanda_timed()"]
            lines += ["amanda_note, amanda_due = amanda_run.times.append, amanda_run.due()"]
        return lines

    def ending(self) -> list[str]:
        """The statements behind them, also after an error."""
        lines = ["amanda_count(amanda_counted)"] if self._counters else []
        return [*lines, "amanda_run.flush()"] if self._executions else lines

    # -- called by the code -----------------------------------------------

    def _count(self, reached: int) -> None:
        """Count one execution in the counters that a run has reached."""
        TOOL_LOCK.hold(increase, self._counters[:reached])

    def _has_new(self) -> bool:
        """Whether a run has yet to reach all sums."""
        if self._is_learned:
            return False
        sums = [one for one in self._counters if type(one) is StaticSum]
        self._is_learned = all(one.known is not None for one in sums)
        return not self._is_learned

    def _timed(self) -> _TimedRun:
        return _TimedRun(self._executions, self._logs, self._native)


Added = Counter | StaticSum | DeferredCall | DeferredPoint
"""What an execution adds to, or calls."""


def increase(counters: Sequence[Added]) -> None:
    """Add one execution to each; with the lock of tools."""
    for counter in counters:
        if type(counter) is Counter:
            counter.count += 1
        elif type(counter) is DeferredCall or type(counter) is DeferredPoint:
            counter.run()
        elif counter.known is not None:  # type: ignore[union-attr]
            counter.to.add(*counter.known)  # type: ignore[union-attr]


class _TimedRun:
    """What the clock has said in one run.

    Args:
        executions: those of a whole run.
        logs: those of its timers.
        native: see :class:`Deferred`.

    Attributes:
        times: nanoseconds, in the order of the code.
    """

    __slots__ = ("_executions", "_logs", "_native", "_taken", "times")

    def __init__(
        self, executions: Sequence[_Execution], logs: Sequence[Log], native: Any = None
    ) -> None:
        self._executions = executions
        self._logs = logs
        self._native = native
        # In a list: an error of a log leaves what has been noted, and it is not noted again.
        self._taken = [0]
        self.times: list[int] = []

    def due(self) -> int:
        """When the first log is due."""
        found = _NEVER
        for log in self._logs:
            if log.due is not None and log.due < found:
                found = log.due
        return found

    def flush(self) -> int:
        """Note the executions that have ended; when a log is due again."""
        if self._native is not None:
            self._native.add_executions(self._executions, self.times, self._taken)
            return self.due()
        taken = self._taken[0]
        TOOL_LOCK.hold(self._note)
        for timer, _, place in self._executions[taken : self._taken[0]]:
            log, end = timer.log, self.times[place]
            if log is not None and log.due is not None and end >= log.due:
                look(log, end)
        return self.due()

    def _note(self) -> None:
        """Add what has ended to the timers and their logs."""
        times, native = self.times, threading.get_native_id()
        count = len(times)
        for timer, start_place, end_place in self._executions[self._taken[0] :]:
            if end_place >= count:
                return
            self._taken[0] += 1
            start, end = times[start_place], times[end_place]
            timer.executions += 1
            timer.nanoseconds += end - start
            log = timer.log
            if log is not None:
                log.numbers.extend((timer.number, start, end, native))
