"""The modules of ``tf.Module``: their variables, and the layers of Keras within them.

The driver reports their paths: attribute paths from the outermost module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from amanda_tools._frameworks import is_keras
from amanda_tools._values.shapes import byte_size, size_of
from amanda_tools.summary.keras_layers import KerasModules
from amanda_tools.summary.recorder import ModuleFact, ModuleSource, ParameterFact


class DroppedModule:
    """Placeholder of a module that the program has deleted, while its operators run in a graph."""

    def __init__(self, name: str) -> None:
        self.name = name


class TensorFlowModules(ModuleSource):
    """Names and descriptions of modules of ``tf.Module``."""

    def __init__(self) -> None:
        self._layers = KerasModules()

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        # Modules within it appear when they are called.
        yield str(root.name), root

    def describe(self, path: str, depth: int, module: Any) -> ModuleFact:
        if isinstance(module, DroppedModule):
            return ModuleFact(path, "-", depth, [])
        if is_keras(module):
            return self._layers.describe(path, depth, module)
        found = [
            ParameterFact(id(v), size_of(v), byte_size(v) or 0, bool(v.trainable))
            for v in module.variables
        ]
        for layer in _layers_in(module):
            found += self._layers.describe(path, depth, layer).parameters
        return ModuleFact(path, type(module).__name__, depth, found)


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
