"""Vector-Jacobian products that take the place of gradients that a graph holds already."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.sites import Segment

Tensors = list[Any]


def through(segment: Segment, gradients: Tensors) -> Tensors:
    """GraphGradients of what a differentiable routine has given, as those of what it was given."""
    changed = list(gradients)
    known = [i for i in segment.positions if i < len(gradients) and gradients[i] is not None]
    if not known:
        return changed
    at = {position: k for k, position in enumerate(segment.positions)}
    found = differentiate(
        [segment.new[at[i]] for i in known], segment.old, [gradients[i] for i in known]
    )
    for position, gradient in zip(segment.positions, found, strict=True):
        changed[position] = gradient
    return changed


def product(
    given: Tensors, outputs: Tensors, grad_outputs: Tensors, wanted: Sequence[bool]
) -> Tensors:
    """The gradients of a replaced operator, where they are wanted; zeros where it has none."""
    found = derived(outputs, given, grad_outputs)
    return [
        None if not is_wanted else (zeros_like(x) if new is None else new)
        for is_wanted, new, x in zip(wanted, found, given, strict=False)
    ]


def derived(outputs: Tensors, tensors: Tensors, gradients: Sequence[Any]) -> Tensors:
    """The gradients of tensors from those of outputs, which may be None or known to be zeros."""
    pairs = zip(outputs, gradients, strict=False)
    known = [(y, g) for y, g in pairs if g is not None and not is_zeros(g)]
    if not known:
        return [None] * len(tensors)
    return differentiate([y for y, _ in known], tensors, [g for _, g in known])


def zeros_like(tensor: Any) -> Any:
    """Zeros for a gradient that is not there; :func:`is_zeros` knows them."""
    zeros = tf.zeros_like(tensor)
    _ZEROS.add(zeros.op)
    return zeros


def is_zeros(gradient: Any) -> bool:
    """Whether a gradient is known to be zeros."""
    return isinstance(gradient, tf.Tensor) and gradient.op in _ZEROS


_ZEROS: weakref.WeakSet[Any] = weakref.WeakSet()


def differentiate(ys: Tensors, xs: Tensors, gradients: Tensors) -> Tensors:
    """The gradients of `xs`, each of which stands for itself alone."""
    result: Tensors = _internals.gradients_in_graph(
        ys, xs, grad_ys=gradients, stop_gradients=xs, src_graph=_internals.default_graph()
    )
    return result
