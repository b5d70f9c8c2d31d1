"""Finds the modules that the operators of a captured graph belong to.

Dynamo notes for each node the module calls that it was captured in: the number of the module
object (``140342625286672@1`` in its second call), and an expression that leads to it,
``L['self'].encoder.layers.0``. A graph may be run with another instance of the same class than it
was captured with; so the modules are looked up anew, in the variables of the function that runs
it::

    places = ModuleFinder(graph)
    modules = places.find(places.roots(frame.f_locals, frame.f_globals))
    [modules[call.module] for call in calls_of(node)]
"""

from __future__ import annotations

import ast
import operator
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import fx, nn

from amanda_torch import _internals

_ROOT = re.compile(r"([LG])\[(['\"])(\w+)\2\]")
# Dynamo writes `.layer-1` for `._modules['layer-1']`.
_STEP = re.compile(r"\.([^][.(),'\"]+)|\[([^\]]+)\]|(\(\))")
_FUNCTION = re.compile(r"(getattr|(?:object|list|dict)\.__get\w+__)\(")
_CONSTANT = re.compile(r", ('[^']*'|\"[^\"]*\"|-?\d+)\)")
_NTH_KEY = re.compile(r", list\(dict\.keys\(.*?\)\)\[(\d+)\]\)")

Step = Callable[[Any], Any]
"""Function that returns an attribute of an object, an item, or the target of a weak reference."""

Path = tuple[tuple[str, str], Sequence[Step]]
"""The root of an expression, and the steps from there."""


@attrs.frozen
class CapturedCall:
    """A call of a module within the graph.

    Attributes:
        key: identifies the call among those of the module.
        module: identifies the module.
    """

    key: str
    module: str


def calls_of(node: fx.Node) -> tuple[CapturedCall, ...]:
    """The module calls that a node was captured in, outermost first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return tuple(CapturedCall(key, key.partition("@")[0]) for key in stack)


_MADE: weakref.WeakValueDictionary[tuple[type, int], nn.Module] = weakref.WeakValueDictionary()
"""Stand-ins for modules that captured code creates, by class and number within a graph."""


class ModuleFinder:
    """The modules of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._paths: dict[str, Path | None] = {}
        self._made: dict[str, nn.Module] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            for key, (path, cls) in (node.meta.get("nn_module_stack") or {}).items():
                module = key.partition("@")[0]
                if path != _internals.MADE_MODULE:
                    self._paths.setdefault(module, _parsed(path))
                elif module not in self._made:
                    number = sum(type(other) is cls for other in self._made.values())
                    self._made[module] = _stand_in(cls, number)
        self._roots = sorted({path[0] for path in self._paths.values() if path is not None})

    @property
    def has_roots(self) -> bool:
        """True if some module of the graph is found from a variable."""
        return bool(self._roots)

    def roots(
        self, local_variables: Mapping[str, Any], global_variables: Mapping[str, Any]
    ) -> list[Any]:
        """The objects at which the expressions begin.

        Args:
            local_variables, global_variables: variables of the function that runs the graph.
        """
        return [
            (local_variables if scope == "L" else global_variables).get(name)
            for scope, name in self._roots
        ]

    def find(self, roots: list[Any]) -> dict[str, nn.Module]:
        """The modules that can be found, by :attr:`CapturedCall.module`.

        Args:
            roots: result of :meth:`roots`.
        """
        found = dict(self._made)
        for key, path in self._paths.items():
            module = None if path is None else _follow(roots[self._roots.index(path[0])], path[1])
            if isinstance(module, nn.Module):
                found[key] = module
        return found


def _stand_in(cls: type[nn.Module], number: int) -> nn.Module:
    """A stand-in for a module, with only the name of its class; all graphs share it."""
    module = _MADE.get((cls, number))
    if module is None:
        module = _MADE[cls, number] = cls.__new__(cls)
        nn.Module.__init__(module)
    return module


def _parsed(text: str) -> Path | None:
    """Parse an expression of Dynamo's; None for an unknown form."""
    found = _expression(text, 0)
    return None if found is None or found[1] != len(text) else found[0]


def _expression(text: str, position: int) -> tuple[Path, int] | None:
    """The expression that begins at a position, and the position of its end."""
    root, function = _ROOT.match(text, position), _FUNCTION.match(text, position)
    steps: list[Step] = []
    if root is not None:
        first, position = (root[1], root[3]), root.end()
    else:
        # For classes with other names of attributes, or with methods for items.
        inner = None if function is None else _expression(text, function.end())
        if function is None or inner is None:
            return None
        (first, before), position = inner
        argument = _argument(text, position, "getattr" in function[1])
        if argument is None:
            return None
        step, position = argument
        steps += [*before, step]
    while (found := _STEP.match(text, position)) is not None:
        try:
            steps.append(_step(found))
        except (ValueError, SyntaxError):
            return None
        position = found.end()
    return (first, steps), position


def _argument(text: str, position: int, is_name: bool) -> tuple[Step, int] | None:
    """The step of a function by its second argument, which begins at a position."""
    if (found := _CONSTANT.match(text, position)) is not None:
        value = ast.literal_eval(found[1])
        return operator.attrgetter(value) if is_name else operator.itemgetter(value), found.end()
    if (found := _NTH_KEY.match(text, position)) is not None:
        number = int(found[1])
        return lambda items: items[[*dict.keys(items)][number]], found.end()
    return None


def _step(found: re.Match[str]) -> Step:
    name, key, _ = found.groups()
    if name is not None:
        return operator.attrgetter(name)
    return _referent if key is None else operator.itemgetter(ast.literal_eval(key))


def _referent(reference: Any) -> Any:
    # Dynamo's expressions have no other calls; no code of the program is called.
    return reference() if isinstance(reference, weakref.ref) else None


def _follow(value: Any, steps: Sequence[Step]) -> Any:
    """Follow steps from an object; None if they lead nowhere."""
    try:
        for step in steps:
            value = step(value)
    except (AttributeError, LookupError, TypeError):
        return None
    return value
