"""Vector-Jacobian products that are derived in a copy, in place of gradients that it holds already.

Where a tool has replaced an operator, or changes it by a differentiable routine, the gradient that
the vanilla graph holds is that of another function. The gradients below are derived anew, with the
function of TensorFlow behind ``tf.gradients``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.sites import GraphSegment

Tensors = list[Any]


def after_routines(
    routines: Sequence[Any], gradients: Tensors, derive: Callable[[Tensors], Tensors]
) -> Tensors:
    """Derive gradients that wait for the routines after the forward operator.

    Its replacement runs where a gradient reads something of it, and so do the routines then, also
    in a run in which nothing else reads its outputs.

    Args:
        routines: their nodes.
        gradients: those from which the others are derived.
        derive: derives them.
    """
    if not routines:
        return derive(gradients)
    graph, given = _internals.default_graph(), {id(gradient) for gradient in gradients}
    since = _internals.count_operations(graph)
    found = derive(gradients)
    added = _internals.operations_since(graph, since)
    names = {op.name for op in added}
    for op in added:
        if any(id(t) not in given and t.op.name not in names for t in op.inputs):
            for node in routines:
                _internals.add_control_input(op, node)
    return found


def gradients_before(segment: GraphSegment, gradients: Tensors) -> Tensors:
    """Return the gradients of the tensors before a differentiable routine.

    Args:
        segment: the tensors before and after the routine.
        gradients: the gradients of all tensors after the routine; None where there is none.
    """
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
    """The gradients of the inputs of a replaced operator.

    Args:
        given: the inputs of the replacement.
        outputs: its outputs.
        grad_outputs: their gradients; None where there is none.
        wanted: for each input, whether its gradient is read.

    Returns:
        A gradient where it is wanted (zeros if the outputs do not depend on the input), else None.
    """
    found = derived(outputs, given, grad_outputs)
    return [
        None if not is_wanted else (zeros_like(x) if new is None else new)
        for is_wanted, new, x in zip(wanted, found, given, strict=False)
    ]


def derived(outputs: Tensors, tensors: Tensors, gradients: Sequence[Any]) -> Tensors:
    """The gradients of `tensors` from those of `outputs`; None where they do not depend on them.

    Args:
        gradients: of the outputs; None and zeros of :func:`zeros_like` are left out.
    """
    pairs = zip(outputs, gradients, strict=False)
    known = [(y, g) for y, g in pairs if g is not None and not is_zeros(g)]
    if not known:
        return [None] * len(tensors)
    return differentiate([y for y, _ in known], tensors, [g for _, g in known])


def zeros_like(tensor: Any) -> Any:
    """Zeros in place of a missing gradient, also of a variable; :func:`is_zeros` knows them."""
    zeros = _internals.zeros_like(tensor)
    _ZEROS.add(zeros.op)
    return zeros


def is_zeros(gradient: Any) -> bool:
    """True if a gradient was made by :func:`zeros_like`."""
    return isinstance(gradient, tf.Tensor) and gradient.op in _ZEROS


_ZEROS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The operators of zeros in place of missing gradients."""


def differentiate(ys: Tensors, xs: Tensors, gradients: Tensors, graph: Any = None) -> Tensors:
    """The gradients of `xs`; none of them is taken to depend on another.

    The gradient function of a loop or branch is given zeros for outputs of types that have no
    gradient, such as bool, and TensorFlow refuses such outputs here: they are left out.

    Args:
        gradients: those of `ys`.
        graph: the graph of `ys` and `xs`; None for the one that operators are added to.
    """
    pairs = [(y, g) for y, g in zip(ys, gradients, strict=True) if _internals.is_trainable(y)]
    if not pairs:
        return [None] * len(xs)
    result: Tensors = _internals.gradients_in_graph(
        [y for y, _ in pairs],
        xs,
        grad_ys=[gradient for _, gradient in pairs],
        stop_gradients=xs,
        src_graph=_internals.default_graph() if graph is None else graph,
    )
    return result
