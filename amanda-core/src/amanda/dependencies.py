"""The order of tools: dependencies first, then the order of ``apply``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from amanda.errors import DependencyCycleError

if TYPE_CHECKING:
    from amanda.tool import Tool


def ordered(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """All of `tools` and what they depend on, each once, dependencies first.

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
