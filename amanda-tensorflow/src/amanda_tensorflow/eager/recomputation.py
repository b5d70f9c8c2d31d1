"""``tf.recompute_grad``: what is computed again in the backward pass meets its first ids.

The function runs once in the forward pass, where no tape records it, and again in
its gradient function, this time under a tape of its own. The tools must act on
both runs alike, or the gradients would be those of another function. In its
gradient function TensorFlow opens a tape, lets it watch copies of the arguments,
calls the function, and asks that tape for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.tape_marks import Place
from amanda_tensorflow.eager.thread import LOCAL, Tracker


class Recomputation:
    """A function's second run."""

    def __init__(self, tracker: Tracker, place: Place) -> None:
        self._tracker = tracker
        self._place = place
        self._tape: Any = None
        self._outer: tuple[Any, ...] | None = None

    def begin(self, tape: Any) -> None:
        """The copies of the arguments are watched: what comes now is the function."""
        if self._tape is not None:
            return
        self._tape = tape
        tracker, context = self._tracker, _internals.context_of_process()
        self._outer = (
            context,
            context.scope_name,
            tracker.counters(),
            (tracker.cells, tracker.run),
            tracker.depth,
            tracker.layers,
        )
        context.scope_name = self._place.scope
        tracker.set_counters(self._place.counters)
        tracker.go_to(tracker.forward, None)
        # It is no backward pass, and the layers in it are none that begins an iteration.
        tracker.depth = 0
        tracker.layers = 1

    def differentiated(self, inner: Any) -> None:
        """A tape was asked for gradients: if it was the function's own, it has run."""
        if _internals.is_tape_of(inner, self._tape):
            self.end()

    def end(self) -> None:
        """Go back to where it was in the backward pass; harmless when called twice."""
        if self._outer is None:
            return
        tracker = self._tracker
        context, scope, counters, way_back, tracker.depth, tracker.layers = self._outer
        self._outer = None
        context.scope_name = scope
        tracker.set_counters(counters)
        tracker.go_to(*way_back)


def noting_places(vanilla: Any) -> Any:
    """Note where a function with a custom gradient begins, if it will run again."""

    def _eager_mode_decorator(f: Any, args: Any, kwargs: Any) -> Any:
        tracker = LOCAL.tracker
        if tracker is None or tracker.muted or STATE.paused:
            return vanilla(f, args, kwargs)
        place = None
        if _internals.is_recomputed(f):
            scope = _internals.context_of_process().scope_name
            place = Place(scope, tracker.counters())
        tracker.places.append(place)
        try:
            return vanilla(f, args, kwargs)
        finally:
            tracker.places.pop()

    return _eager_mode_decorator


def recomputing(
    dispatcher: Dispatcher, place: Place, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The gradient function of a function that it runs again."""

    def backward_function(*out_grads: Any) -> Any:
        tracker = LOCAL.tracker
        if tracker is None or tracker.muted or dispatcher.is_paused():
            return function(*out_grads)
        recomputation = Recomputation(tracker, place)
        outer, tracker.recomputation = tracker.recomputation, recomputation
        try:
            return function(*out_grads)
        finally:
            recomputation.end()
            tracker.recomputation = outer

    return backward_function


def beginning_again(vanilla: Any) -> Any:
    """``tf.GradientTape.watch``, after which a recomputation begins."""

    def watch(tape: Any, tensor: Any) -> Any:
        result = vanilla(tape, tensor)
        tracker = LOCAL.tracker
        if tracker is not None and tracker.recomputation is not None:
            tracker.recomputation.begin(tape)
        return result

    return watch
