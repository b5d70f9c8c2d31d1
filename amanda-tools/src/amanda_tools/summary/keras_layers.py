"""The layers of Keras, on any backend: their tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amanda_tools._frameworks import is_keras
from amanda_tools._values.shapes import size_of
from amanda_tools.summary.recorder import ModuleFact, ModuleSource, ParameterFact


class KerasModules(ModuleSource):
    """Names and descriptions of layers of Keras."""

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        yield from self._tree(root, str(root.name))

    def _tree(self, layer: Any, path: str) -> Iterator[tuple[str, Any]]:
        yield path, layer
        for part in getattr(layer, "layers", ()):
            if is_keras(part):
                yield from self._tree(part, f"{path}/{part.name}")

    def describe(self, path: str, depth: int, module: Any) -> ModuleFact:
        trainable = {id(weight) for weight in module.trainable_weights}
        parameters = []
        for weight in module.weights:
            size = size_of(weight)
            item = getattr(weight.dtype, "size", None) or _item_size(str(weight.dtype))
            parameters.append(ParameterFact(id(weight), size, size * item, id(weight) in trainable))
        # An input is not called.
        shape = getattr(module, "batch_shape", None)
        return ModuleFact(path, type(module).__name__, depth, parameters, shape)

    def weights(self, module: Any) -> dict[str, Any]:
        own = () if getattr(module, "layers", ()) else module.weights
        return {w.path.removeprefix(f"{module.path}/"): list(w.shape) for w in own}


def _item_size(dtype: str) -> int:
    """Return the bytes of an element, from the number of bits in the name of its type."""
    bits = "".join(letter for letter in dtype if letter.isdigit())
    return max(int(bits) // 8, 1) if bits else 1
