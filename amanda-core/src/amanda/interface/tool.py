"""The base class of tools, and the exception by which a tool ends the program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from amanda.errors import described
from amanda.interface.action import InstPoint
from amanda.interface.points import Point, PointContext
from amanda.state import LIVE_SCOPES, invalidate, tool_locked

if TYPE_CHECKING:
    from amanda.interface.context import OpContext
    from amanda.interface.driver import Driver


Analysis = Callable[["OpContext"], Any]
PointRoutine = Callable[[PointContext], Any]

_F = TypeVar("_F", bound=Callable[..., Any])


class StopRun(BaseException):
    """Raised by a tool to end the program: ``raise amanda.StopRun("the loss is NaN")``.

    Under ``amanda run`` the results are written, the last line has the reason, and the exit status
    is 0; raised in a thread of the program it ends that thread, and others at their next operator.
    In Python it leaves the scope, or ends a thread, like any exception. It is no ``Exception``: a
    program that catches these to continue is ended as well.
    """


class Registered:
    """Counts the registrations of analyses, of all tools.

    Results derived from the registrations stay valid as long as the count does not change.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


REGISTERED = Registered()

FRAMES: list[Callable[[Tool], str | None]] = []
"""The function that draws a tool's results for notebooks: it needs upper layers, and ``amanda``
puts it here."""


class Tool:
    """A set of analysis routines and the instrumentation routines they insert.

    Subclass it, or make an instance and register functions with it. A subclass
    need not call ``super().__init__()``.

    Attributes:
        differentiable: True makes the tool's routines take part in automatic
            differentiation, as if recorded under ``amanda.ad_enabled()``.
        only_watches: True declares that no routine of the tool, forward or backward, changes a
            value, so that a driver need not split fused operators for it. It covers the instance
            or class that sets it, not subclasses.
        group: the heading under which ``amanda tools`` lists the tool, such as ``"look"``,
            ``"find"``, ``"compare"`` or ``"change"``.
    """

    differentiable: ClassVar[bool] = False
    only_watches: bool = False
    group: ClassVar[str] = "other"

    def add_inst_for_op(
        self, callback: Analysis, backward: bool = False, require_outputs: bool = False
    ) -> None:
        """Register an analysis routine for every operator (paper, Listing 2).

        Args:
            callback: called once per operator with its ``OpContext``.
            backward: for backward operators instead of forward ones.
            require_outputs: after the operator has run instead of before.

        Raises:
            TypeError: `callback` cannot be called, or a call would not run its code.
        """
        _check_runs(callback, f"{type(self).__name__}.add_inst_for_op()")
        point = InstPoint.of(backward, require_outputs)
        # A bound method of the tool itself would be a cycle, and keep it until gc runs.
        own = getattr(callback, "__self__", None) is self
        entry = (own, callback.__func__ if own else callback)  # type: ignore[attr-defined]
        analyses = vars(self).setdefault("_analyses", {})
        analyses[point] = (*analyses.get(point, ()), entry)
        REGISTERED.count += 1
        invalidate()

    def add_inst_for_module(self, routine: PointRoutine, *, exit: bool = False) -> None:
        """Register a routine that runs at every call of a module, also one without operators.

        Args:
            routine: called with a :class:`~amanda.interface.points.PointContext`. Its return value
                is ignored.
            exit: run it after the module has returned or raised, instead of before.

        Raises:
            TypeError: `routine` cannot be called.
        """
        self._add_routine(Point.MODULE_EXIT if exit else Point.MODULE_ENTRY, routine)

    def add_inst_for_pass(
        self, routine: PointRoutine, *, backward: bool = False, end: bool = False
    ) -> None:
        """Register a routine that runs when a forward or backward pass begins or ends.

        A forward pass is a call of an outermost module.

        Args:
            routine: see :meth:`add_inst_for_module`.
            backward: for backward passes instead of forward ones.
            end: run it at the end instead of the begin.

        Raises:
            TypeError: `routine` cannot be called.
        """
        if backward:
            self._add_routine(Point.BACKWARD_END if end else Point.BACKWARD_BEGIN, routine)
        else:
            self._add_routine(Point.FORWARD_END if end else Point.FORWARD_BEGIN, routine)

    def add_inst_for_iteration(self, routine: PointRoutine, *, end: bool = False) -> None:
        """Register a routine that runs when an iteration (a step of training) begins or ends.

        Args:
            routine: see :meth:`add_inst_for_module`.
            end: run it at the end instead of the begin.

        Raises:
            TypeError: `routine` cannot be called.
        """
        self._add_routine(Point.ITERATION_END if end else Point.ITERATION_BEGIN, routine)

    def _add_routine(self, point: Point, routine: PointRoutine) -> None:
        _check_runs(routine, f"{type(self).__name__}: {point.value}")
        # Without the tool, which would be a cycle.
        own = getattr(routine, "__self__", None) is self
        entry = own, routine.__func__ if own else routine  # type: ignore[attr-defined]
        known = vars(self).setdefault("_point_routines", {})
        known[point] = (*known.get(point, ()), entry)
        REGISTERED.count += 1
        invalidate()

    def routines_at(self, point: Point) -> tuple[PointRoutine, ...]:
        """The routines registered for one derived point."""
        entries = vars(self).get("_point_routines", {}).get(point, ())
        return tuple(func.__get__(self) if own else func for own, func in entries)

    def has_routines_at(self, *points: Point) -> bool:
        """True if any routine is registered for one of these derived points."""
        known = vars(self).get("_point_routines")
        return known is not None and not known.keys().isdisjoint(points)

    def depends_on(self, *tools: Tool) -> None:
        """Run the analyses and routines of `tools` before those of this tool.

        Raises:
            TypeError: an argument is not a tool.
        """
        for tool in tools:
            check_tool(tool, f"{type(self).__name__}.depends_on()")
        known = self.dependencies
        vars(self)["_dependencies"] = known + tuple(t for t in tools if t not in known)

    def reanalyse(self, op_id: str | None = None) -> None:
        """Drop the actions that this tool has recorded; its analyses run again.

        Args:
            op_id: for this forward or backward operator only; None for all.

        Raises:
            TypeError: `op_id` is not a string (but a context, for instance).
        """
        if op_id is not None and not isinstance(op_id, str):
            raise TypeError(
                f"{type(self).__name__}.reanalyse() needs the id of an operator "
                f"(context.get_op_id()), or None for all, got {described(op_id)}"
            )
        tool_locked(self._drop, op_id)
        invalidate()

    def _drop(self, op_id: str | None) -> None:
        for scope in tuple(LIVE_SCOPES):
            if any(tool is self for tool in scope.tools):
                scope.cache.drop(self, op_id)

    @property
    def dependencies(self) -> tuple[Tool, ...]:
        """The tools that this tool depends on, in the order they were named."""
        dependencies: tuple[Tool, ...] = vars(self).get("_dependencies", ())
        return dependencies

    def analyses(self, point: InstPoint) -> tuple[Analysis, ...]:
        """The analysis routines registered for one point."""
        registered = vars(self).get("_analyses", {}).get(point, ())
        return tuple([func.__get__(self) if own else func for own, func in registered])

    def analyses_at(self, *points: InstPoint) -> bool:
        """True if any analysis routine is registered for one of `points`."""
        return not vars(self).get("_analyses", {}).keys().isdisjoint(points)

    def before_analyses(self, context: OpContext) -> None:
        """Called in the tool's turn, at each point at which some tool has an analysis.

        For tools that prepare the context for others, as ``MappingTool`` does.
        """

    def after_analyses(self, context: OpContext) -> None:
        """Called when all analyses of a point have run; see :meth:`before_analyses`."""

    def note_substitute(self, output: Any, substitute: Any) -> None:
        """Called when the result of a routine after an operator takes the place of an output.

        For tools that track tensors from operator to operator, as ``GraphTracingTool`` does: later
        operators that read the output get the substitute. Framework calls are vanilla.

        Args:
            output: the output, as the operator or an earlier routine has left it.
            substitute: the tensor in its place.
        """

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Called when a scope with this tool begins, before anything runs in it, and again
        when a framework is imported inside of the scope.

        For tools that start something besides their routines, such as a profiler. Framework calls
        in it run vanilla; an exception ends the scope.

        Args:
            drivers: the drivers that the scope has just begun to use.
        """

    def exit_scope(self) -> None:
        """Called once when a scope with this tool ends, in the thread that ends it; also if
        its begin has failed. No routine runs any more, and framework calls are vanilla."""

    def _repr_html_(self) -> str | None:
        """Return the results for notebooks, the page in a frame; None without results."""
        return FRAMES[0](self)


Turn = tuple[Analysis | None, Sequence[Analysis], Analysis | None]
"""The calls of a tool at one point: before its analyses, the analyses, and after those of all
tools; None for no call."""


def turn_of(tool: Tool, point: InstPoint) -> Turn:
    """The calls of a tool at one point: before its analyses, these, and after them."""
    before: Analysis | None = tool.before_analyses
    after: Analysis | None = tool.after_analyses
    # Those of the base class do nothing, and would be called for each operator that is new.
    if getattr(before, "__func__", None) is Tool.before_analyses:
        before = None
    if getattr(after, "__func__", None) is Tool.after_analyses:
        after = None
    return before, tool.analyses(point), after


def _check_runs(routine: Any, where: str) -> None:
    """Check that `routine` is a function whose code runs when it is called.

    Args:
        where: the method that got it, for the message.

    Raises:
        TypeError: it cannot be called, or is a coroutine function or a generator function.
    """
    if not callable(routine):
        raise TypeError(f"{where} needs a function, got {routine!r}")
    # Its return value, a coroutine or generator, is ignored: the tool would silently do nothing.
    if inspect.iscoroutinefunction(routine) or inspect.isasyncgenfunction(routine):
        raise TypeError(f"{where} needs a function that is not async, got {routine!r}")
    if inspect.isgeneratorfunction(routine):
        raise TypeError(f"{where} needs a function without yield, got {routine!r}")


def check_tool(tool: Any, where: str) -> None:
    """Check that `tool` is an instance of a tool.

    Args:
        where: the call that got it, for the message.

    Raises:
        TypeError: it is a class, or not a tool.
    """
    if isinstance(tool, type) and issubclass(tool, Tool):
        name = tool.__name__
        raise TypeError(f"{where} got the class {name}; pass an instance: {name}()")
    if not isinstance(tool, Tool):
        several = isinstance(tool, (list, tuple)) and all(isinstance(one, Tool) for one in tool)
        hint = "; pass several one by one, as *tools" if tool and several else ""
        raise TypeError(f"{where} needs amanda.Tool instances, got {tool!r}{hint}")


def traceable(func: _F) -> _F:
    """Mark a routine as a function of tensors only: graph drivers trace it into the
    graph, where it runs without Python (contract rule 14).

    Returns:
        The routine, or for one that takes no mark, such as a builtin function or a bound method, a
        function that calls it.
    """
    return _marked(func, "amanda_traceable")


def deferrable(func: _F) -> _F:
    """Mark a routine that returns nothing and reads only the shape and dtype of its tensors.

    If its operator is part of compiled code, a driver may call it after that code has run, with
    tensors without values, so that the code stays as it is (contract rule 14). The same holds for
    a routine at modules and the tensors in its :class:`~amanda.interface.points.PointContext`,
    whose device it may read as well.

    Returns:
        As :func:`traceable`.
    """
    return _marked(func, "amanda_deferrable")


def _marked(func: _F, mark: str) -> _F:
    """`func` with a mark; a function that calls it where it takes none."""
    try:
        setattr(func, mark, True)
    except AttributeError:

        @functools.wraps(func)
        def routine(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        setattr(routine, mark, True)
        return routine  # type: ignore[return-value]
    return func
