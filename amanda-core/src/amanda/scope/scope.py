"""Scopes: one ``with amanda.apply(...)`` block, from entry to exit.

``enter()`` attaches the drivers and covers the current thread; ``exit()`` detaches drivers that
no other scope needs. In between the dispatcher asks the scope for its tools, analyses and records.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs

from amanda.engine.iterations import Iterations
from amanda.engine.records import ActionCache
from amanda.engine.signals import defer_handlers
from amanda.engine.tool_code import paused
from amanda.errors import NoDriverError
from amanda.interface.action import Filter, InstPoint
from amanda.interface.points import Point
from amanda.interface.tool import REGISTERED, Tool, Turn, turn_of
from amanda.python.interrupts import interruptible
from amanda.registry import drivers, import_hook, proofs
from amanda.registry.plugins import BROKEN
from amanda.scope import inheritance
from amanda.state import (
    ATTACHED,
    COUNT_LOCK,
    LIVE_SCOPES,
    STATE,
    Block,
    close_block,
    invalidate,
    locked,
    note_detached,
    open_block,
)

if TYPE_CHECKING:
    from amanda.interface.driver import Driver


@attrs.define(eq=False)
class Statistics:
    """Figures about the run under a scope.

    Attributes:
        ops_seen: distinct operators seen (forward; by id).
        backward_ops_seen: distinct backward operators seen.
        ops_instrumented: forward and backward operators with at least one action.
        not_seen: executions that are known to be not instrumented: reason to count.
        tool_seconds: wall time spent in analysis and instrumentation routines, without that of
            counters and timers which a driver runs itself.
        steps: iterations that have ended, where a tool has a routine at a derived point.
        overlaps: True if passes of several threads were in one iteration: `steps` is a lower bound.
        compiled: by the name of each part of compiled code, the mode in which it ran, if a driver
            has a choice: for example "eagerly (another mode is on)".
    """

    ops_seen: int = 0
    backward_ops_seen: int = 0
    ops_instrumented: int = 0
    not_seen: collections.Counter[str] = attrs.field(factory=collections.Counter)
    tool_seconds: float = 0.0
    steps: int = 0
    overlaps: bool = False
    compiled: dict[str, str] = attrs.field(factory=dict)

    def count_not_seen(self, reason: str, count: int = 1) -> None:
        """Add to ``not_seen``, in whichever thread; 0 gives a reason without a number."""
        COUNT_LOCK.hold(self._count, reason, count)

    def _count(self, reason: str, count: int) -> None:
        add_not_seen(self.not_seen, reason, count)


def add_not_seen(found: collections.Counter[str], reason: str, count: int) -> None:
    """Add to the executions that were not seen; with an unknown number, 0, the sum is unknown."""
    found[reason] = found[reason] + count if count and found.get(reason, 1) else 0


class Scope:
    """One entry into an ``apply`` block: its tools, their records and the drivers that it uses."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        requested: Sequence[str | type[Driver]] | None,
        op_filter: Filter | None = None,
        owner: tuple[FrameType | None, Any] = (None, None),
    ) -> None:
        """Nothing is done before :meth:`enter`.

        Args:
            owner: the generator or coroutine, and the task, of a :class:`amanda.state.Block`.
        """
        self.tools = tools
        told = Tool.note_substitute
        self.followers: Sequence[Any] = [
            tool for tool in tools if type(tool).note_substitute is not told
        ]
        self.op_filter = op_filter
        self.requested = requested
        self.cache = ActionCache()
        self.iterations = Iterations()
        self.statistics = Statistics()
        self.alive = False
        self.reference = (weakref.ref(self),)
        self.drivers: list[Driver] = []
        self.pending: tuple[str, ...] = ()
        self._block = Block(self, frame=owner[0], task=owner[1])
        self.thread = threading.get_ident()
        self._is_open = False
        self._told: list[Tool] = []
        self._proven: Sequence[type[Driver]] = ()
        self._points: set[InstPoint] = set()
        self._is_backward = False
        self._turns: dict[InstPoint, Mapping[int, Turn]] = {}
        self._registered = -1
        self._routines: dict[Point, Sequence[tuple[Tool, Callable[..., Any]]]] = {}
        self._routines_of = -1

    # -- for the dispatcher -----------------------------------------

    def covers(self, driver: Driver) -> bool:
        """True if operators of `driver` are instrumented under the scope."""
        return self.alive and driver in self.drivers

    def analyses_at(self, point: InstPoint) -> bool:
        """True if any tool has an analysis routine at `point`."""
        # Computed once: this is read several times for each new operator.
        if self._registered != REGISTERED.count:
            self._find_points()
        return point in self._points

    def analyses_backward(self) -> bool:
        """True if any tool analyses backward operators."""
        if self._registered != REGISTERED.count:
            self._find_points()
        return self._is_backward

    def turns(self, point: InstPoint) -> Mapping[int, Turn]:
        """The calls of each tool at `point`, by the ``id()`` of the tool."""
        if self._registered != REGISTERED.count:
            self._find_points()
        found = self._turns.get(point)
        if found is None:
            found = self._turns[point] = {id(tool): turn_of(tool, point) for tool in self.tools}
        return found

    def routines_at(self, point: Point) -> Sequence[tuple[Tool, Callable[..., Any]]]:
        """The tools' routines at a derived point, in order, each with its tool."""
        registered = REGISTERED.count
        if self._routines_of != registered:
            # Read before the tools are asked, which other threads may add routines to.
            self._routines, self._routines_of = {}, registered
        found = self._routines.get(point)
        if found is None:
            found = [(tool, one) for tool in self.tools for one in tool.routines_at(point)]
            self._routines[point] = found
        return found

    def _find_points(self) -> None:
        # Read before the tools are asked, which other threads may add analyses to.
        registered = REGISTERED.count
        tools = self.tools
        self._points = {p for p in InstPoint if any(tool.analyses_at(p) for tool in tools)}
        self._is_backward = any(point.is_backward for point in self._points)
        self._turns = {}
        self._registered = registered

    # -- entry ------------------------------------------------------------

    def enter(self) -> None:
        """Attach the drivers and cover the current thread.

        Raises:
            NoDriverError: no imported framework has a usable driver.
        """
        choice = drivers.select(self.requested)
        interruptible(drivers.load, choice.ready)
        interruptible(proofs.prove, choice.ready)
        self._proven = choice.ready
        try:
            self._is_open = True
            locked(self._begin, choice)
            self._check_drivers(choice.ready)
            self._begin_tools(self.drivers)
            locked(self._cover_thread)
            invalidate()
            self._check_drivers(choice.ready)
        except BaseException:
            self.exit()
            raise

    def _begin(self, choice: drivers.DriverChoice) -> None:
        """Attach the drivers, and wait for the frameworks that are not imported."""
        LIVE_SCOPES.append(self)
        self.alive = True
        self._attach(choice.ready)
        self.pending = choice.pending
        if choice.pending:
            import_hook.await_frameworks(choice.pending, _framework_imported)

    def _begin_tools(self, attached: Sequence[Driver]) -> None:
        self._told = list(self.tools)
        for tool in self.tools:
            interruptible(_vanilla_call, tool, "enter_scope", tuple(attached))

    def _attach(self, classes: Sequence[type[Driver]]) -> list[Driver]:
        """Attach these drivers where they are not attached; returns the ones newly in use."""
        known = len(self.drivers)
        for cls in classes:
            # The next one in rank stands in for one that cannot be attached.
            if used := drivers.attach(cls, self.requested):
                self.drivers.append(ATTACHED[used])
                self._count_switched_off(ATTACHED[used])
        return self.drivers[known:]

    def _count_switched_off(self, driver: Driver) -> None:
        for mechanism, without in driver.switched_off.items():
            self.statistics.count_not_seen(f"{mechanism} switched off in {driver.name}: {without}")

    def _cover_thread(self) -> None:
        inheritance.cover_new_threads(True)
        _cover_handlers()
        open_block(self._block)
        for driver in tuple(self.drivers):
            self._enter_thread(driver)

    def _enter_thread(self, driver: Driver) -> None:
        """Let a driver cover the current thread; one that fails is used no longer."""
        if not drivers.attempt(driver, "enter_thread", self.requested):
            self.drivers.remove(driver)
            with contextlib.suppress(*BROKEN):
                driver.exit_thread()

    def _check_drivers(self, chosen: Sequence[type[Driver]]) -> None:
        """Check that one of the drivers that were chosen is in use.

        Raises:
            NoDriverError: all of them have failed.
        """
        if chosen and not self.drivers:
            reasons = (f"{cls.name}: {drivers.explain_unusable(cls)}" for cls in chosen)
            raise NoDriverError("; ".join(reasons))

    def framework_imported(self, framework: str) -> None:
        """A framework was imported inside the scope: attach its drivers now."""
        classes = drivers.select_for(framework, self.requested)
        drivers.load(classes)
        proofs.prove(classes, importing=True)
        self._proven = [*self._proven, *classes]
        attached = locked(lambda: self._attach(classes) if self.alive else [])
        if attached:
            self._begin_tools(attached)
            locked(self._cover_late, attached)
        invalidate()

    def _cover_late(self, attached: Sequence[Driver]) -> None:
        for driver in attached:
            if self.alive and any(block.scope is self for block in STATE.blocks):
                self._enter_thread(driver)

    # -- exit -------------------------------------------------------------

    def abandon(self) -> None:
        """End the scope in a forked child, without detaching drivers a second time."""
        self.alive = self._is_open = False
        self.pending = ()

    def exit(self) -> None:
        """End the scope; drivers that no scope needs any more are detached.

        Everything is undone first, each step on its own; then the tools are notified, and the
        statistics are computed. Harmless when called twice.

        Raises:
            BaseException: the first exception of all the steps.
        """
        if not self._is_open:
            return
        try:
            run_all(
                [
                    lambda: interruptible(self._finish_steps),
                    lambda: locked(self._close),
                    invalidate,
                    lambda: locked(self._undo),
                    self._end_tools,
                    self._summarise,
                    lambda: interruptible(
                        proofs.prove_late, self._proven, self.statistics.count_not_seen
                    ),
                ]
            )
        finally:
            self.drivers = []
            self._is_open = False

    def _finish_steps(self) -> None:
        """End the iteration that runs, if it is complete."""
        if self.alive and self.drivers:
            self.drivers[0].dispatcher.points.finish(self)
        self.statistics.steps = self.iterations.count

    def _close(self) -> None:
        """End the scope: it covers nothing any more. Drivers are still attached."""
        self.alive = False
        with contextlib.suppress(ValueError):
            LIVE_SCOPES.remove(self)
        close_block(self._block)
        inheritance.release(self)

    def _undo(self) -> None:
        """Leave the framework, this thread and the import system as they would be without it."""
        run_all(
            [
                *(partial(self._exit_thread, driver) for driver in self.drivers),
                *(partial(self._detach, cls) for cls in reversed(ATTACHED.copy())),
                lambda: inheritance.cover_new_threads(bool(LIVE_SCOPES)),
                _cover_handlers,
                self._stop_waiting,
            ]
        )

    def _stop_waiting(self) -> None:
        has_waited, self.pending = bool(self.pending), ()
        if not LIVE_SCOPES or (
            has_waited and not any(scope.pending for scope in LIVE_SCOPES)  # type: ignore[attr-defined]
        ):
            import_hook.await_nothing()

    def _exit_thread(self, driver: Driver) -> None:
        """Let a driver leave the thread that has entered, if no other scope of it needs it."""
        # The open blocks of the thread that has entered.
        blocks: tuple[Block, ...] = self._block.thread["blocks"]
        if any(b.scope is not None and driver in b.scope.drivers for b in blocks):
            return
        if self.thread == threading.get_ident():
            drivers.attempt(driver, "exit_thread", self.requested)
        else:
            driver.exit_other_thread(self.thread)

    def _detach(self, cls: type[Driver]) -> None:
        """Detach a driver that no scope uses; also one whose attaching was interrupted."""
        driver = ATTACHED.get(cls)
        if driver is None or any(driver in scope.drivers for scope in LIVE_SCOPES):
            return
        try:
            drivers.attempt(driver, "detach", self.requested)
        finally:
            note_detached(cls)

    def _end_tools(self) -> None:
        """Tell every tool, the later ones first."""
        told, self._told = self._told, []
        run_all([partial(interruptible, _vanilla_call, tool, "exit_scope") for tool in told[::-1]])

    def _summarise(self) -> None:
        counts = self.cache.counts()
        if counts[0]:
            statistics = self.statistics
            statistics.ops_seen, statistics.backward_ops_seen = counts[:2]
            statistics.ops_instrumented = counts[2]
        self.cache.clear()


def _cover_handlers() -> None:
    """Let handlers of signals wait while scopes of the main thread are live."""
    main = threading.main_thread().ident
    if threading.get_ident() == main:
        defer_handlers(any(scope.thread == main for scope in LIVE_SCOPES))


def _framework_imported(framework: str) -> None:
    """Let every scope that waits for a framework attach its drivers."""
    for scope in tuple(LIVE_SCOPES):
        if isinstance(scope, Scope) and framework in scope.pending:
            scope.pending = tuple(name for name in scope.pending if name != framework)
            scope.framework_imported(framework)


def run_all(steps: Sequence[Callable[[], None]]) -> None:
    """Call each of several functions, also after one that raises.

    Raises:
        BaseException: the first exception, with a note of each other one.
    """
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            if first is None:
                first = error
            else:
                first.add_note(f"amanda: the end of the scope has also raised {error!r}")
    if first is not None:
        raise first


def _vanilla_call(tool: Tool, method: str, *args: Any) -> None:
    """Call a method of a tool: its framework calls are vanilla."""
    try:
        with paused():
            invalidate()
            getattr(tool, method)(*args)
    except BROKEN as error:
        error.add_note(f"amanda: raised in {type(tool).__name__}.{method}")
        raise
    finally:
        invalidate()
