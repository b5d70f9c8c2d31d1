"""The shapes of gradients that a tool supplies for the inputs of an operator.

TensorFlow does not look at them, and what reads a gradient may broadcast it: an optimizer would
subtract a wrong one from each row of a variable::

    gradients = checked(replaced_gradients(...), action, gradient_shapes(inputs))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.errors import RoutineResultError
from amanda.interface.action import Action
from amanda_tensorflow.operators.types import UNROUTABLE


def gradient_shapes(inputs: Sequence[Any]) -> list[Any]:
    """The shapes of the gradients of `inputs`; None for absent ones, and for state."""
    return [None if x is None or x.dtype in UNROUTABLE else x.shape for x in inputs]


def checked(gradients: list[Any], action: Action, shapes: Sequence[Any]) -> list[Any]:
    """The gradients that the replacement of an operator's gradient has supplied.

    Args:
        shapes: those of the inputs, None where it is not known.

    Raises:
        RoutineResultError: a gradient has another shape than its input.
    """
    for index, (gradient, shape) in enumerate(zip(gradients, shapes, strict=True)):
        if gradient is None or shape is None or shape.is_compatible_with(gradient.shape):
            continue
        raise RoutineResultError(
            f"{action.routine} replaces the backward of op {action.op_id} and must return a "
            f"gradient of shape {tuple(shape)} for its input {index}, got one of shape "
            f"{tuple(gradient.shape)}"
        )
    return gradients
