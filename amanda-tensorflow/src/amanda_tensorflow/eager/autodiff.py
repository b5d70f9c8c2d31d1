"""Eager routines and automatic differentiation: isolation, and the straight-through gradient.

A routine runs while no tape records. A tensor that it returns in place of another gets a record of
ours, by which its gradient passes to that other tensor unchanged (contract rule 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda.engine.dispatch import Dispatcher
from amanda.errors import RoutineResultError
from amanda.interface.action import Action, ActionKind
from amanda.state import STATE
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.tracker import LOCAL, unwatched
from amanda_tensorflow.operators.types import UNROUTABLE, is_differentiable

_GRADIENTS = frozenset({ActionKind.BEFORE_BACKWARD_OP, ActionKind.AFTER_BACKWARD_OP})
"""Actions whose routines are given gradients."""


class _Isolated:
    """Within it, no tape records. One object serves all routines: core calls each in a block of its
    own, with a list of what is to be undone."""

    def __enter__(self) -> None:
        if not _recording_is_stopped():
            STATE.undo.append(_RESTART)
            _internals.stop_recording_here()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        undo = STATE.undo
        if undo[-1] is _RESTART:
            _internals.restart_recording_here()
            del undo[-1]
        if error is not None:
            tracker = LOCAL.tracker
            if tracker is not None and tracker.failures:
                tracker.failures[-1] = error


_recording_is_stopped = _internals.recording_is_stopped
_RESTART = _internals.restart_recording_here, ()
ISOLATED = _Isolated()
"""The context in which core calls a routine that takes no part in differentiation."""


def is_tensor(value: Any) -> bool:
    """True if `value` is a tensor, or slices of one (the form that some gradients have)."""
    return isinstance(value, (_internals.EagerTensor, tf.IndexedSlices))


def substitute(old: Any, new: Any, action: Action) -> Any:
    """The tensor to go on with where a routine returned `new` in place of `old`.

    Its gradient passes straight through to `old`, of any order, unless the routine takes part in
    differentiation.

    Raises:
        RoutineResultError: the shapes differ, or `old` stands for state.
    """
    if old is None or isinstance(old, tf.IndexedSlices) or isinstance(new, tf.IndexedSlices):
        return new
    if old.dtype in UNROUTABLE:
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} returned another tensor in place of one of "
            f"type {old.dtype.name}, which stands for state and cannot be replaced; return None "
            "for it, or select other positions"
        )
    if action.differentiable:
        return new
    if new.shape != old.shape:
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must return tensors of the shapes it got, "
            f"expected {tuple(old.shape)}, got {tuple(new.shape)}; record it under "
            "amanda.ad_enabled() if the gradient is to follow the new shape"
        )
    if action.kind in _GRADIENTS and new.dtype != old.dtype:
        with unwatched(), _internals.stop_recording():
            new = tf.cast(new, old.dtype)
    if _internals.no_tape_records():
        return new
    # The routine may have returned a tensor that the program uses elsewhere, too. The record must
    # hold for this use of it alone.
    new = detached(new)
    if is_differentiable(old) and is_differentiable(new):
        _straight_through(old, new)
    return new


def detached(tensor: Any) -> Any:
    """A tensor of the same value that no tape knows."""
    with unwatched(), _internals.stop_recording():
        return _internals.identity(tensor)


def _straight_through(old: Any, new: Any) -> None:
    """Record that the gradient of `new` is that of `old`, cast if their types differ."""
    dtype, new_dtype = old.dtype, new.dtype
    if dtype == new_dtype:
        record("AmandaStraightThrough", [new], [old], lambda gradient: [gradient])
        return

    def backward(gradient: Any) -> list[Any]:
        with unwatched():
            return [tf.cast(gradient, dtype)]

    def forward(tangent: Any) -> list[Any]:
        with unwatched():
            return [tf.cast(tangent, new_dtype)]

    record("AmandaStraightThrough", [new], [old], backward, forward)


def record(
    name: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]] | None = None,
) -> None:
    """Let the tapes of this thread record that `outputs` were computed from `inputs`.

    Args:
        backward: maps the gradients of the outputs to those of the inputs.
        forward: maps the tangents of the inputs to those of the outputs; None to transpose
            `backward`.
    """
    _internals.record_on_tapes(name, list(outputs), list(inputs), backward, forward)


def densified(values: Sequence[Any], actions: Sequence[Action]) -> list[Any]:
    """Gradients with those that are slices made dense, where a routine selects them."""
    values = list(values)
    for index, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices) and any(
            index in action.positions(len(values)) for action in actions
        ):
            with unwatched():
                values[index] = tf.convert_to_tensor(value)
    return values


def run_on_gradients(
    dispatcher: Dispatcher, actions: Sequence[Action], values: Sequence[Any]
) -> list[Any]:
    """Run routines on gradients; slices that no routine has changed stay slices."""
    dense = densified(values, actions)
    results = dispatcher.run_all(actions, dense)
    return [
        value if new is shown else new
        for value, shown, new in zip(values, dense, results, strict=True)
    ]
