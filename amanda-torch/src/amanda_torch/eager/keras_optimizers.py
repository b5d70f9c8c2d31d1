"""Tells of the steps of Keras' optimizers, where PyTorch is its backend; and which calls are none.

They are no optimizers of PyTorch's, which has hooks for its own::

    steps = KerasOptimizers(dispatcher)
    steps.attach()
    ...                                 # models of Keras are trained
    steps.detach()
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.patching import PatchSet
from amanda.registry.import_hook import Watch
from amanda_torch.eager.interceptors import muted

_OPTIMIZERS = "keras.optimizers"

_INFERENCE = "compute_output_spec"
"""The name of Keras' function that learns the shapes of results."""


class KerasOptimizers:
    """Follows them, from the import of Keras on."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._patches = PatchSet()
        self._watch: Watch | None = None

    def attach(self) -> None:
        """Begin to notice them."""
        if _OPTIMIZERS in sys.modules:
            self._patch(_OPTIMIZERS)
        else:
            self._watch = Watch([_OPTIMIZERS], self._patch)

    def detach(self) -> None:
        """Stop to notice them; harmless when called twice."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._patches.undo()

    def _patch(self, module: str) -> None:
        optimizer = getattr(sys.modules[module], "Optimizer", None)
        if optimizer is not None and _is_backend() and hasattr(optimizer, "apply"):
            self._patches.wrap(optimizer, "apply", self._stepping)

    def _stepping(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        points = self._dispatcher.points

        @functools.wraps(vanilla)
        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before, has_stepped = _steps_of(optimizer), False
            told = points.optimizer_begins()
            try:
                result = vanilla(optimizer, *args, **kwargs)
                has_stepped = before is None or _steps_of(optimizer) != before
            finally:
                points.optimizer_ends(told, has_stepped)
            return result

        return apply


def is_shape_inference(module: Any, inputs: Any) -> bool:
    """Whether Keras calls a layer to learn the shapes of its results, before it trains.

    It calls layers on symbolic tensors of its own, and within that on tensors of PyTorch (Keras
    3.15): no forward pass of the program.
    """
    if _OPTIMIZERS not in sys.modules or not _is_backend():
        return False
    keras = sys.modules["keras"]
    if not isinstance(module, keras.layers.Layer):
        return False
    if any(isinstance(item, keras.KerasTensor) for item in keras.tree.flatten(inputs)):
        return True
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == _INFERENCE and _is_of_keras(frame):
            return True
        frame = frame.f_back
    return False


def _is_of_keras(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("keras.")


def _is_backend() -> bool:
    """Whether Keras computes with PyTorch."""
    config = sys.modules.get("keras.config")
    return config is not None and config.backend() == "torch"


def _steps_of(optimizer: Any) -> int | None:
    """The steps of an optimizer that adds up gradients meanwhile; None of one that steps always."""
    if not getattr(optimizer, "gradient_accumulation_steps", None):
        return None
    with muted():
        return int(optimizer.iterations)
