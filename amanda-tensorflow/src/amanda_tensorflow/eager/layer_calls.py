"""Calls of Keras layers and steps of Keras optimizers in eager mode, reported to tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda.engine.dispatch import Dispatcher
from amanda.interface.points import Point
from amanda.state import STATE
from amanda_tensorflow.eager.autodiff import is_tensor
from amanda_tensorflow.eager.thread import LOCAL, EagerTracker, unwatched
from amanda_tensorflow.keras_layers.optimizers import accumulates


class ToldCall:
    """A call of a layer by a thread, which is reported to tools.

    Args:
        layer: the layer.
        inputs: its arguments.
    """

    def __init__(
        self, dispatcher: Dispatcher, tracker: EagerTracker, layer: Any, inputs: Sequence[Any]
    ) -> None:
        self._dispatcher = dispatcher
        self._tracker = tracker
        self._layer = layer
        self._inputs = _tensors(inputs)
        self._outputs: Sequence[Any] | None = None
        self._scopes = dispatcher.scopes()
        self._pass = ""

    def begin(self, is_outermost: bool, training: bool) -> None:
        """Report to tools that the layer was entered."""
        points = self._dispatcher.points
        if is_outermost:
            self._pass = self._id()
            facts: functools.partial[Any] = functools.partial(
                dict, target=self._layer, inputs=self._inputs
            )
            points.forward_begins(self._scopes, self._pass, training, facts=facts)
        try:
            self._tell(Point.MODULE_ENTRY)
        except BaseException:
            if self._pass:
                points.forward_ends(self._scopes, self._pass)
            raise

    def returned(self, result: Any) -> Any:
        """Note the layer's result; returns it."""
        self._outputs = _tensors(result)
        return result

    def end(self) -> None:
        """Report to tools that the layer was left."""
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
            module = places[-1].module.partition("/")[2] if places else ""
            facts = {"module": module, "id": self._id(), "target": self._layer}
            given = {"inputs": self._inputs, "outputs": self._outputs}
            points.module(self._scopes, point, **facts, **given)


def is_symbolic(args: Sequence[Any]) -> bool:
    """True if a layer is called to build a model, on tensors that only stand for others."""
    return any(type(item).__name__ == "KerasTensor" for item in tf.nest.flatten(list(args)))


def _tensors(value: Any) -> Sequence[Any]:
    return [item for item in tf.nest.flatten(value) if item is not None and is_tensor(item)]


def apart(vanilla: Callable[..., Any], tracker: EagerTracker) -> Callable[..., Any]:
    """The call of a layer that is not built yet, and that it may build first.

    Operators that draw its weights have ids of their own, so that those of its first call have the
    ids that they have in all others.
    """

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # Keras 3 gives each layer a method of its own, which calls that of its class.
        build = vars(layer).get("build")
        if build is None:
            return vanilla(layer, *args, **kwargs)

        @functools.wraps(build)
        def building(*shapes: Any, **named: Any) -> Any:
            tracker.move(tracker.ids.enter_build)
            try:
                return build(*shapes, **named)
            finally:
                tracker.move(tracker.ids.leave)

        vars(layer)["build"] = building
        try:
            return vanilla(layer, *args, **kwargs)
        finally:
            vars(layer)["build"] = build

    return call


def step_optimizer(vanilla: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Let an optimizer of Keras step at once; called by the patch of its method."""
    tracker = LOCAL.tracker
    if tracker is None or tracker.muted or STATE.paused:
        return vanilla(optimizer, *args, **kwargs)
    if tracker.outdated:
        tracker.refresh()
    tracker.move(tracker.ids.enter_optimizer, optimizer)
    try:
        if not tracker.tells:
            return vanilla(optimizer, *args, **kwargs)
        step = functools.partial(vanilla, optimizer, *args, **kwargs)
        steps = functools.partial(_steps_of, optimizer)
        return tracker.dispatcher.points.call_optimizer(step, steps)
    finally:
        tracker.move(tracker.ids.leave)


def _steps_of(optimizer: Any) -> int | None:
    """The steps of an optimizer that accumulates gradients; None for one that steps at every
    call."""
    if not accumulates(optimizer):
        return None
    with unwatched():
        return int(optimizer.iterations)
