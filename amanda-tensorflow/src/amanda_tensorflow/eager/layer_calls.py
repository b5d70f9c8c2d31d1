"""Calls of Keras layers and steps of Keras optimizers in eager mode, reported to tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from amanda.state import STATE
from amanda_tensorflow.eager.autodiff import is_tensor
from amanda_tensorflow.eager.tracker import LOCAL, EagerTracker, unwatched
from amanda_tensorflow.keras_layers.optimizers import accumulates


def told_call(
    tracker: EagerTracker, layer: Any, inputs: Sequence[Any], trains: bool | None
) -> AbstractContextManager[Callable[[Any], Any]]:
    """The call of a layer that has been entered; see :meth:`Points.module_call`."""
    dispatcher, places = tracker.dispatcher, tracker.ids.places
    return dispatcher.points.module_call(
        dispatcher.scopes(),
        layer,
        inputs,
        _tensors,
        trains,
        module=places[-1].module.partition("/")[2] if places else "",
        id=places[-1].scope.rstrip("/") if places else "",
    )


def is_symbolic(args: Sequence[Any]) -> bool:
    """True if a layer is called to build a model, on tensors that only stand for others."""
    return any(type(item).__name__ == "KerasTensor" for item in tf.nest.flatten(list(args)))


def _tensors(value: Any) -> Sequence[Any]:
    """The tensors that a layer is given or gives, and the arrays of numbers as such."""
    found = []
    for item in tf.nest.flatten(value):
        if isinstance(item, np.ndarray) and item.dtype.kind in "biuf":
            found.append(tf.convert_to_tensor(item))
        elif item is not None and is_tensor(item):
            found.append(item)
    return found


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
