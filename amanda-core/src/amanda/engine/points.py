"""Runs the routines at derived points.

A driver reports modules, passes and optimizer steps as they occur::

    points = dispatcher.points
    points.forward_begins(scopes, "Net", trains=True)
    ...                                                 # the outermost module runs
    points.forward_ends(scopes, "Net")

A driver reports module calls only if :meth:`Points.wants_modules` is true. All other points are
rare and are always reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from amanda.engine.notes import note
from amanda.interface.points import Point, PointContext
from amanda.state import STATE

if TYPE_CHECKING:
    from amanda.state import LiveScope

Scopes = Sequence["LiveScope"]

Facts = Mapping[str, Any]
_NOTHING: Facts = {}


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
        """True if a tool has a routine at any derived point."""
        return any(tool.has_routines_at(*Point) for scope in scopes for tool in scope.tools)

    def wants_modules(self, scopes: Scopes) -> bool:
        """True if a tool has a routine at the entry or exit of modules."""
        points = Point.MODULE_ENTRY, Point.MODULE_EXIT
        return any(tool.has_routines_at(*points) for scope in scopes for tool in scope.tools)

    def module(self, scopes: Scopes, point: Point, **facts: Any) -> None:
        """Run the routines at the entry or the exit of a module.

        Args:
            facts: of :class:`~amanda.interface.points.PointContext`.
        """
        for scope in scopes:
            self._tell(scope, point, **facts)

    @contextmanager
    def module_call(
        self,
        scopes: Scopes,
        target: Any,
        inputs: Any,
        tensors_in: Callable[[Any], Sequence[Any]],
        trains: bool | None,
        **place: str,
    ) -> Iterator[Callable[[Any], Any]]:
        """Report a call of a module, and the forward pass of an outermost one.

        Yields a function: the caller passes the module's result to it, and gets that result back.

        Args:
            target, inputs: the module, and what it is given.
            tensors_in: gives the tensors of `inputs` and of the result, in order.
            trains: of an outermost module, whether it is in training; None for others.
            place: ``module`` and ``id`` of :class:`~amanda.interface.points.PointContext`.
        """
        facts = cache(lambda: {"target": target, "inputs": tensors_in(inputs)})
        is_wanted, outputs, failed = self.wants_modules(scopes), None, True
        told: Scopes = () if trains is None else scopes

        def returned(result: Any) -> Any:
            nonlocal outputs
            outputs = tensors_in(result) if is_wanted or told else None
            return result

        told = self.forward_begins(told, place["id"], bool(trains), facts=facts)
        try:
            if is_wanted:
                self.module(scopes, Point.MODULE_ENTRY, **place, **facts())
            try:
                yield returned
                failed = False
            finally:
                if is_wanted:
                    self.module(scopes, Point.MODULE_EXIT, outputs=outputs, **place, **facts())
        finally:
            self.forward_ends(told, place["id"], failed, {"outputs": outputs})

    def forward_begins(
        self,
        scopes: Scopes,
        model: str,
        trains: bool,
        differentiates: bool = False,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> Scopes:
        """An outermost module is called; returns the scopes to notify at its end: also those that
        a routine at the end of the last iteration has begun.

        Args:
            model: the common beginning of its operators' ids.
            trains: True if it is in training, with gradients.
            differentiates: True if the gradients are computed with it, as in a run of a graph.
            facts: gives ``target`` and ``inputs`` of the point; called if a tool has a routine.
        """
        told, begun = [*scopes], 0
        try:
            for scope in told:
                begun += 1
                tell = partial(self._tell, scope)
                begins = scope.iterations.forward_begins(
                    model, trains, tell, differentiates, partial(self._will_step, facts)
                )
                self._note_thread(scope)
                if begins and scope.routines_at(Point.FORWARD_BEGIN):
                    tell(Point.FORWARD_BEGIN, id=model, **facts())
                if self._dispatcher.driver.runs_at_once:
                    told += [new for new in self._dispatcher.scopes() if new not in told]
        except BaseException:
            # The outermost module is not run, since a tool has raised where its call begins.
            for scope in told[:begun]:
                scope.iterations.forward_ends(failed=True)
            raise
        return told

    def _will_step(self, facts: Callable[[], Mapping[str, Any]]) -> bool:
        return bool(self._dispatcher.driver.will_step(facts().get("target")))

    def forward_ends(self, told: Scopes, model: str, failed: bool, facts: Facts = _NOTHING) -> None:
        """The outermost module has returned, or raised.

        Args:
            failed: it has raised.
            facts: ``outputs`` of the point, of a run of a graph ``target`` and ``inputs``, as far
                as they are known.
        """

        def end(scope: LiveScope) -> None:
            if scope.iterations.forward_ends(failed):
                self._tell(scope, Point.FORWARD_END, id=model, **facts)

        _for_each(told, end)

    def backward_begins(self, continues: bool = False) -> Scopes:
        """A backward pass begins; returns the scopes to notify at its end.

        Args:
            continues: the forward pass goes on after it: it ends no iteration.
        """
        scopes: Scopes = self._dispatcher.scopes()
        begun = 0
        try:
            for scope in scopes:
                begun += 1
                tell = partial(self._tell, scope)
                scope.iterations.backward_begins(tell, continues)
                self._note_thread(scope)
                tell(Point.BACKWARD_BEGIN)
        except BaseException:
            # The pass is not run, since a tool has raised where it begins.
            for scope in scopes[:begun]:
                scope.iterations.backward_ends(partial(self._tell, scope), failed=True)
            raise
        return scopes

    def backward_ends(self, told: Scopes, continues: bool = False, failed: bool = False) -> None:
        """A backward pass has ended, or raised."""

        def end(scope: LiveScope) -> None:
            tell = partial(self._tell, scope)
            try:
                tell(Point.BACKWARD_END)
            finally:
                scope.iterations.backward_ends(tell, continues, failed)

        _for_each(told, end)

    def optimizer_begins(self) -> Scopes:
        """An optimizer begins a step; returns the scopes to notify at its end."""
        scopes: Scopes = self._dispatcher.scopes()
        for scope in scopes:
            # A step that raised has not reported its end.
            scope.iterations.optimizing = True
        return scopes

    def optimizer_ends(self, told: Scopes, has_stepped: bool = True) -> None:
        """An optimizer has stepped, or raised."""

        def end(scope: LiveScope) -> None:
            scope.iterations.optimizing = False
            if has_stepped:
                scope.iterations.optimizer_ends(partial(self._tell, scope))

        _for_each(told, end)

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
        scope.iterations.new_iteration(partial(self._tell, scope))

    def finish(self, scope: LiveScope) -> None:
        """A scope is about to end."""
        scope.iterations.finish(partial(self._tell, scope))

    def _note_thread(self, scope: LiveScope) -> None:
        """A pass has begun in this thread; the passes of a graph begin in threads of its
        runtime."""
        if self._dispatcher.driver.runs_at_once and scope.iterations.is_shared():
            scope.statistics.overlaps = True

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


def _for_each(scopes: Scopes, function: Callable[[LiveScope], None]) -> None:
    """Call a function with each scope, also where a tool of an earlier one has raised."""
    with ExitStack() as calls:
        for scope in reversed(scopes):
            calls.callback(function, scope)


def _note(
    error: BaseException, tool: Any, routine: Callable[..., Any], point: Point, place: str = ""
) -> None:
    """Tell in which routine an error was raised."""
    name = f"{type(tool).__name__}.{getattr(routine, '__name__', routine)}"
    note(error, name, place, f"{point.value} of ")
