"""The layers of Keras, on any backend: their tree, and a patch that notes which are being built."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from amanda_tools._frameworks import is_keras, keras_layer_class
from amanda_tools._values.shapes import size_of
from amanda_tools.summary.recorder import ModuleFact, ModuleSource, ParameterFact, Recorder


def is_symbolic(inputs: Any) -> bool:
    """True if an input is a ``KerasTensor``, with which Keras builds models."""
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        return any(is_symbolic(item) for item in inputs)
    return type(inputs).__name__ == "KerasTensor"


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


class KerasCallPatch:
    """A patch of ``Layer.__call__`` that tells a recorder which layers are being built.

    A layer that is not built calls its parts to learn their shapes before it runs (Keras 3.15);
    those calls are not recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._layer: Any = None
        self._patch: Any = None
        self._vanilla: Any = None

    def open(self) -> None:
        """Patch the class of layers if Keras is imported; a second call does nothing."""
        layer = keras_layer_class()
        if self._patch is None and layer is not None:
            self._layer, self._vanilla = layer, layer.__call__
            self._patch = layer.__call__ = _noting(self, self._vanilla)

    def close(self) -> None:
        """Undo the patch; under a later patch of others it stays, and only forwards calls."""
        patch, self._patch = self._patch, None
        if patch is not None and self._layer.__dict__.get("__call__") is patch:
            self._layer.__call__ = self._vanilla

    def called(self, layer: Any, args: Any, kwargs: Any) -> Any:
        """Call a layer, and note it as being built, if it is not built yet, until then."""
        if self._patch is None:
            return self._vanilla(layer, *args, **kwargs)
        building = self._recorder.building()
        building.append(None if is_symbolic((args, kwargs)) else layer)
        try:
            return self._vanilla(layer, *args, **kwargs)
        finally:
            building.pop()


def _noting(patch: KerasCallPatch, vanilla: Any) -> Any:
    # AutoGraph converts functions by their module, and leaves those of Keras as they are.
    @functools.wraps(vanilla)
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return patch.called(layer, args, kwargs)

    return __call__
