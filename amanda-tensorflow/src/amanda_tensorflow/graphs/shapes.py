"""Static shapes of a copy: those of the vanilla graph, also behind run-time routines.

TensorFlow computes the static shape of an operator's output from the static shapes of its inputs,
and from their values as far as constants determine them. A routine that runs as Python hides these
values: behind it, ``Reshape`` and ``Fill`` have outputs of unknown dimensions. Tools, traced
routines and the gradients that are derived in the copy read static shapes, and some operators
cannot be created without (``MatrixDiagV3`` of TensorFlow 2.16 to 2.21 takes an unknown length
for -1)::

    new = with_shapes(op, inputs, lambda: create(inputs))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from amanda_tensorflow.operators.types import UNROUTABLE


def with_shapes(op: Any, inputs: Sequence[Any], create: Callable[[], Any]) -> Any:
    """Create an operator of a copy. Returns it, with the static shapes of the vanilla one.

    Args:
        op: the vanilla operator.
        inputs: the inputs in the copy. Behind a replacement they may have other shapes than the
            vanilla ones; the outputs then have the shapes that TensorFlow computes.
        create: adds the operator to the copy.
    """
    try:
        new = create()
    except ValueError:
        # It could be created in the vanilla graph. Behind a replacement whose shape is not known
        # before it runs, that of the vanilla graph is taken for it.
        if not copy_shapes(op.inputs, inputs):
            raise
        new = create()
    if all(_is_same(old, given) for old, given in zip(op.inputs, inputs, strict=True)):
        copy_shapes(op.outputs, new.outputs)
    return new


def copy_shapes(sources: Iterable[Any], tensors: Iterable[Any]) -> bool:
    """Give tensors of a copy the static shapes of vanilla tensors, where they know less.

    Returns:
        Whether any shape was changed.
    """
    is_changed = False
    for old, new in zip(sources, tensors, strict=True):
        if not _is_same(old, new) and new.shape.is_compatible_with(old.shape):
            new.set_shape(old.shape)
            is_changed = True
    return is_changed


def _is_same(old: Any, new: Any) -> bool:
    """True if a tensor of a copy has the static shape of the vanilla one, or stands for state."""
    return old.dtype in UNROUTABLE or bool(old.shape == new.shape)
