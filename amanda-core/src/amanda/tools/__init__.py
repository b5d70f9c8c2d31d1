"""The built-in tools, and all installed tools by short name.

``amanda.tools.load("flops")`` gives the class of a tool of any installed package, and
``amanda.tools.load("mytools.py:Norms")`` that of a file; ``amanda.tools.available()`` lists the
installed ones. Built in are mapping, graph tracing and subgraph rewriting.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from amanda.errors import FileError, PluginError, UnknownNameError, close_matches, described
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


def packages_of_drivers() -> frozenset[str]:
    """Return the top-level modules of the installed drivers and of their frameworks.

    A tool that names a line of the user's program skips stack frames in them, and in ``amanda``.
    """
    return drivers.packages_of_drivers()


_OTHER_WORDS = {
    **dict.fromkeys(("params", "parameters", "shapes", "modules", "layers"), "summary"),
    **dict.fromkeys(("mfu", "macs"), "flops"),
    **dict.fromkeys(("time", "times", "speed", "latency"), "profile"),
    "mem": "memory",
    **dict.fromkeys(("weights", "activations", "gradients"), "stats:tensors={}"),
    **dict.fromkeys(("graph", "edges"), "trace"),
}
"""Words for what a tool shows, and the tool."""


def load(name: str) -> type[Tool]:
    """Load the class of a tool; its constructor's arguments are the tool's options.

    Args:
        name: the short name; ``<distribution>/<name>`` if several packages have a tool of it; or
            ``tools.py:Class`` or ``package.module:Class`` for a class that no package registers.

    Raises:
        TypeError: `name` is not text.
        UnknownNameError: no installed package has a tool of this name; the message has close
            matches. Or a file or module has no class of this name.
        FileError: there is no such file.
        PluginError: the package that registers the tool does not contain it, a file or module
            cannot be imported, or the class is not a subclass of ``amanda.Tool``.
    """
    if not isinstance(name, str):
        raise TypeError(f"amanda.tools.load() takes the name of a tool, got {described(name)}")
    source, colon, class_name = name.rpartition(":")
    if colon:
        return _find_class(_import(source), source, class_name)
    entry = plugins.find_tool(name)
    if entry is None:
        raise _unknown(name)
    module, _, attribute = entry.target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except plugins.BROKEN as error:
        raise PluginError(
            f"tool {entry.name!r} of {entry.distribution} is registered as {entry.target}, "
            f"which cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not _is_tool(found):
        raise PluginError(
            f"tool {entry.name!r} of {entry.distribution} is registered as {entry.target}, "
            f"which is not a subclass of amanda.Tool: {described(found)}"
        )
    return found


def _unknown(name: str) -> UnknownNameError:
    """The error for a name that no installed package has."""
    hint = "amanda tools lists them all"
    if not any(r.distribution == "amanda-tools" for r in plugins.registry().records):
        hint += f"; {plugins.advise('amanda-tools')}"
    if os.path.isfile(f"{name}.py"):
        hint += f"; {name}.py is a file here: {name}.py:CLASS is a tool in it"
    known = [] if name in _OTHER_WORDS else [*plugins.tools()]
    if tool := _OTHER_WORDS.get(name):
        hint = f"did you mean {tool.format(name)}? {hint}"
    return plugins.unknown_name("tool", name, known, hint)


def _is_tool(value: object) -> TypeGuard[type[Tool]]:
    return isinstance(value, type) and issubclass(value, Tool)


def _find_class(module: ModuleType, source: str, name: str) -> type[Tool]:
    """Find a class in a module that no package registers.

    Args:
        source: the file or module, as the user has written it.

    Raises:
        UnknownNameError: there is none of this name.
        PluginError: it is not a tool.
    """
    found = getattr(module, name, None)
    if _is_tool(found):
        return found
    if found is not None:
        raise PluginError(f"{source}:{name} is not a subclass of amanda.Tool: {described(found)}")
    own = module.__name__
    names = [n for n, value in vars(module).items() if _is_tool(value) and value.__module__ == own]
    guess, has = close_matches(name, names), ", ".join(names) or "none"
    raise UnknownNameError(f"{source} has no class {name!r}{guess} (its tools: {has})")


def _import(source: str) -> ModuleType:
    """Import a file, or a module that the current folder or the environment has.

    A file may import others of its folder.
    """
    path = Path(source).absolute()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise FileError(f"there is no file {source}")
    before = sys.path[:]
    sys.path.insert(0, str(path.parent))
    try:
        return _import_file(path) if is_file else importlib.import_module(source)
    except plugins.BROKEN as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, (SyntaxError, ModuleNotFoundError)) else place
        where = where and f" ({Path(place.filename).name}, line {place.lineno})"
        raise PluginError(
            f"{source} cannot be imported: {type(error).__name__}: {error}{where}"
        ) from error
    finally:
        sys.path[:] = before


def _import_file(path: Path) -> ModuleType:
    """Import a file by its path, under which other modules of the same file name are not found."""
    name = str(path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
