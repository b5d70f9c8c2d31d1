"""Scopes: one ``with amanda.apply(...)`` block, from entry to exit."""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import attrs

from amanda.engine.records import ActionCache
from amanda.errors import NoDriverError
from amanda.interface.action import Filter, InstPoint
from amanda.registry import drivers, import_hook
from amanda.registry.plugins import BROKEN
from amanda.scope import inheritance
from amanda.state import ATTACHED, LIVE_SCOPES, STATE, invalidate

if TYPE_CHECKING:
    from amanda.interface.driver import Driver
    from amanda.interface.tool import Tool

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = ("contextlib", "contextlib2", "async_exit_stack")


@attrs.define(eq=False)
class Statistics:
    """Figures about the run under a scope.

    Attributes:
        ops_seen: distinct operators met (forward; by id).
        backward_ops_seen: distinct backward operators met.
        ops_instrumented: forward and backward operators with at least one action.
        not_seen: executions that are known to be not instrumented: reason to count.
        tool_seconds: wall time spent in analysis and instrumentation routines.
    """

    ops_seen: int = 0
    backward_ops_seen: int = 0
    ops_instrumented: int = 0
    not_seen: collections.Counter[str] = attrs.field(factory=collections.Counter)
    tool_seconds: float = 0.0


class Scope:
    """One ``apply`` block: its tools, their records and the drivers that it uses."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        requested: Sequence[str | type[Driver]] | None,
        op_filter: Filter | None = None,
    ) -> None:
        self.tools = tools
        self.op_filter = op_filter
        self.requested = requested
        self.cache = ActionCache()
        self.statistics = Statistics()
        self.alive = False
        self.drivers: list[Driver] = []
        self._classes: list[type[Driver]] = []
        self._bound: FrameType | None = None
        self._watch: import_hook.Watch | None = None

    # -- for the dispatcher -----------------------------------------

    @property
    def is_bound(self) -> bool:
        """Whether a generator holds the scope, so that it pauses when that is suspended."""
        return self._bound is not None

    def covers(self, driver: Driver) -> bool:
        """Whether operators of `driver` are instrumented right now."""
        if not self.alive or driver not in self.drivers:
            return False
        return self._bound is None or self._bound.f_back is not None

    def analyses_at(self, point: InstPoint) -> bool:
        """Whether any tool has an analysis routine at `point`."""
        return any(tool.analyses(point) for tool in self.tools)

    def analyses_backward(self) -> bool:
        """Whether any tool analyses backward operators."""
        return any(self.analyses_at(point) for point in InstPoint if point.is_backward)

    # -- life cycle -------------------------------------------------------

    def enter(self, caller: FrameType | None) -> None:
        """Attach the drivers and cover the current thread.

        Raises:
            NoDriverError: no imported framework has a usable driver.
        """
        choice = drivers.select(self.requested)
        self._bound = suspendable_frame(caller)
        self.alive = True
        LIVE_SCOPES.append(self)
        try:
            self._attach(choice.ready)
            self._check_drivers(choice.ready)
            self._begin_tools(self.drivers)
            inheritance.cover_new_threads(True)
            self._cover_thread()
            self._check_drivers(choice.ready)
            if choice.pending:
                self._watch = import_hook.Watch(choice.pending, self._framework_imported)
        except BaseException:
            self.exit()
            raise

    def abandon(self) -> None:
        """End the scope in a forked child, where nothing is to be detached twice."""
        self.alive = False
        if self._watch is not None:
            self._watch.close()

    def exit(self) -> None:
        """End the scope; drivers that no scope needs any more are detached."""
        if self not in LIVE_SCOPES:
            return
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._summarise()
        self.alive = False
        self._bound = None
        LIVE_SCOPES.remove(self)
        state = STATE
        state.scopes = tuple(scope for scope in state.scopes if scope is not self)
        # All steps run, the last line first, also if one raises.
        with contextlib.ExitStack() as stack:
            stack.callback(self.cache.clear)
            stack.callback(inheritance.cover_new_threads, bool(LIVE_SCOPES))
            stack.callback(self._release_all)
            stack.callback(self._end_tools)
            stack.callback(invalidate)
            for driver in self.drivers:
                if not any(driver in scope.drivers for scope in state.scopes):
                    stack.callback(drivers.attempt, driver, "exit_thread", self.requested)

    def _begin_tools(self, attached: Sequence[Driver]) -> None:
        with _paused():
            for tool in self.tools:
                tool.enter_scope(tuple(attached))

    def _end_tools(self) -> None:
        """Tell every tool, the later ones first; an exception is raised after the last."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_paused())
            for tool in self.tools:
                stack.callback(tool.exit_scope)

    def _attach(self, classes: Sequence[type[Driver]]) -> list[Driver]:
        """Attach these drivers where they are not attached; returns the ones newly in use."""
        known = len(self.drivers)
        for cls in classes:
            # The next one in rank stands in for one that cannot be attached.
            if used := drivers.attach(cls, self.requested):
                self._classes.append(used)
                self.drivers.append(ATTACHED[used])
        return self.drivers[known:]

    def _release_all(self) -> None:
        """Detach the drivers that only this scope used; an exception is raised after the last."""
        classes, self._classes = self._classes, []
        self.drivers = []
        with contextlib.ExitStack() as stack:
            for cls in classes:
                driver = ATTACHED[cls]
                if not any(driver in scope.drivers for scope in LIVE_SCOPES):
                    del ATTACHED[cls]
                    stack.callback(drivers.attempt, driver, "detach", self.requested)

    def _cover_thread(self) -> None:
        state = STATE
        state.scopes = (*state.scopes, self)
        for driver in tuple(self.drivers):
            self._enter_thread(driver)
        invalidate()

    def _enter_thread(self, driver: Driver) -> None:
        """Let a driver cover the current thread; one that fails is used no longer."""
        if not drivers.attempt(driver, "enter_thread", self.requested):
            self.drivers.remove(driver)
            with contextlib.suppress(*BROKEN):
                driver.exit_thread()

    def _check_drivers(self, chosen: Sequence[type[Driver]]) -> None:
        """See that one of the drivers that were chosen is in use.

        Raises:
            NoDriverError: all of them have failed.
        """
        if chosen and not self.drivers:
            reasons = (f"{cls.name}: {drivers.explain_unusable(cls)}" for cls in chosen)
            raise NoDriverError("; ".join(reasons))

    def _framework_imported(self, framework: str) -> None:
        """A framework was imported inside the scope: attach its drivers now."""
        if not self.alive:
            return
        attached = self._attach(drivers.select_for(framework, self.requested))
        self._begin_tools(attached)
        for driver in attached:
            if self in STATE.scopes:
                self._enter_thread(driver)
        invalidate()

    def _summarise(self) -> None:
        statistics = self.statistics
        for record in self.cache:
            statistics.ops_seen += 1
            statistics.ops_instrumented += record.has_actions
            statistics.backward_ops_seen += len(record.children)
            statistics.ops_instrumented += sum(c.has_actions for c in record.children.values())


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    """Within it, tool code runs: its framework calls are vanilla."""
    STATE.paused += 1
    invalidate()
    try:
        yield
    finally:
        STATE.paused -= 1
        invalidate()


def suspendable_frame(frame: FrameType | None) -> FrameType | None:
    """The generator or coroutine that a with-block at `frame` belongs to, if any.

    A generator that contextlib drives is looked through: its scope belongs to
    the with-statement's caller.
    """
    while frame is not None:
        if _is_contextlib(frame) or frame.f_code.co_name in ("__enter__", "__aenter__"):
            frame = frame.f_back
        elif frame.f_code.co_flags & _SUSPENDABLE:
            if frame.f_back is None or not _is_contextlib(frame.f_back):
                return frame
            frame = frame.f_back
        else:
            return None
    return None


def _is_contextlib(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _CONTEXTLIB


def caller_frame(depth: int) -> FrameType | None:
    """The frame `depth` levels above the function that calls this."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    return frame
