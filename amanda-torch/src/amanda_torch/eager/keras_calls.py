"""Intercepts Keras around its layers, where PyTorch is its backend.

PyTorch's hooks for optimizers do not cover those of Keras. Before Keras trains or builds a model,
it runs the layers on tensors of its own to learn the shapes of their results: that is a part of the
setup, and no forward pass of the program (Keras 3.15)::

    calls = KerasCalls(dispatcher)
    calls.attach()
    ...                                 # models of Keras are trained
    calls.detach()
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.python.patching import PatchSet
from amanda.registry.import_hook import Watch
from amanda_torch import _internals
from amanda_torch.eager.interceptors import LOCAL, muted
from amanda_torch.eager.keras_layers import is_backend

_OPTIMIZERS = "keras.optimizers"


class KerasCalls:
    """Intercepts optimizers and shape inference of Keras, from its import on."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._patches = PatchSet()
        self._watch: Watch | None = None

    def attach(self) -> None:
        """Patch Keras, at once or when it is imported."""
        if _OPTIMIZERS in sys.modules:
            self._patch(_OPTIMIZERS)
        else:
            # Kept before it is put in place: detach() finds it also after an interrupt.
            self._watch = Watch(self._patch)
            self._watch.add([_OPTIMIZERS])

    def detach(self) -> None:
        """Undo the patches; harmless when called twice."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._patches.undo()

    def _patch(self, module: str) -> None:
        optimizer = getattr(sys.modules[module], "Optimizer", None)
        if optimizer is not None and is_backend() and hasattr(optimizer, "apply"):
            self._patches.wrap(optimizer, "apply", self._stepping)
            backend, name = _internals.keras_backend(), _internals.KERAS_INFERENCE
            if hasattr(backend, name):
                self._patches.wrap(backend, name, _inferring)

    def _stepping(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        points = self._dispatcher.points

        @functools.wraps(vanilla)
        def apply(optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
            step = functools.partial(vanilla, optimizer, *args, **kwargs)
            return points.call_optimizer(step, functools.partial(_steps_of, optimizer))

        return apply


def _inferring(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(vanilla)
    def compute_output_spec(*args: Any, **kwargs: Any) -> Any:
        interceptor = LOCAL.interceptor
        if interceptor is None:
            return vanilla(*args, **kwargs)
        with interceptor.inferring_shapes():
            return vanilla(*args, **kwargs)

    return compute_output_spec


def _steps_of(optimizer: Any) -> int | None:
    """The steps of an optimizer that accumulates gradients; None for an optimizer that steps at
    each call."""
    if not getattr(optimizer, "gradient_accumulation_steps", None):
        return None
    with muted():
        return int(optimizer.iterations)
