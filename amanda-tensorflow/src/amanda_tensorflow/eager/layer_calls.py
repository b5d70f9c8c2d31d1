"""Calls of Keras layers and steps of Keras optimizers that run at once, told to tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda.engine.dispatch import Dispatcher
from amanda.interface.points import Point
from amanda.patching import PatchSet
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.autodiff import is_tensor
from amanda_tensorflow.eager.thread import Tracker

_OPTIMIZERS = (("keras", "apply"), ("tf_keras", "apply_gradients"))
"""Packages of Keras, and the method that each optimizer of theirs steps by."""


class ToldCall:
    """A call of a layer by a thread of which tools are told.

    Args:
        layer: the layer.
        inputs: what it is given.
    """

    __slots__ = ("_dispatcher", "_inputs", "_layer", "_outputs", "_pass", "_scopes", "_tracker")

    def __init__(
        self, dispatcher: Dispatcher, tracker: Tracker, layer: Any, inputs: Sequence[Any]
    ) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self._layer = layer
        self._inputs = _tensors(inputs)
        self._outputs: Sequence[Any] | None = None
        self._scopes = dispatcher.scopes()
        self._pass = ""

    def begin(self, is_outermost: bool, training: bool) -> None:
        """Tell that it has been entered."""
        if is_outermost:
            self._pass = self._id()
            self._dispatcher.points.forward_begins(self._scopes, self._pass, training)
        self._tell(Point.MODULE_ENTRY)

    def returned(self, result: Any) -> Any:
        """Note the layer's result; returns it."""
        self._outputs = _tensors(result)
        return result

    def end(self) -> None:
        """Tell that it is left."""
        try:
            self._tell(Point.MODULE_EXIT)
        finally:
            if self._pass:
                self._dispatcher.points.forward_ends(self._scopes, self._pass)

    def _id(self) -> str:
        places = self._tracker.ids.places
        return places[-1].scope.rstrip("/") if places else ""

    def _tell(self, point: Point) -> None:
        points, places = self._dispatcher.points, self._tracker.ids.places
        if points.wants_modules(self._scopes):
            module = places[-1].module if places else ""
            facts = {"module": module, "id": self._id(), "target": self._layer}
            given = {"inputs": self._inputs, "outputs": self._outputs}
            points.module(self._scopes, point, **facts, **given)


def is_symbolic(args: Sequence[Any]) -> bool:
    """Whether a layer is called to build a model, on tensors that only stand for others."""
    return any(type(item).__name__ == "KerasTensor" for item in tf.nest.flatten(list(args)))


def _tensors(value: Any) -> Sequence[Any]:
    return [item for item in tf.nest.flatten(value) if item is not None and is_tensor(item)]


def patch_optimizers(patches: PatchSet, dispatcher: Dispatcher) -> None:
    """Tell of the steps of Keras' optimizers, those that are imported."""
    for package, method in _OPTIMIZERS:
        optimizer = getattr(
            getattr(sys.modules.get(package), "optimizers", None), "Optimizer", None
        )
        if optimizer is not None and hasattr(optimizer, method):
            patches.wrap(optimizer, method, _stepping(dispatcher))


def _stepping(dispatcher: Dispatcher) -> Callable[[Any], Any]:
    def wrapper(vanilla: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not _internals.executing_eagerly():
                # In a graph, which steps when it runs.
                return vanilla(*args, **kwargs)
            points, has_stepped = dispatcher.points, False
            told = points.optimizer_begins()
            try:
                result = vanilla(*args, **kwargs)
                has_stepped = True
            finally:
                points.optimizer_ends(told, has_stepped)
            return result

        return step

    return wrapper
