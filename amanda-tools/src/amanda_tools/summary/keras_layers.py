"""The layers of Keras, on any backend: their tree, and a patch that reports their calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from amanda_tools.summary.recorder import ModuleFact, ParameterFact, Recorder, specs_of


def _layer_class() -> Any:
    return getattr(sys.modules.get("keras.layers"), "Layer", None)


def is_keras(module: Any) -> bool:
    """True if a module is a layer of Keras."""
    layer = _layer_class()
    return layer is not None and isinstance(module, layer)


def is_symbolic(inputs: Any) -> bool:
    """True if an input is a ``KerasTensor``, with which Keras builds models."""
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        return any(is_symbolic(item) for item in inputs)
    return type(inputs).__name__ == "KerasTensor"


class KerasModules:
    """Names and descriptions of layers of Keras."""

    separator = "/"
    calls_are_seen = True

    def name(self, root: Any) -> str:
        return str(root.name)

    def root_path(self, root: Any) -> str:
        return str(root.name)

    def modules(self, root: Any) -> Iterator[tuple[str, Any]]:
        yield from self._tree(root, str(root.name))

    def _tree(self, layer: Any, path: str) -> Iterator[tuple[str, Any]]:
        yield path, layer
        for part in getattr(layer, "layers", ()):
            if is_keras(part):
                yield from self._tree(part, f"{path}/{part.name}")

    def local_name(self, module: Any) -> str:
        return str(getattr(module, "name", ""))

    def describe(self, path: str, depth: int, module: Any) -> ModuleFact:
        trainable = {id(weight) for weight in module.trainable_weights}
        parameters = []
        for weight in module.weights:
            size = 1
            for length in weight.shape:
                size *= int(length)
            item = getattr(weight.dtype, "size", None) or _item_size(str(weight.dtype))
            parameters.append(ParameterFact(id(weight), size, size * item, id(weight) in trainable))
        # An input is not called.
        shape = getattr(module, "batch_shape", None)
        return ModuleFact(path, type(module).__name__, depth, parameters, shape)

    def is_symbolic(self, inputs: Any) -> bool:
        return is_symbolic(inputs)


def _item_size(dtype: str) -> int:
    """Return the bytes of an element, from the number of bits in the name of its type."""
    bits = "".join(letter for letter in dtype if letter.isdigit())
    return max(int(bits) // 8, 1) if bits else 1


class KerasCallPatch:
    """A patch of ``Layer.__call__`` that reports calls to a recorder.

    On the backend of PyTorch layers are modules, and :class:`TorchCalls` reports them. On all
    backends a layer that is not built calls its parts to learn their shapes before it runs (Keras
    3.15); those calls are not recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._layers = KerasModules()
        self._are_modules = False
        self._runs_now: Callable[[], bool] = lambda: True
        self._layer: Any = None
        self._patch: Any = None
        self._vanilla: Any = None

    def open(self) -> None:
        """Patch the class of layers if Keras is imported; a second call does nothing."""
        keras, layer = sys.modules.get("keras"), _layer_class()
        if self._patch is not None or layer is None or not hasattr(keras, "config"):
            return
        backend = sys.modules["keras"].config.backend()
        self._are_modules = backend == "torch"
        if backend == "tensorflow":
            self._runs_now = sys.modules["tensorflow"].executing_eagerly
        self._layer, self._vanilla = layer, layer.__call__
        self._patch = layer.__call__ = _reporting(self, self._vanilla)

    def close(self) -> None:
        """Undo the patch; under a later patch of others it stays, and only forwards calls."""
        patch, self._patch = self._patch, None
        if patch is not None and self._layer.__dict__.get("__call__") is patch:
            self._layer.__call__ = self._vanilla

    def called(self, layer: Any, args: Any, kwargs: Any) -> Any:
        """Call a layer, and report the call."""
        # A class that calls its base class's ``__call__`` makes one call.
        is_part = self._patch is None or self._recorder.is_innermost(layer)
        # In a graph nothing runs yet: the driver reports the calls when it does.
        if is_part or not self._runs_now():
            return self._vanilla(layer, *args, **kwargs)
        recorder, inputs = self._recorder, (args, kwargs)
        around = recorder.outermost()
        if around is not None and not around.calls_are_seen:
            # Within a module of ``tf.Module`` the driver reports the calls of layers, too.
            return self._vanilla(layer, *args, **kwargs)
        if not self._are_modules:
            recorder.enter(self._layers, layer, inputs)
        output = None
        building = recorder.building()
        building.append(None if is_symbolic(inputs) else layer)
        try:
            output = self._vanilla(layer, *args, **kwargs)
        finally:
            building.pop()
            if not self._are_modules:
                recorder.leave(layer, specs_of(output))
        return output


def _reporting(calls: KerasCallPatch, vanilla: Any) -> Any:
    # AutoGraph converts functions by their module, and leaves those of Keras as they are.
    @functools.wraps(vanilla)
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return calls.called(layer, args, kwargs)

    return __call__


def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a model once for its figures, in inference."""
    model(*args, training=False, **kwargs)
