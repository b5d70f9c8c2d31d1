"""``amanda.apply`` and the order of tools.

``ordered([tool])`` gives the tools of a scope in running order, dependencies first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from amanda.errors import DependencyCycleError
from amanda.interface.tool import Tool, check_tool
from amanda.scope.blocks import WithBlock
from amanda.scope.scope import Scope, Statistics

if TYPE_CHECKING:
    from amanda.interface.action import Filter
    from amanda.interface.driver import Driver


class apply(WithBlock):  # noqa: N801 - part of the paper's API
    """Instrument everything that runs in the with-block with `tools`.

    Blocks nest: the tools of outer and inner blocks both act. An ``apply`` object can be entered
    again, also while it is open, in other threads and in coroutines, and it can be used as a
    decorator: each entry is a scope of its own.

    Args:
        tools: tools, in the order in which they act; dependencies are added.
        drivers: names or classes of the drivers to use instead of the default.
        op_filter: restricts the tools to some operators and some of their executions, see
            :class:`amanda.tools.op_filter.OpFilter`.

    Raises:
        TypeError: an argument is not a tool.
        DependencyCycleError: the tools depend on each other in a circle.
        NoDriverError: (on entry) nothing can be instrumented.
    """

    def __init__(
        self,
        *tools: Tool,
        drivers: Sequence[str | type[Driver]] | None = None,
        op_filter: Filter | None = None,
    ) -> None:
        super().__init__()
        for tool in tools:
            check_tool(tool, "amanda.apply()")
        if isinstance(drivers, str):
            raise TypeError(f"drivers={drivers!r} must be a list of driver names: [{drivers!r}]")
        if drivers is not None and not isinstance(drivers, (list, tuple, set, frozenset)):
            raise TypeError(f"drivers={drivers!r} must be a list of names or classes of drivers")
        if op_filter is not None and not hasattr(op_filter, "restrict"):
            raise TypeError(
                f"op_filter={op_filter!r} must be an amanda.tools.op_filter.OpFilter: "
                "OpFilter(ops=[...])"
            )
        self._tools = ordered([*(op_filter.dependencies if op_filter else ()), *tools])
        self._filter = op_filter
        self._drivers = drivers
        self._statistics: Statistics | None = None

    def __str__(self) -> str:
        return "apply"

    def open(self, frame: FrameType | None, task: Any) -> Scope:
        """A new scope of the code that `frame` and `task` identify."""
        return Scope(self._tools, self._drivers, self._filter, (frame, task))

    def start(self, opened: Scope) -> None:
        """Enter the scope."""
        opened.enter()

    def finished(self, opened: Scope) -> None:
        """Keep the figures of the block that has ended."""
        self._statistics = opened.statistics

    @property
    def statistics(self) -> Statistics:
        """The statistics of the last finished block."""
        return self._statistics or Statistics()


def ordered(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """`tools` and their dependencies, each once, dependencies first.

    Raises:
        DependencyCycleError: tools depend on each other in a circle; the
            message names the circle.
    """
    done: dict[int, Tool] = {}
    for tool in tools:
        _visit(tool, done, [])
    return tuple(done.values())


def _visit(tool: Tool, done: dict[int, Tool], path: list[Tool]) -> None:
    """Add a tool behind its dependencies; `path` leads to it."""
    if id(tool) in done:
        return
    if any(tool is other for other in path):
        start = next(i for i, other in enumerate(path) if other is tool)
        circle = " -> ".join(type(t).__name__ for t in [*path[start:], tool])
        raise DependencyCycleError(
            f"tools depend on each other in a circle: {circle}; remove one depends_on()"
        )
    for dependency in tool.dependencies:
        _visit(dependency, done, [*path, tool])
    done[id(tool)] = tool
