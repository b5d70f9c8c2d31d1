"""Runs instrumentation routines: isolated from AD, alone, and watched for in-place changes.

Core's dispatcher enters and leaves a tool's code once for each routine, through
:class:`RoutineCall` on this driver's side. :class:`RoutineDispatcher` runs the routines of
one point together where nothing could notice the difference::

    values = dispatcher.run_all(plan.before, values)

Everything around them is then done once for the point, and in one function: it is the
largest part of what an operator of a small model costs. What is rare (results, wrong
selections) is left to core.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Protocol

import torch

from amanda.engine.dispatch import Dispatcher, charge
from amanda.engine.notes import note
from amanda.engine.plan import ActionPlan
from amanda.errors import InPlaceWarning
from amanda.inline import (
    Check,
    Counter,
    Log,
    MemoryChange,
    ShapeSum,
    Timer,
    begun_by,
    checked_by,
    ended_by,
    is_counter,
    summed_by,
)
from amanda.inline.steps import StepKind, lowered_all
from amanda.interface.action import Action, ActionKind
from amanda.interface.calls import OpCall
from amanda.state import STATE, TOOL_LOCK, UNPAUSED, LiveScope
from amanda_torch import _internals

# Half of what a with-statement costs.
_acquire = TOOL_LOCK.acquire
_release = TOOL_LOCK.release
_is_owned = TOOL_LOCK.is_owned
_PENDING: Any = object()
_REPLACEMENTS = frozenset({ActionKind.REPLACE_OP, ActionKind.REPLACE_BACKWARD_OP})
_unpaused = UNPAUSED
_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = _internals.set_grad_enabled
_dispatch_depth = _internals.dispatch_depth
_mode_depth = _internals.mode_depth
_mode_at = _internals.mode_at
_pop_mode = _internals.pop_mode
_push_mode = _internals.push_mode
_reading = _internals.READING
_no_overrides = _internals.no_overrides
_version_of = _internals.version_of
_versions_of = _internals.versions_of


class BackwardRoutines:
    """The routines of one backward operator, all of whose analyses have run.

    Attributes:
        before, after: those before and after it.
        blind_before, blind_after: whether none of these takes a tensor, or takes part in AD.
        counters_before, counters_after: see :func:`counters_of`.
        inlined_before, inlined_after: see :func:`inlined_around`.
        steps_before, steps_after: their steps, which the extension reads.
    """

    __slots__ = (
        "after",
        "before",
        "blind_after",
        "blind_before",
        "counters_after",
        "counters_before",
        "inlined_after",
        "inlined_before",
        "steps_after",
        "steps_before",
    )

    def __init__(self, before: Sequence[Action], after: Sequence[Action]) -> None:
        self.before = before
        self.after = after
        self.counters_before = counters_of(before)
        self.counters_after = counters_of(after)
        self.inlined_before, self.inlined_after, _ = inlined_around(before, after)
        self.steps_before, self.steps_after = lowered_all(before), lowered_all(after)
        self.blind_before = _are_blind(before)
        self.blind_after = _are_blind(after)


LOOKING = frozenset({StepKind.CHECK, StepKind.SHAPE_SUM})
"""The kinds of steps that look at tensors."""


def counters_of(actions: Sequence[Action]) -> Sequence[Counter] | None:
    """The counters that are all that these actions run; None if some runs something else."""
    found: list[Counter] = []
    # For each operator that is new, as what follows: a generator would cost frames.
    for action in actions:
        if not (is_counter(action.func) and action.select == () and not action.kwargs):
            return None
        found.append(action.func)  # type: ignore[arg-type]
    return found


def _are_blind(actions: Sequence[Action]) -> bool:
    for action in actions:  # noqa: SIM110 - likewise
        if action.select != () or action.differentiable:
            return False
    return True


def selected(action: Action, values: Sequence[Any]) -> Sequence[Any]:
    """The values that an action selects, which are there."""
    return values if action.select is None else [values[index] for index in action.select]


Inlined = tuple[Callable[..., Any], ...]
"""Routines of ``amanda.inline`` that C can run."""


def inlined_around(
    before: Sequence[Action], after: Sequence[Action]
) -> tuple[Inlined | None, Inlined | None, Sequence[Check | ShapeSum]]:
    """Find the routines around an operator that C can run without Python.

    Returns:
        The routines of each point, None for one with a routine that C cannot run: the two routines
        of a check or a sum run both in C, or both in Python. These, among what C runs.
    """
    points: list[Inlined | None] = []
    checks: dict[Check | ShapeSum, None] = {}
    for actions in (before, after):
        # For each operator that is new: what costs no function comes first.
        for action in actions:
            func = action.func
            if action.kwargs or action.differentiable:
                break
            if type(func) is not MethodType:
                if type(func) is not Counter or action.select != ():
                    break
            elif action.select is None or func.__func__ is ShapeSum.after:
                if (check := checked_by(func) or summed_by(func)) is None:
                    break
                checks[check] = None
            elif action.select != () or not is_measuring(func):
                break
        else:
            points.append(tuple([action.func for action in actions]))
            continue
        points.append(None)
    if checks and None in points:
        return None, None, ()
    return points[0], points[1], tuple(checks)


def is_measuring(routine: object) -> bool:
    """Whether a routine is one of the two of a timer, or of a change of memory."""
    # Most are neither: those are told at once, as it is asked for each action of a new operator.
    if type(routine) is not MethodType:
        return False
    cls, function = type(routine.__self__), routine.__func__
    if cls is Timer:
        return function is Timer.start or function is Timer.stop
    return cls is MemoryChange and (begun_by(routine) or ended_by(routine)) is not None


def as_routine(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a tool that takes no tensor as a routine would be called."""
    thread = vars(STATE)
    gradients, outer, start = _is_grad_enabled(), thread["paused"], 0.0
    try:
        thread["paused"] = outer + 1
        if gradients:
            _set_grad_enabled(False)
        _acquire()
        start = _clock()
        result = _internals.without_modes(function, *args)
        charge(thread["scopes"], _clock() - start)
        _release()
        if gradients:
            _set_grad_enabled(True)
        thread["paused"] = outer
    except BaseException:
        _undo(thread, outer, gradients, start)
        raise
    return result


def look(log: Log, now: int) -> None:
    """Call ``look`` of a log that is due, for a timer that runs in C, as a routine would."""
    as_routine(log.look, now)


def count(counters: Sequence[Counter]) -> None:
    """Count one execution in each counter.

    Code of Amanda's that calls no framework: neither modes nor gradients matter to it.
    """
    try:
        _acquire()
        for counter in counters:
            counter.count += 1
        _release()
    except BaseException:
        if _is_owned():
            _release()
        raise


class Deferred(Protocol):
    """A call of a routine that has been put off.

    Attributes:
        function: calls it.
        action: its action; None for a call that notes by itself which routine has raised.
    """

    @property
    def function(self) -> Any: ...
    @property
    def action(self) -> Action | None: ...


class RoutineDispatcher(Dispatcher):
    """Core's dispatcher, with faster ways for routines that are isolated from AD.

    Attributes:
        changes: counts up where a routine changes a value, or replaces an operator.
        settled: the routines of backward operators, by id and scopes. It is kept here, and not in
            the hooks, since a graph that outlives the scope would keep the tools alive.
        native: the extension of the gate, which does some of what is done for backward operators;
            None without the gate.
    """

    changes = 0
    native: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.settled: dict[object, BackwardRoutines] = {}
        self._has_told = False

    def tells_of_transforms(self) -> bool:
        """Whether to report, once, that something is not done under ``torch.func``."""
        tells, self._has_told = not self._has_told, True
        return tells

    def call_alone(
        self, scope: LiveScope, function: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        """Call code of a tool as :meth:`Dispatcher.call_alone` does, in one function.

        Modes of the program, and classes of its tensors, see nothing of it.
        """
        depth = _mode_depth()
        if depth > 1 or len(_unpaused) != 1 or _reading.is_on or _dispatch_depth():
            # A function mode of the program's sees what switches the recording of gradients.
            _internals.without_modes(
                _internals.without_dispatch_modes, self._call_alone, scope, function, args
            )
            return
        thread = vars(STATE)
        mode = _mode_at(0) if depth else None
        gradients, outer, owned = _is_grad_enabled(), thread["paused"], _is_owned()
        start = 0.0
        try:
            thread["paused"] = outer + 1
            if depth:
                _pop_mode()
            if gradients:
                _set_grad_enabled(False)
            if not owned:
                _acquire()
            start = _clock()
            with _no_overrides():
                function(*args)
            scope.statistics.tool_seconds += _clock() - start
            if not owned:
                _release()
            if gradients:
                _set_grad_enabled(True)
            if depth:
                _push_mode(mode)
            thread["paused"] = outer
        except BaseException:
            if depth:
                _internals.set_modes((mode,))
            if gradients:
                _set_grad_enabled(True)
            if start:
                scope.statistics.tool_seconds += _clock() - start
            if not owned and _is_owned():
                _release()
            thread["paused"] = outer
            raise

    def _call_alone(
        self, scope: LiveScope, function: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        with _no_overrides():
            super().call_alone(scope, function, args)

    def invalidate(self) -> None:
        """Scopes, switches or recorded actions have changed, or the driver is detached."""
        # A new one: another thread may be about to put something out of date into the old one.
        self.settled = {}
        if self.native is not None:
            self.native.forget()

    def is_plain_thread(self, thread: dict[str, Any]) -> bool:
        """Whether backward operators that run in a thread now may take the routines in `settled`.

        Args:
            thread: ``vars(STATE)`` of the current thread.
        """
        return (
            thread["enabled"]
            and thread["cache"]
            and not (thread["paused"] or thread["held"] or self._quiet)
        )

    def put(
        self,
        action: Action,
        values: list[Any],
        selected: Sequence[Any],
        result: Any,
        shown: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Put a result in as :meth:`Dispatcher.put` does, and count the change."""
        changed = super().put(action, values, selected, result, shown)
        if changed is not values:
            self.changes += 1
        return changed

    def replace(self, action: Action, values: list[Any], call: OpCall | None = None) -> Any:
        """Replace an operator as :meth:`Dispatcher.replace` does, and count it."""
        self.changes += 1
        return super().replace(action, values, call)

    def run_all(self, actions: Sequence[Action], values: list[Any]) -> list[Any]:
        """Run the routines of one point, in order; function modes are hidden.

        Returns and raises what :meth:`Dispatcher.run` does.
        """
        if not actions:
            return values
        # runs_together(), inlined: this runs at every point with routines.
        together = len(_unpaused) == 1 and _internals.is_plain() and not _reading.is_on
        if together:
            for action in actions:
                together = together and not action.differentiable
        if together:
            return self.run_together(actions, values, vars(STATE))
        return super().run_all(actions, values)

    def runs_together(self) -> bool:
        """Whether nothing would notice the framework calls of routines that run now."""
        return len(_unpaused) == 1 and _internals.is_plain() and not _reading.is_on

    def run_deferred(self, calls: Sequence[Deferred]) -> tuple[int, Any] | None:
        """Call routines of several points, in order, for which the code of tools is entered once.

        To be used where :meth:`runs_together` says so.

        Returns:
            The number of one that has returned something, which it should not, and what that is: no
            further one is called; None if all have been called.
        """
        thread, call, found = vars(STATE), calls[0] if calls else None, None
        gradients, outer, start = _is_grad_enabled(), thread["paused"], 0.0
        try:
            thread["paused"] = outer + 1
            if gradients:
                _set_grad_enabled(False)
            _acquire()
            start = _clock()
            with _no_overrides():
                for number, call in enumerate(calls):
                    result = call.function()
                    if result is not None:
                        found = number, result
                        break
            charge(thread["scopes"], _clock() - start)
            _release()
            if gradients:
                _set_grad_enabled(True)
            thread["paused"] = outer
        except BaseException as error:
            _undo(thread, outer, gradients, start)
            action = None if call is None else call.action
            if action is not None:
                note(error, action.routine, action.op_id)
            raise
        return found

    def run_together(
        self, actions: Sequence[Action], values: list[Any], thread: dict[str, Any]
    ) -> list[Any]:
        """Run isolated routines on `values`; the list with their results put in.

        To be used where no other driver has to be told and ``_internals.is_plain()`` holds, so
        that nothing notices the framework calls of a routine.

        Args:
            actions: at least one; none is differentiable.
            values: the tensors that they select from.
            thread: ``vars(STATE)`` of the current thread.

        Returns:
            `values` itself when nothing is changed.

        Raises:
            SelectionError, RoutineResultError: as :meth:`Dispatcher.run` raises them.
        """
        gradients, outer, start = _is_grad_enabled(), thread["paused"], 0.0
        # An interrupt may come at any line: all is undone in the block, or else after it.
        try:
            thread["paused"] = outer + 1
            if gradients:
                _set_grad_enabled(False)
            _acquire()
            start = _clock()
            done, selected, result = _until_result(actions, values)
            seconds = _clock() - start
            # charge(), inlined.
            for scope in thread["scopes"]:
                scope.statistics.tool_seconds += seconds
            _release()
            if gradients:
                _set_grad_enabled(True)
            thread["paused"] = outer
        except BaseException:
            _undo(thread, outer, gradients, start)
            raise
        if result is None and done == len(actions):
            return values
        return self.go_on(actions, done, values, result, selected)

    def go_on(
        self,
        actions: Sequence[Action],
        done: int,
        values: list[Any],
        result: Any,
        selected: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Put in what a routine has returned, and run the routines that follow it.

        Args:
            done: how many have run.
            values: the tensors that they select from.
            result: of the last of them.
            selected: what that was given; None where nobody has noted it.

        Returns:
            `values` itself when nothing is changed.
        """
        if result is not None:
            action = actions[done - 1]
            if selected is None:
                select = action.select
                selected = values if select is None else [values[index] for index in select]
            values = self.put(action, values, selected, result)
        for action in actions[done:]:
            values = self.run(action, values)
        return values

    def run_blind(self, actions: Sequence[Action], thread: dict[str, Any]) -> None:
        """Run isolated routines that take no tensor, at one end of a backward operator.

        This is all that a counter or a clock needs there: function modes are hidden as by
        ``_internals.without_modes``, and the rest is as in :meth:`run_together`.

        Args:
            thread: ``vars(STATE)`` of the current thread.
        """
        depth = _mode_depth()
        is_alone = len(_unpaused) == 1 and not _dispatch_depth()
        if depth > 1 or not is_alone or _internals.in_forward_ad():
            _internals.without_modes(self.run_all, actions, [])
            return
        returned, action = None, actions[0]
        mode = _mode_at(0) if depth else None
        gradients, outer, start = _is_grad_enabled(), thread["paused"], 0.0
        try:
            thread["paused"] = outer + 1
            if depth:
                _pop_mode()
            if gradients:
                _set_grad_enabled(False)
            _acquire()
            start = _clock()
            for action in actions:
                value = action.func(**action.kwargs) if action.kwargs else action.func()
                if value is not None:
                    returned = action, value
            seconds = _clock() - start
            # charge(), inlined: it is a tenth of all that is done here.
            for scope in thread["scopes"]:
                scope.statistics.tool_seconds += seconds
            _release()
            if gradients:
                _set_grad_enabled(True)
            if depth:
                _push_mode(mode)
            thread["paused"] = outer
        except BaseException as error:
            if depth:
                _internals.set_modes((mode,))
            _undo(thread, outer, gradients, start)
            note(error, action.routine, action.op_id)
            raise
        if returned is not None:
            # An empty sequence is as good as nothing; anything else is an error.
            self.put(returned[0], [], [], returned[1])

    def run_between(
        self,
        plan: ActionPlan,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        thread: dict[str, Any],
    ) -> Any:
        """Run an operator between isolated routines that take no tensor.

        Where, and with what `thread`: as :meth:`run_together`, of which this is the shorter
        form for both points of an operator at once.
        """
        result, actions = _PENDING, plan.before
        while True:
            if actions:
                returned, action = None, actions[0]
                gradients, outer, start = _is_grad_enabled(), thread["paused"], 0.0
                try:
                    thread["paused"] = outer + 1
                    if gradients:
                        _set_grad_enabled(False)
                    _acquire()
                    start = _clock()
                    for action in actions:
                        value = action.func(**action.kwargs) if action.kwargs else action.func()
                        if value is not None:
                            returned = action, value
                    charge(thread["scopes"], _clock() - start)
                    _release()
                    if gradients:
                        _set_grad_enabled(True)
                    thread["paused"] = outer
                except BaseException as error:
                    _undo(thread, outer, gradients, start)
                    note(error, action.routine, action.op_id)
                    raise
                if returned is not None:
                    # An empty sequence is as good as nothing; anything else is an error.
                    self.put(returned[0], [], [], returned[1])
            if result is not _PENDING:
                return result
            result = func(*args, **kwargs) if kwargs else func(*args)
            actions = plan.after


def _undo(thread: dict[str, Any], outer: int, gradients: bool, start: float) -> None:
    """Undo what goes with a tool's code, as far as it was done: no routine runs within another."""
    thread["paused"] = outer
    if gradients:
        _set_grad_enabled(True)
    if _is_owned():
        if start:
            charge(thread["scopes"], _clock() - start)
        _release()


def _until_result(actions: Sequence[Action], values: list[Any]) -> tuple[int, Sequence[Any], Any]:
    """Call routines until one returns something, or cannot be given what it selects.

    Returns:
        How many have run, what the last of them was given, and what it returned.
    """
    done = 0
    selected: Sequence[Any] = ()
    versions: Sequence[int | None]
    # In this function: it is asked around each routine.
    try:
        counts, versions = True, [*map(_version_of, values)]
    except (AttributeError, RuntimeError):
        counts, versions = False, _versions_of(values)
    for action in actions:
        select = action.select
        try:
            selected = values if select is None else [values[index] for index in select]
        except IndexError:
            # The dispatcher says what is wrong.
            break
        try:
            kwargs = action.kwargs
            result = action.func(*selected, **kwargs) if kwargs else action.func(*selected)
        except BaseException as error:
            note(error, action.routine, action.op_id)
            raise
        done += 1
        now: Sequence[int | None]
        now = [*map(_version_of, values)] if counts else _versions_of(values)
        if now != versions:
            versions = now
            warn_of_change(action)
        if result is not None:
            return done, selected, result
    return done, selected, None


# -- one routine ----------------------------------------------------------


class RoutineCall:
    """The context of one routine: isolated from AD, and watched for in-place changes.

    Dispatch modes of the program see nothing of a routine that is isolated, as selective
    checkpoints would take its operators for the model's. A replacement stands for an operator of
    the program, and they see it. Function modes have been hidden by whoever runs the routine.
    """

    __slots__ = (
        "_action",
        "_forward",
        "_given",
        "_grad",
        "_hidden",
        "_isolated",
        "_running",
        "_selected",
        "_versions",
    )

    def __init__(self, action: Action, selected: Sequence[Any], isolated: bool) -> None:
        self._action = action
        self._isolated = isolated
        self._hidden: list[Any] = []
        # Under a functorch transform tensors are wrappers, whose versions say nothing.
        is_watched = isolated and not _internals.in_functorch()
        self._given = selected
        self._selected = selected if is_watched else ()
        self._versions = _internals.versions_of(self._selected)

    def __enter__(self) -> None:
        action = self._action
        looks = action.tool.only_watches or _internals.READING.is_refused
        is_reading = looks and action.kind not in _REPLACEMENTS
        self._running: _internals.reading | _internals.running
        self._running = _internals.reading(self._given) if is_reading else _internals.running()
        self._grad = torch.is_grad_enabled()
        self._forward = _internals.in_forward_ad()
        try:
            self._running.__enter__()
            if not self._isolated:
                return
            _internals.set_grad_enabled(False)
            if self._forward:
                _internals.set_forward_grad_enabled(False)
            if self._action.kind not in _REPLACEMENTS:
                _internals.hide_dispatch_modes(self._hidden)
        except BaseException:
            self.__exit__(None)
            raise

    def __exit__(self, *raised: object) -> None:
        # After an interrupt it is called again.
        _internals.show_dispatch_modes(self._hidden)
        self._running.__exit__()
        if self._isolated:
            _internals.set_grad_enabled(self._grad)
            if self._forward:
                _internals.set_forward_grad_enabled(True)
        selected, self._selected = self._selected, ()
        if raised[0] is None and _internals.versions_of(selected) != self._versions:
            warn_of_change(self._action)


def warn_of_change(action: Action, stacklevel: int = 6) -> None:
    """Warn that a routine has changed a tensor of the model in place.

    Args:
        stacklevel: as :func:`warnings.warn` takes it.
    """
    warnings.warn(
        f"{action.routine} changed a tensor of op {action.op_id} in place; "
        "the change outlives the scope if it is a parameter, and breaks the backward "
        "pass if autograd has saved it: return a new tensor instead",
        InPlaceWarning,
        stacklevel=stacklevel,
    )
