"""Which modules the operators of a captured graph belong to.

Dynamo notes for each node the module calls that it was captured in: the number of the module
object (``140342625286672@1`` in its second call), and an expression that leads to it,
``L['self'].encoder.layers.0``. A graph may be run with another instance of the same class than it
was captured with; so the modules are looked up anew, in the variables of the function that runs
it::

    places = Places(graph)
    modules = places.find(places.roots(frame))
    [modules[call.module] for call in calls_of(node)]
"""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import attrs
from torch import fx, nn

from amanda_torch import _internals

_ROOT = re.compile(r"([LG])\[(['\"])(\w+)\2\]")
_STEP = re.compile(r"\.(\w+)|\[([^\]]+)\]")


@attrs.frozen
class ModuleCall:
    """A call of a module within the graph.

    Attributes:
        key: tells it from the other calls of the module.
        module: tells the module from the others.
    """

    key: str
    module: str


def calls_of(node: fx.Node) -> tuple[ModuleCall, ...]:
    """The module calls that a node was captured in, outermost first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return tuple(ModuleCall(key, key.partition("@")[0]) for key in stack)


_MADE: weakref.WeakValueDictionary[tuple[type, int], nn.Module] = weakref.WeakValueDictionary()
"""Modules that stand for those that captured code makes, by class and number within a graph."""


class Places:
    """The modules of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._paths: dict[str, tuple[tuple[str, str], Sequence[Any]] | None] = {}
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

    def roots(self, frame: FrameType) -> list[Any]:
        """The objects that the expressions begin with.

        Args:
            frame: of the function that runs the graph.
        """
        return [
            (frame.f_locals if scope == "L" else frame.f_globals).get(name)
            for scope, name in self._roots
        ]

    def find(self, roots: list[Any]) -> dict[str, nn.Module]:
        """The modules that can be found, by :attr:`ModuleCall.module`.

        Args:
            roots: as :meth:`roots` gives them.
        """
        found = dict(self._made)
        for key, path in self._paths.items():
            module = None if path is None else _follow(roots[self._roots.index(path[0])], path[1])
            if isinstance(module, nn.Module):
                found[key] = module
        return found


def _stand_in(cls: type[nn.Module], number: int) -> nn.Module:
    """A module of a class, which has nothing of it but its name; all graphs share it."""
    module = _MADE.get((cls, number))
    if module is None:
        module = _MADE[cls, number] = cls.__new__(cls)
        nn.Module.__init__(module)
    return module


def _parsed(path: str) -> tuple[tuple[str, str], Sequence[Any]] | None:
    """The root of an expression, and the names and keys that follow; None for another form."""
    root = _ROOT.match(path)
    if root is None:
        return None
    steps: list[Any] = []
    position = root.end()
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            return None
        try:
            steps.append(step[1] if step[1] is not None else (ast.literal_eval(step[2]),))
        except ValueError:
            return None
        position = step.end()
    return (root[1], root[3]), steps


def _follow(value: Any, steps: Sequence[Any]) -> Any:
    """What names (strings) and keys (in tuples) lead to; None if they lead nowhere."""
    try:
        for step in steps:
            value = value[step[0]] if isinstance(step, tuple) else getattr(value, step)
    except (AttributeError, LookupError, TypeError):
        return None
    return value
