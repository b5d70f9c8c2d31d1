"""``tf.recompute_grad``: operators that the backward pass computes again keep their ids.

The function runs once in the forward pass, where no tape records it, and again in its gradient
function, under a tape of its own. Tools must act on both runs alike, or the gradients would be
those of another function. In its gradient function TensorFlow opens a tape, lets it watch copies
of the arguments, calls the function, and asks the tape for the gradients (observed in 2.16 to
2.21): the recomputation begins with ``watch`` and ends with the request for gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.engine.dispatch import Dispatcher
from amanda.python.patching import named_as
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.tape_marks import RecomputedPlace
from amanda_tensorflow.eager.tracker import LOCAL, EagerTracker


class Recomputation:
    """The second run of a function, within a backward pass.

    Args:
        place: where the first run began.
    """

    def __init__(self, tracker: EagerTracker, place: RecomputedPlace) -> None:
        self._tracker = tracker
        self._place = place
        self._tape: Any = None
        self._outer: tuple[Any, ...] | None = None

    def begin(self, tape: Any) -> None:
        """`tape` watches the copies of the arguments: the function runs next."""
        if self._tape is not None:
            return
        self._tape = tape
        tracker, context = self._tracker, _internals.context_of_process()
        self._outer = (
            context,
            context.scope_name,
            tracker.ids.counters(),
            (tracker.cells, tracker.run),
            tracker.depth,
            tracker.ids.nesting,
            tracker.ids.places,
        )
        context.scope_name = self._place.scope
        tracker.ids.set_counters(self._place.counters)
        # Its operators are forward ones, and its layers begin no iteration.
        tracker.depth = 0
        tracker.ids.nesting = 1
        tracker.ids.places = self._place.places
        tracker.go_to(tracker.ids.current, None)

    def differentiated(self, inner: Any) -> None:
        """A tape was asked for gradients; if it was the recomputation's, that has ended."""
        if _internals.is_tape_of(inner, self._tape):
            self.end()

    def end(self) -> None:
        """Go back to where the backward pass was; harmless when called twice."""
        if self._outer is None:
            return
        tracker = self._tracker
        context, scope, counters, way_back, *rest = self._outer
        tracker.depth, tracker.ids.nesting, tracker.ids.places = rest
        self._outer = None
        context.scope_name = scope
        tracker.ids.set_counters(counters)
        tracker.go_to(*way_back)


def noting_places(vanilla: Any) -> Any:
    """The patch of ``custom_gradient._eager_mode_decorator``: notes where a function begins."""

    def _eager_mode_decorator(f: Any, args: Any, kwargs: Any) -> Any:
        tracker = LOCAL.tracker
        if tracker is None or tracker.muted or STATE.paused:
            return vanilla(f, args, kwargs)
        place = None
        if _internals.is_recomputed(f):
            scope = _internals.context_of_process().scope_name
            place = RecomputedPlace(scope, tracker.ids.places, tracker.ids.counters())
        tracker.places.append(place)
        try:
            return vanilla(f, args, kwargs)
        finally:
            tracker.places.pop()

    return named_as(vanilla, _eager_mode_decorator)


def recomputing(
    dispatcher: Dispatcher, place: RecomputedPlace, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A gradient function that runs the function of `place` again."""

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
    """The patch of ``tf.GradientTape.watch``, after which a recomputation begins."""

    def watch(self: Any, tensor: Any) -> Any:
        result = vanilla(self, tensor)
        tracker = LOCAL.tracker
        if tracker is not None and tracker.recomputation is not None:
            tracker.recomputation.begin(self)
        return result

    return named_as(vanilla, watch)
