"""What becomes of a variable's value on its way to the operator that computes with it.

Layers reshape and transpose their weights: Keras' ``EinsumDense`` reads a kernel of three
axes, and multiplies with a matrix; a convolution of one dimension adds an axis to its own.
What an operator gets is then still the variable, seen in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

RESHAPES = frozenset({"Reshape", "ExpandDims", "Squeeze"})
"""Operators whose output has the elements of their first input in the same order."""

VIEWS = RESHAPES | {"Transpose"}
"""Operators whose output is, as a parameter, another view of what their first input is."""


@attrs.frozen
class Step:
    """One change of a value.

    Attributes:
        kind: Cast, Reshape or Transpose.
        argument: the type, the shape, or the order of the axes.
    """

    kind: str
    argument: Any

    def of(self, value: Any) -> Any:
        """The value after it."""
        if self.kind == "Cast":
            return tf.cast(value, self.argument)
        if self.kind == "Reshape":
            return tf.reshape(value, self.argument)
        return tf.transpose(value, self.argument)


def step_of(
    kind: str, before: Any, after: Any, order: Callable[[], Sequence[int] | None]
) -> Step | None:
    """The step that an operator of :data:`VIEWS` makes; None if nobody knows it.

    Args:
        kind: the operator's type.
        before, after: its first input and its output, of which the shapes are asked.
        order: of a transposition, the order of the axes; None if it is not known.
    """
    if kind == "Transpose":
        axes = order()
        return None if axes is None else Step(kind, tuple(int(axis) for axis in axes))
    if not (before.shape.is_fully_defined() and after.shape.is_fully_defined()):
        return None
    return Step("Reshape", tuple(after.shape.as_list()))


def view_of(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that make a view another one: a cast changes no place of an element."""
    return tuple(step for step in steps if step.kind != "Cast")
