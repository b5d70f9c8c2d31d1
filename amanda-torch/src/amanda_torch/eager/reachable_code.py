"""Which code can be reached from a tool, by bytecode."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Set
from typing import Any

from amanda.interface.action import InstPoint

_OBJECTS = 5_000
"""Objects that are looked at; a tool from which more can be reached may do anything."""

_INDIRECT = frozenset({"getattr", "methodcaller", "eval", "exec"})
"""Names by which code may reach any method."""

_OPAQUE = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


def mentions(root: Any, names: Set[str]) -> bool:
    """True if code that can be reached from an object names one of these methods."""
    wanted = names | _INDIRECT
    waiting, seen = [root], set[int]()
    keep = []
    while waiting:
        found = waiting.pop()
        if isinstance(found, _OPAQUE) or id(found) in seen:
            continue
        seen.add(id(found))
        keep.append(found)
        if len(seen) > _OBJECTS:
            return True
        if isinstance(found, types.CodeType):
            if not wanted.isdisjoint(found.co_names):
                return True
            waiting += [one for one in found.co_consts if isinstance(one, types.CodeType)]
        else:
            waiting += _below(found)
    return False


def undeclared(tool: Any) -> list[Any]:
    """The parts of a tool for which its ``only_watches`` does not speak.

    They are the whole tool where nothing is declared. Otherwise they are the methods of classes
    that the declaring one does not know, and analyses that other packages have registered with the
    instance.
    """
    if not tool.only_watches:
        return [tool]
    declaring = type(tool)
    if "only_watches" not in vars(tool):
        declaring = next(cls for cls in declaring.__mro__ if "only_watches" in vars(cls))
    unknown = [cls for cls in type(tool).__mro__ if not issubclass(declaring, cls)]
    methods = [getattr(m, "__func__", m) for cls in unknown for m in vars(cls).values()]
    package = declaring.__module__.partition(".")[0]
    analyses = [analysis for point in InstPoint for analysis in tool.analyses(point)]
    return methods + [
        analysis
        for analysis in analyses
        if getattr(analysis, "__self__", None) is not tool
        and (getattr(analysis, "__module__", None) or "").partition(".")[0] != package
    ]


def _below(value: Any) -> Iterator[Any]:
    """The objects that code of `value` may use."""
    if isinstance(value, types.FunctionType):
        yield from _below_function(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif type(value).__module__.partition(".")[0] not in _FOREIGN:
        yield from getattr(value, "__dict__", {}).values()
        for cls in type(value).__mro__:
            if not cls.__module__.startswith("amanda.interface"):
                yield from [getattr(m, "__func__", m) for m in vars(cls).values() if callable(m)]


def _below_function(function: types.FunctionType) -> Iterator[Any]:
    yield function.__code__
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    yield from [item for item in used if isinstance(item, types.FunctionType)]


_FOREIGN = "torch", "builtins", "numpy", "collections"
"""Packages of which no class belongs to a tool."""
