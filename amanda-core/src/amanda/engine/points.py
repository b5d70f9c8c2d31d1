"""Runs the routines at derived points.

A driver reports modules, passes and optimizer steps as they occur::

    points = dispatcher.points
    points.forward_begins(scopes, "Net", trains=True)
    ...                                                 # the outermost module runs
    points.forward_ends(scopes, "Net")

Of modules a driver tells only where :meth:`Points.wants_modules` says so; passes, optimizer steps
and iterations are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda.engine.notes import note
from amanda.interface.points import Point, PointContext
from amanda.interface.tool import NOTED, REGISTERED
from amanda.state import STATE

if TYPE_CHECKING:
    from amanda.state import LiveScope

Scopes = Sequence["LiveScope"]

_NOTHING: Mapping[str, Any] = {}


class Points:
    """The derived points of one driver.

    Args:
        dispatcher: core's side of it, a :class:`amanda.engine.dispatch.Dispatcher`.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._namespace: str | None = None
        self._runs_at_once = True

    def is_wanted(self, scopes: Scopes) -> bool:
        """Whether a tool has a routine at any derived point."""
        return any(tool.has_routines_at(*Point) for scope in scopes for tool in scope.tools)

    def wants_modules(self, scopes: Scopes) -> bool:
        """Whether a tool has a routine at the entry or exit of modules."""
        points = Point.MODULE_ENTRY, Point.MODULE_EXIT
        return any(tool.has_routines_at(*points) for scope in scopes for tool in scope.tools)

    def module(self, scopes: Scopes, point: Point, **facts: Any) -> None:
        """Run the routines at the entry or the exit of a module.

        Args:
            facts: of :class:`~amanda.interface.points.PointContext`.
        """
        for scope in scopes:
            self._tell(scope, point, **facts)

    def forward_begins(
        self,
        scopes: Scopes,
        model: str,
        trains: bool,
        differentiates: bool = False,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """An outermost module is called.

        Args:
            model: the common beginning of its operators' ids.
            trains: whether it is in training, with gradients.
            differentiates: whether the gradients are computed with it, as in a run of a graph.
            facts: gives ``target`` and ``inputs`` of the point; called if a tool has a routine.
        """
        begun = 0
        try:
            for scope in scopes:
                begun += 1
                iterations = scope.iterations
                is_next = iterations.is_next(model, differentiates)
                if not is_next or not scope.alive or STATE.paused:
                    tell = partial(self._tell, scope)
                    begins = iterations.forward_begins(model, trains, tell, differentiates, is_next)
                    if begins and scope.routines_at(Point.FORWARD_BEGIN):
                        self._tell(scope, Point.FORWARD_BEGIN, id=model, **facts())
                    continue
                can_note = scope.noting_of == REGISTERED.count and not differentiates
                number, begin = iterations.count, iterations.begin
                if not (can_note and number % NOTED and iterations.follow(model, trains)):
                    # Three points at each call of a small model: tools' code is entered once.
                    args = scope, model, trains, differentiates, facts
                    self._dispatcher.call_alone(scope, self._next_begins, args)
                    continue
                # Outside of tools' code; it takes less than to look at the clock again.
                iterations.begin = end = iterations.end
                for tool, note_end in scope.noting:
                    try:
                        note_end(number, begin, end)
                    except BaseException as error:
                        _note(error, tool, note_end, Point.ITERATION_END)
                        raise
        except BaseException:
            self.forward_is_given_up(scopes[:begun])
            raise

    def forward_is_given_up(self, told: Scopes) -> None:
        """The outermost module is not run, since a tool has raised where its call begins."""
        for scope in told:
            scope.iterations.forwards = max(0, scope.iterations.forwards - 1)

    def _next_begins(
        self,
        scope: LiveScope,
        model: str,
        trains: bool,
        differentiates: bool,
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        """An iteration ends and another one begins with a forward pass; in tools' code."""
        iterations, following = scope.iterations, scope.following()
        number, begin = iterations.count, iterations.begin
        if following is not None and not differentiates and iterations.follow(model, trains):
            for tool, routine in following:
                try:
                    routine(number, begin, iterations.end)
                except BaseException as error:
                    _note(error, tool, routine, Point.ITERATION_END)
                    raise
            iterations.begin, begins = time.perf_counter(), True
        else:
            run = partial(self._run, scope)
            begins = iterations.forward_begins(model, trains, run, differentiates, is_next=True)
        if (
            begins
            and scope.idle_forwards != REGISTERED.count
            and scope.routines_at(Point.FORWARD_BEGIN)
        ):
            self._run(scope, Point.FORWARD_BEGIN, id=model, **facts())

    def forward_ends(self, told: Scopes, model: str, facts: Mapping[str, Any] = _NOTHING) -> None:
        """The outermost module has returned, or raised.

        Args:
            facts: of a run of a graph, ``target`` and ``inputs`` of the point, as far as they are
                known.
        """
        for scope in told:
            # In one function, as above.
            iterations = scope.iterations
            iterations.forwards = depth = max(0, iterations.forwards - 1)
            is_told = not depth and scope.idle_forwards != REGISTERED.count
            if is_told and scope.routines_at(Point.FORWARD_END):
                self._tell(scope, Point.FORWARD_END, id=model, **facts)

    def backward_begins(self) -> Scopes:
        """A backward pass begins; returns the scopes to notify at its end."""
        scopes: Scopes = self._dispatcher.scopes()
        for scope in scopes:
            tell = partial(self._tell, scope)
            scope.iterations.backward_begins(tell)
            tell(Point.BACKWARD_BEGIN)
        return scopes

    def backward_ends(self, told: Scopes) -> None:
        """A backward pass has ended."""
        for scope in told:
            tell = partial(self._tell, scope)
            tell(Point.BACKWARD_END)
            scope.iterations.backward_ends(tell)

    def optimizer_begins(self) -> Scopes:
        """An optimizer begins a step; returns the scopes to notify at its end."""
        scopes: Scopes = self._dispatcher.scopes()
        for scope in scopes:
            # A step that raised has not reported its end.
            scope.iterations.optimizing = True
        return scopes

    def optimizer_ends(self, told: Scopes, has_stepped: bool = True) -> None:
        """An optimizer has stepped, or raised."""
        for scope in told:
            scope.iterations.optimizing = False
            if has_stepped:
                scope.iterations.optimizer_ends(partial(self._tell, scope))

    def call_optimizer(
        self, step: Callable[[], Any], steps: Callable[[], int | None] = lambda: None
    ) -> Any:
        """Run an optimizer step, and report it.

        Args:
            step: the call of the optimizer.
            steps: counts its steps, where a call of it may only add up gradients; gives None where
                each call steps.
        """
        before, has_stepped = steps(), False
        told = self.optimizer_begins()
        try:
            result = step()
            has_stepped = before is None or steps() != before
        finally:
            self.optimizer_ends(told, has_stepped)
        return result

    def iteration_ends(self, scope: LiveScope) -> None:
        """The program says that an iteration has ended."""
        iterations = scope.iterations
        number = iterations.count
        # As where a forward pass begins: outside of tools' code.
        is_told = scope.alive and not STATE.paused and scope.following() is not None
        can_note = is_told and scope.noting_of == REGISTERED.count and number % NOTED
        if not (can_note and iterations.end_unbegun()):
            iterations.new_iteration(partial(self._tell, scope))
            return
        for tool, note_end in scope.noting:
            try:
                note_end(number, None, iterations.end)
            except BaseException as error:
                _note(error, tool, note_end, Point.ITERATION_END)
                raise

    def finish(self, scope: LiveScope) -> None:
        """A scope is about to end."""
        scope.iterations.finish(partial(self._tell, scope))

    def _tell(self, scope: LiveScope, point: Point, **facts: Any) -> None:
        """Run the routines of a scope's tools at one point."""
        if scope.alive and not STATE.paused and scope.routines_at(point):
            # It takes the lock of tools' code.
            args = scope, point
            self._dispatcher.call_alone(scope, partial(self._run, **facts), args)

    def _run(self, scope: LiveScope, point: Point, **facts: Any) -> None:
        """Run the routines at one point; in tools' code."""
        routines = scope.routines_at(point)
        if not routines or not scope.alive:
            return
        iterations = scope.iterations
        if point is Point.ITERATION_END:
            facts["end"] = iterations.end
        elif point is Point.ITERATION_BEGIN:
            facts["follows"] = iterations.contiguous
        if self._namespace is None:
            driver = self._dispatcher.driver
            self._namespace, self._runs_at_once = str(driver.namespace), driver.runs_at_once
        context = PointContext(
            point=point,
            namespace=self._namespace,
            runs_at_once=self._runs_at_once,
            iteration=iterations.count,
            begin=iterations.begin or None,
            **facts,
        )
        for tool, routine in routines:
            try:
                routine(context)
            except BaseException as error:
                _note(error, tool, routine, point, context.id)
                raise


def _note(
    error: BaseException, tool: Any, routine: Callable[..., Any], point: Point, place: str = ""
) -> None:
    """Tell in which routine an error was raised."""
    name = f"{type(tool).__name__}.{getattr(routine, '__name__', routine)}"
    note(error, name, place, f"{point.value} of ")
