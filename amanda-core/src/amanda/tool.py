"""Tools, and how to apply them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from amanda import _state
from amanda._scope import Scope, Statistics, caller_frame
from amanda.action import InstPoint
from amanda.dependencies import ordered

if TYPE_CHECKING:
    from types import TracebackType

    from amanda.context import OpContext
    from amanda.driver import Driver

Analysis = Callable[["OpContext"], Any]
_F = TypeVar("_F", bound=Callable[..., Any])


class Tool:
    """A set of analysis routines and the instrumentation routines they insert.

    Subclass it, or make an instance and register functions with it. A subclass
    need not call ``super().__init__()``.

    Attributes:
        differentiable: True makes the tool's routines take part in automatic
            differentiation, as if recorded under ``amanda.ad_enabled()``.
    """

    differentiable: ClassVar[bool] = False

    def add_inst_for_op(
        self, callback: Analysis, backward: bool = False, require_outputs: bool = False
    ) -> None:
        """Register an analysis routine for every operator (paper, Listing 2).

        Args:
            callback: called once per operator with its ``OpContext``.
            backward: for backward operators instead of forward ones.
            require_outputs: after the operator has run instead of before.

        Raises:
            TypeError: `callback` cannot be called.
        """
        if not callable(callback):
            raise TypeError(
                f"{type(self).__name__}.add_inst_for_op() needs a function, got {callback!r}"
            )
        point = InstPoint.of(backward, require_outputs)
        # A bound method of the tool itself would be a cycle, and keep it until gc runs.
        own = getattr(callback, "__self__", None) is self
        entry = (own, callback.__func__ if own else callback)  # type: ignore[attr-defined]
        analyses = vars(self).setdefault("_analyses", {})
        analyses[point] = (*analyses.get(point, ()), entry)
        _state.invalidate()

    def depends_on(self, *tools: Tool) -> None:
        """Run the analyses and routines of `tools` before those of this tool.

        Raises:
            TypeError: something else than a tool is given.
        """
        for tool in tools:
            _check_tool(tool, f"{type(self).__name__}.depends_on()")
        known = self.dependencies
        vars(self)["_dependencies"] = known + tuple(t for t in tools if t not in known)

    def reanalyse(self, op_id: str | None = None) -> None:
        """Drop what this tool has recorded; its analyses run again when next met.

        Args:
            op_id: for this forward or backward operator only; None for all.
        """
        with _state.TOOL_LOCK:
            for scope in tuple(_state.LIVE_SCOPES):
                if any(tool is self for tool in scope.tools):
                    scope.cache.drop(self, op_id)
        _state.invalidate()

    @property
    def dependencies(self) -> tuple[Tool, ...]:
        """The tools that this tool depends on, in the order they were named."""
        dependencies: tuple[Tool, ...] = vars(self).get("_dependencies", ())
        return dependencies

    def analyses(self, point: InstPoint) -> tuple[Analysis, ...]:
        """The analysis routines registered for one point."""
        entries = vars(self).get("_analyses", {}).get(point, ())
        return tuple(func.__get__(self) if own else func for own, func in entries)

    def before_analyses(self, context: OpContext) -> None:
        """Called in the tool's turn, at each point at which some tool has an analysis.

        For tools that prepare the context for others, as ``MappingTool`` does.
        """

    def after_analyses(self, context: OpContext) -> None:
        """Called when all analyses of a point have run; see :meth:`before_analyses`."""

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Called when a scope with this tool begins, before anything runs in it, and again
        when a framework is imported inside of the scope.

        For tools that start something beside their routines, such as a profiler. What it
        calls of a framework runs vanilla; an exception ends the scope.

        Args:
            drivers: those that the scope has now begun to use.
        """

    def exit_scope(self) -> None:
        """Called once when a scope with this tool ends, in the thread that ends it; also if
        its begin has failed. No routine runs any more, and framework calls are vanilla."""


class apply(contextlib.ContextDecorator):  # noqa: N801 - part of the paper's API
    """Instrument everything that runs in the with-block with `tools`.

    Blocks nest: the tools of outer and inner blocks both act. An ``apply``
    object can be entered again, and used as a decorator.

    Args:
        tools: tools, in the order in which they act; dependencies are added.
        drivers: names or classes of the drivers to use instead of the default.

    Raises:
        TypeError: something else than a tool is given.
        DependencyCycleError: the tools depend on each other in a circle.
        NoDriverError: (on entry) nothing can be instrumented.
    """

    def __init__(self, *tools: Tool, drivers: Sequence[str | type[Driver]] | None = None) -> None:
        for tool in tools:
            _check_tool(tool, "amanda.apply()")
        if isinstance(drivers, str):
            raise TypeError(f"drivers={drivers!r} must be a list of driver names: [{drivers!r}]")
        self._tools = ordered(tools)
        self._drivers = drivers
        self._scopes: list[Scope] = []
        self._statistics: Statistics | None = None

    def __call__(self, func: Any) -> Any:
        """Decorate a function.

        Raises:
            TypeError: `func` is a coroutine or generator function, whose body runs
                after the call that would be covered.
        """
        if (
            inspect.iscoroutinefunction(func)
            or inspect.isgeneratorfunction(func)
            or inspect.isasyncgenfunction(func)
        ):
            raise TypeError(
                f"@amanda.apply() on {func.__qualname__} would cover only its call, not its "
                "body; write `with amanda.apply(...):` in the body instead"
            )
        return super().__call__(func)

    def __enter__(self) -> apply:
        scope = Scope(self._tools, self._drivers)
        scope.enter(caller_frame(1))
        self._scopes.append(scope)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope = self._scopes.pop()
        scope.exit()
        self._statistics = scope.statistics

    @property
    def statistics(self) -> Statistics:
        """What the last finished block has seen."""
        return self._statistics or Statistics()


def _check_tool(tool: Any, where: str) -> None:
    if isinstance(tool, type) and issubclass(tool, Tool):
        name = tool.__name__
        raise TypeError(f"{where} got the class {name}; pass an instance: {name}()")
    if not isinstance(tool, Tool):
        raise TypeError(f"{where} needs amanda.Tool instances, got {tool!r}")


@contextlib.contextmanager
def _switched(switch: str, value: bool) -> Iterator[None]:
    state = _state.STATE
    old = getattr(state, switch)
    setattr(state, switch, value)
    _state.invalidate()
    try:
        yield
    finally:
        setattr(state, switch, old)
        _state.invalidate()


def disabled() -> contextlib.AbstractContextManager[None]:
    """Within it, the current thread runs uninstrumented."""
    return _switched("enabled", False)


def enabled() -> contextlib.AbstractContextManager[None]:
    """Within it, instrumentation is on again, inside of a ``disabled()`` block."""
    return _switched("enabled", True)


def cache_disabled() -> contextlib.AbstractContextManager[None]:
    """Within it, analysis routines run at every execution."""
    return _switched("cache", False)


def cache_enabled() -> contextlib.AbstractContextManager[None]:
    """Within it, the action cache is on again, inside of a ``cache_disabled()`` block."""
    return _switched("cache", True)


def ad_enabled() -> contextlib.AbstractContextManager[None]:
    """Routines recorded within it take part in automatic differentiation."""
    return _switched("ad", True)


def ad_disabled() -> contextlib.AbstractContextManager[None]:
    """Routines recorded within it are isolated from automatic differentiation."""
    return _switched("ad", False)


def traceable(func: _F) -> _F:
    """Mark a routine as a function of tensors only: graph drivers trace it into the
    graph, where it runs without Python (design rule 14)."""
    func.amanda_traceable = True  # type: ignore[attr-defined]
    return func


def new_iteration() -> None:
    """Restart the counters of operator ids in the current thread."""
    for driver in tuple(_state.ATTACHED.values()):
        driver.new_iteration()


@contextlib.contextmanager
def vanilla() -> Iterator[None]:
    """Within it, the current thread's framework calls are not instrumented.

    Routines run like that anyhow. It is for code of a tool that a framework calls by
    itself, such as a hook of its own; far cheaper than :func:`disabled`.
    """
    state = _state.STATE
    state.paused += 1
    try:
        with contextlib.ExitStack() as stack:
            for driver in tuple(_state.ATTACHED.values()):
                stack.enter_context(driver.vanilla())
            yield
    finally:
        state.paused -= 1
