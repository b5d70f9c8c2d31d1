"""The built-in tools, and all installed tools by short name.

``amanda.tools.load("flops")`` gives the class of a tool of any installed package,
``amanda.tools.available()`` lists them. Built in are mapping, graph tracing and subgraph rewriting.
"""

from __future__ import annotations

import importlib
import os

from amanda.errors import PluginError, described
from amanda.interface.tool import Tool
from amanda.registry import drivers, plugins
from amanda.tools import canonical, graph_tracing, layouts, mapping, reporting, subgraph_rewriting

__all__ = [
    "available",
    "canonical",
    "graph_tracing",
    "layouts",
    "load",
    "mapping",
    "packages_of_drivers",
    "reporting",
    "subgraph_rewriting",
]


def available() -> dict[str, plugins.ToolEntry]:
    """List the tools of all installed packages, by the names that :func:`load` takes."""
    return dict(sorted(plugins.tools().items()))


def packages_of_drivers() -> set[str]:
    """Return the top-level modules of the installed drivers and of their frameworks.

    A tool that names a line of the user's program skips stack frames in them, and in ``amanda``.
    """
    return drivers.packages_of_drivers()


def load(name: str) -> type[Tool]:
    """Load the class of a tool; its constructor's arguments are the tool's options.

    Args:
        name: the short name; ``<distribution>/<name>`` if several packages have a tool of it.

    Raises:
        TypeError: `name` is not text.
        UnknownNameError: no installed package has a tool of this name; the message has close
            matches.
        PluginError: the package that registers the tool does not contain it.
    """
    if not isinstance(name, str):
        raise TypeError(f"amanda.tools.load() takes the name of a tool, got {described(name)}")
    entry = plugins.find_tool(name)
    if entry is None:
        hint = "amanda tools lists them all"
        if not any(r.distribution == "amanda-tools" for r in plugins.registry().records):
            hint += "; try: pip install amanda-tools"
        if os.path.isfile(f"{name}.py"):
            hint += (
                f"; {name}.py is a file here, but no package registers it, see 'A tool for others' "
                "in writing-a-tool.md"
            )
        raise plugins.unknown_name("tool", name, plugins.tools(), hint)
    module, _, attribute = entry.target.partition(":")
    try:
        found: type[Tool] = getattr(importlib.import_module(module), attribute)
    except plugins.BROKEN as error:
        raise PluginError(
            f"tool {entry.name!r} of {entry.distribution} is registered as {entry.target}, "
            f"which cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise PluginError(
            f"tool {entry.name!r} of {entry.distribution} is registered as {entry.target}, "
            f"which is not a subclass of amanda.Tool: {described(found)}"
        )
    return found
