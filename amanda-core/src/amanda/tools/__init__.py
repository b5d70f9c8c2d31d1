"""The built-in tools, and access to all installed ones by short name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from amanda import _plugins
from amanda.errors import PluginError
from amanda.tools import graph_tracing, mapping, reporting, subgraph_rewriting

if TYPE_CHECKING:
    from amanda.tool import Tool

__all__ = ["available", "graph_tracing", "load", "mapping", "reporting", "subgraph_rewriting"]


def available() -> dict[str, _plugins.ToolEntry]:
    """The tools of all installed packages, by short name."""
    return dict(sorted(_plugins.tools().items()))


def load(name: str) -> type[Tool]:
    """The class of the tool with a short name; its options are constructor arguments.

    Raises:
        UnknownNameError: no installed package has such a tool; close matches are named.
        PluginError: the package that registers it does not provide it.
    """
    entries = _plugins.tools()
    if name not in entries:
        hint = "amanda tools lists them all"
        if not any(r.distribution == "amanda-tools" for r in _plugins.registry().records):
            hint += "; try: pip install amanda-tools"
        raise _plugins.unknown("tool", name, entries, hint)
    entry = entries[name]
    module, _, attribute = entry.target.partition(":")
    try:
        found: type[Tool] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"tool {name!r} of {entry.distribution} is registered as {entry.target}, "
            f"which cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return found
