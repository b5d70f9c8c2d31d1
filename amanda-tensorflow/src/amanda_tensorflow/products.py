"""Vector-Jacobian products that take the place of gradients that a graph holds already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.sites import Segment

Tensors = list[Any]


def through(segment: Segment, gradients: Tensors) -> Tensors:
    """Gradients of what a differentiable routine has given, as those of what it was given."""
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
    """The gradients of a replaced operator, where they are wanted."""
    known = [(y, g) for y, g in zip(outputs, grad_outputs, strict=False) if g is not None]
    found = differentiate([y for y, _ in known], given, [g for _, g in known])
    return [
        None if not is_wanted else (tf.zeros_like(x) if new is None else new)
        for is_wanted, new, x in zip(wanted, found, given, strict=False)
    ]


def differentiate(ys: Tensors, xs: Tensors, gradients: Tensors) -> Tensors:
    """The gradients of `xs`, each of which stands for itself alone."""
    result: Tensors = _internals.gradients_in_graph(
        ys, xs, grad_ys=gradients, stop_gradients=xs, src_graph=_internals.default_graph()
    )
    return result
