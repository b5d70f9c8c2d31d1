"""The modules of ``tf.Module``: their variables, and the layers of Keras within them.

Their paths are those that the driver tells: attribute paths from the outermost module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from amanda_tools.summary.keras_layers import KerasLayers, is_keras
from amanda_tools.summary.recorder import ModuleFact, Parameter


def is_module(value: Any) -> bool:
    """Whether it is a module of ``tf.Module``, and no layer of Keras."""
    tensorflow = sys.modules.get("tensorflow")
    cls = getattr(tensorflow, "Module", None)
    return cls is not None and isinstance(value, cls) and not is_keras(value)


class Gone:
    """Stands for a module that the program has dropped, while its operators run in a graph."""

    def __init__(self, name: str) -> None:
        self.name = name


class TensorFlowModules:
    """How modules of ``tf.Module`` are named and described."""

    separator = "/"
    calls_are_seen = False

    def __init__(self) -> None:
        self._layers = KerasLayers()

    def name(self, root: Any) -> str:
        return str(root.name)

    def root_path(self, root: Any) -> str:
        return str(root.name)

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        # Those within it are shown where they are called.
        yield str(root.name), root

    def local_name(self, module: Any) -> str:
        return str(getattr(module, "name", ""))

    def describe(self, path: str, depth: int, module: Any) -> ModuleFact:
        if isinstance(module, Gone):
            return ModuleFact(path, "-", depth, [])
        if is_keras(module):
            return self._layers.describe(path, depth, module)
        found = [_parameter(variable, bool(variable.trainable)) for variable in module.variables]
        for layer in _layers_in(module):
            found += self._layers.describe(path, depth, layer).parameters
        return ModuleFact(path, type(module).__name__, depth, found)

    def is_symbolic(self, inputs: Any) -> bool:
        return False


def _parameter(variable: Any, is_trainable: bool) -> Parameter:
    size = 1
    for length in variable.shape:
        size *= int(length)
    return Parameter(id(variable), size, size * variable.dtype.size, is_trainable)


def _layers_in(module: Any) -> Iterator[Any]:
    """The layers of Keras that a module, or one within it, holds."""
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
