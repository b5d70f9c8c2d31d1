"""Variables behind operators' inputs, in the view in which the operator reads them.

Layers cast, reshape and transpose their weights: Keras' ``EinsumDense`` reads a kernel of three
axes and multiplies by a matrix; ``Conv1D`` adds an axis to its kernel. The operator's input is then
still the variable, in another view (``context.get_variable``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.errors import AmandaError
from amanda.interface.calls import Variable
from amanda_tensorflow import _internals
from amanda_tensorflow.labels import PARAMETERS

VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
"""Types of the operators of a graph that make a variable."""

RESHAPES = frozenset({"Reshape", "ExpandDims", "Squeeze"})
"""Operators whose output has the elements of their first input in the same order."""

VIEWS = RESHAPES | {"Transpose"}
"""Operators whose output is another view of the variable that their first input is a view of."""


@attrs.frozen
class ViewStep:
    """One operator between a variable and its view.

    Attributes:
        kind: Cast, Reshape or Transpose.
        argument: the new dtype, the new shape, or the order of the axes.
    """

    kind: str
    argument: Any

    def of(self, value: Any) -> Any:
        """The value after the operator."""
        if self.kind == "Cast":
            return tf.cast(value, self.argument)
        if self.kind == "Reshape":
            return tf.reshape(value, self.argument)
        return tf.transpose(value, self.argument)


def step_of(
    kind: str, before: Any, after: Any, order: Callable[[], Sequence[int] | None]
) -> ViewStep | None:
    """The step that an operator of :data:`VIEWS` makes; None if it is not known.

    Args:
        kind: the operator's type.
        before, after: its first input and its output; their static shapes are read.
        order: gives the order of the axes of a transposition; None if it is not known.
    """
    if kind == "Transpose":
        axes = order()
        return None if axes is None else ViewStep(kind, tuple(int(axis) for axis in axes))
    if not (before.shape.is_fully_defined() and after.shape.is_fully_defined()):
        return None
    return ViewStep("Reshape", tuple(after.shape.as_list()))


def changed(value: Any, steps: Sequence[ViewStep], function: Callable[[Any], Any]) -> Any:
    """A variable's value after `function` has changed it in the view that these steps make."""
    moves = view_of(steps)
    shapes = []
    for step in moves:
        shapes.append(value.shape)
        value = step.of(value)
    value = tf.convert_to_tensor(function(value), value.dtype)
    for step, shape in zip(reversed(moves), reversed(shapes), strict=True):
        if step.kind == "Transpose":
            value = tf.transpose(value, tf.math.invert_permutation(step.argument))
        else:
            value = tf.reshape(value, shape)
    return value


def view_of(steps: Sequence[ViewStep]) -> tuple[ViewStep, ...]:
    """The steps that distinguish views: all but casts, which move no element."""
    return tuple(step for step in steps if step.kind != "Cast")


class HandleVariable(Variable):
    """A variable that is known by its concrete handle.

    Args:
        handle: the handle.
        steps: the casts, reshapes and transpositions between the variable and the input.
    """

    def __init__(self, handle: Any, steps: Sequence[ViewStep]) -> None:
        self._handle = weakref.ref(handle)
        self._steps = tuple(steps)
        self.key, self.view = _internals.handle_key(handle), view_of(steps)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The variable's name, or path in Keras."""
        handle = self._handle()
        return "" if handle is None else _internals.variable_of(handle).name

    def change(self, function: Callable[[Any], Any]) -> None:
        handle = self._handle()
        dtype = None if handle is None else _internals.variable_dtype(handle)
        if dtype is None:
            raise AmandaError("the variable is gone")
        with _internals.eager_mode(), _internals.stop_recording():
            value = _internals.read_variable(handle, dtype)
            _internals.write_variable(handle, changed(value, self._steps, function))


def parameter_name(handle: Any) -> str | None:
    """The path of the variable of a concrete handle; None for one that is no parameter."""
    known = None if handle is None else _internals.variable_of(handle)
    if known is None or not known.is_parameter or not known.name:
        return None
    return PARAMETERS.label_of(known.handle, known.name)
