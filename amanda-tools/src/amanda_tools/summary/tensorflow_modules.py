"""The modules of ``tf.Module``: their variables, and the layers of Keras within them.

The driver reports their paths: attribute paths from the outermost module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from amanda_tools.summary.keras_layers import KerasModules, is_keras
from amanda_tools.summary.recorder import ModuleFact, ParameterFact


def is_module(value: Any) -> bool:
    """True for a ``tf.Module`` that is no layer of Keras."""
    tensorflow = sys.modules.get("tensorflow")
    cls = getattr(tensorflow, "Module", None)
    return cls is not None and isinstance(value, cls) and not is_keras(value)


class DroppedModule:
    """Placeholder of a module that the program has deleted, while its operators run in a graph."""

    def __init__(self, name: str) -> None:
        self.name = name


class TensorFlowModules:
    """Names and descriptions of modules of ``tf.Module``."""

    separator = "/"
    calls_are_seen = False

    def __init__(self) -> None:
        self._layers = KerasModules()

    def name(self, root: Any) -> str:
        return str(root.name)

    def root_path(self, root: Any) -> str:
        return str(root.name)

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        # Modules within it appear when they are called.
        yield str(root.name), root

    def local_name(self, module: Any) -> str:
        return str(getattr(module, "name", ""))

    def describe(self, path: str, depth: int, module: Any) -> ModuleFact:
        if isinstance(module, DroppedModule):
            return ModuleFact(path, "-", depth, [])
        if is_keras(module):
            return self._layers.describe(path, depth, module)
        found = [_parameter(variable, bool(variable.trainable)) for variable in module.variables]
        for layer in _layers_in(module):
            found += self._layers.describe(path, depth, layer).parameters
        return ModuleFact(path, type(module).__name__, depth, found)

    def is_symbolic(self, inputs: Any) -> bool:
        return False


def _parameter(variable: Any, is_trainable: bool) -> ParameterFact:
    size = 1
    for length in variable.shape:
        size *= int(length)
    return ParameterFact(id(variable), size, size * variable.dtype.size, is_trainable)


def _layers_in(module: Any) -> Iterator[Any]:
    """Yield the layers of Keras in attributes of a module and of its submodules."""
    for part in (module, *module.submodules):
        for value in vars(part).values():
            yield from (item for item in _items(value) if is_keras(item))


def _items(value: Any) -> list[Any]:
    tensorflow = sys.modules["tensorflow"]
    try:
        return list(tensorflow.nest.flatten(value))
    except (TypeError, ValueError):
        # A dictionary whose keys have no order.
        return []
