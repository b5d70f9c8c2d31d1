"""The routines of one instrumentation point, run together.

:meth:`amanda.engine.dispatch.Dispatcher.run` enters and leaves a tool's code once for each
routine: paused, alone, isolated from AD, watched for in-place changes, charged to the
scope. Here that is done once for all of a point, in one function, since it is what an
operator of a small model costs most. What is rare is left to the dispatcher.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amanda.engine.dispatch import Dispatcher, charge, note
from amanda.engine.plan import ActionPlan
from amanda.interface.action import Action
from amanda.state import STATE, TOOL_LOCK
from amanda_torch import _internals
from amanda_torch.eager.routines import warn_of_change

# Half of what a with-statement costs.
_acquire = TOOL_LOCK.acquire
_release = TOOL_LOCK.release
_is_owned: Callable[[], bool] = TOOL_LOCK._is_owned  # type: ignore[attr-defined]
_PENDING: Any = object()
_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = _internals.set_grad_enabled


class Points:
    """Runs the routines of one thread's operators.

    To be used where no other driver is attached and no mode is on, so that framework
    calls of a routine meet nobody.
    """

    __slots__ = ("_dispatcher", "_thread")

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        # Faster than by STATE, which looks up the thread at each access.
        self._thread = vars(STATE)

    def run_blind(
        self, plan: ActionPlan, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operator between isolated routines that take no tensor."""
        thread = self._thread
        result, actions = _PENDING, plan.before
        while True:
            if actions:
                returned, action = None, actions[0]
                gradients = _is_grad_enabled()
                start = _clock()
                # From here to its end an interrupt may come after any call.
                thread["paused"] += 1
                try:
                    if gradients:
                        _set_grad_enabled(False)
                    _acquire()
                    for action in actions:
                        value = action.func(**action.kwargs) if action.kwargs else action.func()
                        if value is not None:
                            returned = action, value
                except BaseException as error:
                    note(error, action.routine, action.op_id)
                    raise
                finally:
                    thread["paused"] -= 1
                    if gradients:
                        _set_grad_enabled(True)
                    # It was not when this began: no routine is run by another one.
                    if _is_owned():
                        _release()
                    charge(thread["scopes"], _clock() - start)
                if returned is not None:
                    # An empty sequence is as good as nothing; else it is an error.
                    self._dispatcher.put(returned[0], [], [], returned[1])
            if result is not _PENDING:
                return result
            result = func(*args, **kwargs) if kwargs else func(*args)
            actions = plan.after

    def run(self, actions: Sequence[Action], values: list[Any]) -> list[Any]:
        """Run isolated routines on `values`; the list with their results put in.

        Returns `values` itself when nothing is changed.

        Raises:
            SelectionError, RoutineResultError: as those of :meth:`Dispatcher.run`.
        """
        thread = self._thread
        gradients = _is_grad_enabled()
        start = _clock()
        thread["paused"] += 1
        try:
            if gradients:
                _set_grad_enabled(False)
            _acquire()
            done, selected, result = _until_result(actions, values)
        finally:
            thread["paused"] -= 1
            if gradients:
                _set_grad_enabled(True)
            if _is_owned():
                _release()
            charge(thread["scopes"], _clock() - start)
        if result is not None:
            values = self._dispatcher.put(actions[done - 1], values, selected, result)
        for action in actions[done:]:
            values = self._dispatcher.run(action, values)
        return values


def _until_result(actions: Sequence[Action], values: list[Any]) -> tuple[int, Sequence[Any], Any]:
    """Call routines until one returns something, or cannot be given what it selects.

    Returns:
        How many have run, what the last of them was given, and what it returned.
    """
    done = 0
    selected: Sequence[Any] = ()
    versions = _internals.versions_of(values)
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
        now = _internals.versions_of(values)
        if now != versions:
            versions = now
            warn_of_change(action)
        if result is not None:
            return done, selected, result
    return done, selected, None
