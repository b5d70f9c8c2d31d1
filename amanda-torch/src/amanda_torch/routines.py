"""Runs instrumentation routines, isolated from AD, and detects their in-place changes.

Core's :class:`~amanda.engine.tool_code.ToolCode` enters a tool's code. :class:`RoutineDispatcher`
enters it once for all routines of a point if that makes no difference::

    values = dispatcher.run_all(plan.before, values)

Otherwise each routine has a context of its own, :class:`RoutineCall`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from amanda.engine.dispatch import Dispatcher
from amanda.engine.notes import note
from amanda.engine.tool_code import ToolCode
from amanda.errors import InPlaceWarning
from amanda.inline.steps import Around, Step, StepKind, around, joined, lowered_all
from amanda.interface.action import Action, ActionKind
from amanda.interface.calls import OpCall
from amanda.state import STATE, LiveScope, unwind
from amanda_torch import _internals

_REPLACEMENTS = frozenset({ActionKind.REPLACE_OP, ActionKind.REPLACE_BACKWARD_OP})
_dispatch_depth = _internals.dispatch_depth
_reading = _internals.READING
_no_overrides = _internals.no_overrides
_version_of = _internals.version_of
_versions_of = _internals.versions_of

TOOL_CODE = ToolCode()
"""Enters the code of tools at operators of PyTorch."""


class BackwardRoutines:
    """The routines of one backward operator, all of whose analyses have run.

    Attributes:
        before, after: routines before and after it.
        steps_before, steps_after: the steps of these routines, which the extension reads, too.
        ends: for before and after, the routines and their requirements, see
            :func:`amanda.inline.steps.around`; None if steps get the tensors on both sides of it.
    """

    def __init__(self, before: Sequence[Action], after: Sequence[Action]) -> None:
        self.before = before
        self.after = after
        steps = lowered_all(before), lowered_all(after)
        pairs = joined(*steps)
        needed = (*map(around, steps),) if pairs is None else (Around.BLIND, None)
        self.steps_before, self.steps_after = pairs or steps
        every = (before, after), (self.steps_before, self.steps_after), needed
        self.ends = (*zip(*every, strict=True),)


def selected(action: Action, values: Sequence[Any]) -> Sequence[Any]:
    """The existing values that an action selects."""
    return values if action.select is None else [values[index] for index in action.select]


def as_routine(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a tool that takes no tensor as a routine would be called."""
    return TOOL_CODE.enter(function, *args, isolated=True)


class RoutineDispatcher(Dispatcher):
    """Core's dispatcher, faster for routines that are isolated from AD.

    Attributes:
        changes: number of values that routines have changed, and of replaced operators.
        settled: the routines of backward operators, by id and scopes. Kept here and not in hooks: a
            graph that outlives the scope would keep the tools alive.
        native: the extension, which handles some backward operators; None without the gate.
    """

    changes = 0
    native: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.tool_code = TOOL_CODE
        self.settled: dict[object, BackwardRoutines] = {}
        self._warned: set[str] = set()

    def warn_once(self, message: str, op_id: str, advice: str) -> None:
        """Warn, once, of unexpected behaviour of the driver.

        Args:
            op_id: the first operator concerned.
        """
        if message not in self._warned:
            self._warned.add(message)
            _internals.warn_program(f"{message}, first at op {op_id}{advice}")

    def call_alone(
        self, scope: LiveScope, function: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        """Call code of a tool as :meth:`Dispatcher.call_alone` does.

        Modes of the program and classes of its tensors do not see it.
        """
        scopes = (scope,)
        with _no_overrides():
            if not _dispatch_depth():
                TOOL_CODE.enter(function, *args, isolated=True, scopes=scopes)
                return
            enter = partial(TOOL_CODE.enter, function, *args, isolated=True, scopes=scopes)
            _internals.without_dispatch_modes(enter)

    def invalidate(self) -> None:
        """Drop kept routines, since scopes, switches or recorded actions have changed, or the
        driver is detached."""
        # A new dictionary: another thread may be about to put an outdated entry into the old one.
        self.settled = {}
        if self.native is not None:
            self.native.forget()

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
        """Run the routines of one point, in order, hidden from function modes.

        Returns and raises as :meth:`Dispatcher.run`.
        """
        if not actions:
            return values
        together = _internals.is_untransformed() and not _reading.is_on
        if together:
            for action in actions:
                together = together and not action.differentiable
        if not together:
            changed: list[Any] = _internals.without_modes(super().run_all, actions, values)
            return changed
        done = TOOL_CODE.enter(until_result, actions, values, isolated=True)
        if done is not None:
            values = _internals.without_modes(self.go_on, actions, values, *done)
        return values

    def go_on(
        self, actions: Sequence[Action], values: list[Any], done: int, result: Any
    ) -> list[Any]:
        """Substitute the result of a routine, and run the remaining routines.

        Args:
            values: the tensors from which they select.
            done: number of routines that have run.
            result: of the last of them.

        Returns:
            `values` itself when nothing is changed.
        """
        if result is not None:
            action = actions[done - 1]
            values = self.put(action, values, selected(action, values), result)
        return super().run_all(actions[done:], values)

    def run_joined(self, routines: BackwardRoutines, inputs: list[Any], outputs: list[Any]) -> None:
        """Run the routines after a backward operator that get the tensors on both sides."""
        if _internals.is_untransformed() and not _reading.is_on:
            TOOL_CODE.enter(call_joined, routines.steps_after, inputs, outputs, isolated=True)
        else:
            self.run_all(routines.before, inputs)
            self.run_all(routines.after, outputs)

    def run_blind(self, steps: Sequence[Step]) -> None:
        """Run the steps of a point without tensors, such as counters and clocks."""
        if not steps:
            return
        if _dispatch_depth() or _internals.in_forward_ad():
            _internals.without_modes(super().run_all, [step.action for step in steps], [])
            return
        returned = TOOL_CODE.enter(_call_blind, steps, isolated=True)
        if returned is not None:
            # An empty sequence means None; anything else is an error.
            self.put(returned[0], [], [], returned[1])


# -- in tools' code -------------------------------------------------------


def _call_blind(steps: Sequence[Step]) -> tuple[Action, Any] | None:
    """Call routines; return the last one with a result, and its result."""
    returned = None
    for step in steps:
        action: Action = step.action
        try:
            value = action.func(**action.kwargs) if action.kwargs else action.func()
        except BaseException as error:
            note(error, action.routine, action.op_id)
            raise
        if value is not None:
            returned = action, value
    return returned


def call_joined(steps: Sequence[Step], inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Call the routines of steps that :func:`amanda.inline.steps.joined` has made."""
    versions = _versions_of(outputs)
    for step in steps:
        action: Action = step.action
        try:
            if step.kind is StepKind.EXECUTION:
                step.routine.note_execution(inputs, outputs if action.select is None else ())
            else:
                action.func()
        except BaseException as error:
            note(error, action.routine, action.op_id)
            raise
        if (now := _versions_of(outputs)) != versions:
            versions = now
            warn_of_change(action)


def until_result(actions: Sequence[Action], values: list[Any]) -> tuple[int, Any] | None:
    """Call routines until one returns a value, or selects a missing position.

    Returns:
        The number of routines that have run, and the result of the last of them; None if all have
        run without a result.
    """
    done = 0
    versions: Sequence[int | None]
    # Not in a function: it is read around each routine.
    try:
        counts, versions = True, [*map(_version_of, values)]
    except (AttributeError, RuntimeError):
        counts, versions = False, _versions_of(values)
    for action in actions:
        select = action.select
        try:
            given = values if select is None else [values[index] for index in select]
        except IndexError:
            # The dispatcher raises the error.
            break
        try:
            kwargs = action.kwargs
            result = action.func(*given, **kwargs) if kwargs else action.func(*given)
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
            return done, result
    return None if done == len(actions) else (done, None)


# -- one routine ----------------------------------------------------------


class RoutineCall:
    """The context of one routine: isolates it from AD, and detects in-place changes.

    Dispatch modes of the program do not see an isolated routine, since selective checkpoints would
    take its operators for the model's. They see a replacement, which represents an operator of the
    program. Function modes are hidden by the caller.
    """

    def __init__(self, action: Action, selected: Sequence[Any], isolated: bool) -> None:
        self._action = action
        self._isolated = isolated
        # Under a functorch transform tensors are wrappers, whose versions have no meaning.
        is_watched = isolated and not _internals.in_functorch()
        self._given = selected
        self._selected = selected if is_watched else ()
        self._versions = _internals.versions_of(self._selected)

    def __enter__(self) -> None:
        action, undo = self._action, STATE.undo
        self._mark = len(undo)
        may_read = action.tool.only_watches or _internals.READING.is_refused
        is_reading = may_read and action.kind not in _REPLACEMENTS
        running: _internals.reading | _internals.running
        running = _internals.reading(self._given) if is_reading else _internals.running()
        running.__enter__()
        if not self._isolated:
            return
        undo.append((_internals.set_grad_enabled, (torch.is_grad_enabled(),)))
        _internals.set_grad_enabled(False)
        if _internals.in_forward_ad():
            undo.append((_internals.set_forward_grad_enabled, (True,)))
            _internals.set_forward_grad_enabled(False)
        if action.kind not in _REPLACEMENTS:
            hidden: list[Any] = []
            undo.append((_internals.show_dispatch_modes, (hidden,)))
            _internals.hide_dispatch_modes(hidden)

    def __exit__(self, *raised: object) -> None:
        unwind(STATE.undo, self._mark)
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
