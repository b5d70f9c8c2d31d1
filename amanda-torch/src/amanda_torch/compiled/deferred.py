"""Additions to counters and sums, and calls of routines, after a run of compiled code.

Compiled code of a graph runs as it is, without the routines of its operators. The additions and
calls that these make are noted in the first run of the graph, and made together after each later
run::

    added = Additions([counter, StaticSum.of(flops, inputs, outputs)])
    result = code(*inputs)
    TOOL_LOCK.hold(added.add)
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import attrs
import torch
from torch import nn

from amanda.inline import (
    Counter,
    ShapeSum,
)
from amanda.interface.action import Action
from amanda.interface.points import Point
from amanda.state import TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.routines import (
    RoutineDispatcher,
    selected,
    warn_of_change,
)

Shapes = tuple[Any, Any]
"""The shapes of the inputs and of the outputs of an execution."""


class StaticSum:
    """A constant that one operator adds to a sum in each run, as sizes in a graph are fixed.

    Args:
        to: the sum.
        weight: the number that the operator adds; None if it is not known.
        shapes: of its tensors.
    """

    __slots__ = ("shapes", "to", "weight")

    def __init__(self, to: ShapeSum, weight: int | None, shapes: Shapes) -> None:
        self.to = to
        self.weight = weight
        self.shapes = shapes

    @classmethod
    def of(cls, to: ShapeSum, inputs: Sequence[Any], outputs: Sequence[Any]) -> Self:
        """The addition of an operator with these tensors."""
        shapes = TOOL_LOCK.hold(lambda: (to.shapes_of(inputs), to.shapes_of(outputs)))
        return cls(to, TOOL_LOCK.hold(to.weigh, shapes), shapes)


class DeferredCall:
    """A routine that is called when the code has run, see :func:`amanda.deferrable`.

    Args:
        dispatcher: runs it.
        action: its action.
        tensors: all tensors of its point; they are kept without their values.

    Attributes:
        dispatcher, action: the arguments of that name.
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
        dispatcher: runs the routines.
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
    """True if a routine may be called so."""
    return is_marked_deferrable(action.func) and not action.differentiable


def is_marked_deferrable(routine: Any) -> bool:
    """True if a tool has marked a routine so."""
    func = getattr(routine, "__func__", routine)
    return bool(getattr(func, "amanda_deferrable", False))


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without values."""
    return tensor.detach().to("meta")


Added = Counter | StaticSum | DeferredCall | DeferredPoint
"""A counter or sum that an execution adds to, or a function that it calls."""


class Additions:
    """The additions and calls of each run, sorted once: a run repeats no work that is the same in
    all.

    Args:
        every: in the order of the operators.
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
            weight = one.weight
            self.sums.append((one.to, weight or 0, one.shapes))
            if weight is None:
                self.unknown.append(one.to)
            if weight and one.to.total is not None:
                totals[one.to.total] = totals.get(one.to.total, 0) + weight
        self.totals = [*totals.items()]


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
