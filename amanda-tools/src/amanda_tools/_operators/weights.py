"""The weight of one operator, for tools that change weights: value, layout, groups.

In an analysis::

    try:
        weight = weight_of(context)
    except Untreatable as reason:
        targets.skip(op, str(reason))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import AmandaError
from amanda.interface.calls import Variable
from amanda.python.references import Reference, nothing
from amanda.tools.mapping import MappingTool
from amanda_tools._operators.running import run_model
from amanda_tools._values.shapes import Shape, rank_of, shape_of
from amanda_tools._values.tensors import Array, arithmetic_of


class Untreatable(Exception):
    """A tool cannot act on an operator; the message gives the reason."""


@attrs.frozen
class Weight:
    """The weight of an operator.

    Attributes:
        index: position among the operator's inputs.
        value: the value; in PyTorch the parameter itself.
        layout: one letter per axis: I input channels, O output channels, B an axis that the data
            have as well (each position has a matrix of its own), others axes of the kernel.
        groups: number of groups of a convolution.
        variable: ``context.get_variable``: the variable, where the driver gives a new object at
            each reading; else None.
        parameter: its path; None for a weight without one.
    """

    index: int
    value: Any
    layout: str
    groups: int = 1
    variable: Variable | None = None
    parameter: str | None = None

    def axes(self, letters: str) -> tuple[int, ...]:
        """Return the axes with these letters, in the order of the layout."""
        return tuple(axis for axis, letter in enumerate(self.layout) if letter in letters)

    def axis(self, letter: str) -> int:
        """Return the only axis with this letter.

        Raises:
            Untreatable: there is none, or more than one.
        """
        if self.layout.count(letter) != 1:
            role = {"I": "input", "O": "output"}[letter]
            raise Untreatable(f"a weight with the layout {self.layout} has no one {role} axis")
        return self.layout.index(letter)

    def width(self, letter: str) -> int:
        """Return the product of the sizes of the axes with this letter.

        Raises:
            Untreatable: there is no such axis.
        """
        axes = self.axes(letter) or (self.axis(letter),)
        return math.prod(shape_of(self.value)[axis] for axis in axes)

    def matrix(self, array: Array, letter: str) -> Array:
        """Reshape an array of the weight's shape to rows x columns; `letter` names the columns."""
        axes = self.axes(letter)
        last = np.moveaxis(array, axes, range(-len(axes), 0))
        return last.reshape(-1, math.prod(array.shape[axis] for axis in axes))

    def from_matrix(self, matrix: Array, letter: str, shape: Shape) -> Array:
        """Reshape the result of :meth:`matrix` back to `shape`."""
        axes = self.axes(letter)
        rest = [size for axis, size in enumerate(shape) if axis not in axes]
        last = matrix.reshape(*rest, *(shape[axis] for axis in axes))
        return np.moveaxis(last, range(-len(axes), 0), axes)

    @property
    def key(self) -> Hashable | None:
        """Equal for all readers of one variable; None without one."""
        return None if self.variable is None else self.variable.key

    @property
    def identity(self) -> Hashable:
        """Equal for two weights that are one parameter or variable, while it is alive."""
        # A mask for one view (reshaped, transposed) of a variable does not fit another view.
        variable = self.variable
        return id(self.value) if variable is None else (variable.key, variable.view)


def treatable(tensor: Any) -> Any:
    """Return an operator's input.

    Raises:
        Untreatable: the optimization tools cannot compute with it.
    """
    if reason := arithmetic_of(tensor).refusal(tensor):
        raise Untreatable(f"its input {reason}")
    return tensor


def is_another(weight: Any) -> bool:
    """Return True for a weight that :func:`weight_of` would have refused."""
    arithmetic = arithmetic_of(weight)
    return bool(arithmetic.refusal(weight)) or arithmetic.is_stacked(weight)


def weight_of(context: OpContext) -> Weight:
    """Return the weight that the mapping rules name.

    Raises:
        Untreatable: there is none, or none that can be changed.
    """
    index, layout = context["weight_index"], context["weight_layout"]
    if index is None or layout is None:
        raise Untreatable("none of its inputs is known as its weight")
    return _weight_at(context, index, layout)


_MATRICES = {
    **dict.fromkeys(("params", "w_ih", "w_hh"), "OI"),
    **dict.fromkeys(("w", "w_ru", "w_c"), "IO"),
}
"""The inputs of recurrent operators that hold weights, by their names in PyTorch and TensorFlow,
and the layout of a weight; a vector among them is a bias."""

_FACTORS = frozenset({"input", "data", "hx", "x", "h_prev"})
"""The inputs of recurrent operators that are multiplied with weights: data and the hidden state,
which in PyTorch is the first of its name."""


def recurrent_inputs(context: OpContext) -> tuple[list[Weight], list[int]]:
    """Return the weights of a recurrent operator, and the positions of its data and hidden state.

    Raises:
        Untreatable: one of the weights cannot be changed, or they are packed into one vector.
    """
    given = list(enumerate(zip(context.get_input_names(), context.get_inputs(), strict=False)))
    places = [
        (position, _MATRICES[name])
        for position, (name, tensor) in given
        if name in _MATRICES and tensor is not None and rank_of(tensor) == 2
    ]
    if not places:
        raise Untreatable("none of its inputs is a matrix of weights")
    weights = [_weight_at(context, position, layout) for position, layout in places]
    names = [name for _, (name, _) in given]
    return weights, [i for i, name in enumerate(names) if name in _FACTORS - {*names[:i]}]


def _weight_at(context: OpContext, index: int, layout: str) -> Weight:
    """Return the weight at a position.

    Raises:
        Untreatable: it cannot be changed.
    """
    if context.get_inputs()[index] is None:
        raise Untreatable("it is called without a weight")
    value = context.get_value(index)
    if value is None:
        raise Untreatable("its weight is not a parameter: the program computes it")
    arithmetic = arithmetic_of(value)
    if not arithmetic.is_floating(value):
        raise Untreatable(f"its weight is of type {value.dtype}")
    if reason := arithmetic.refusal(value):
        raise Untreatable(f"its weight {reason}")
    if arithmetic.is_stacked(value):
        raise Untreatable("its weight is another one for each sample of torch.vmap")
    if len(value.shape) != len(layout):
        raise Untreatable(f"its weight has {len(value.shape)} axes, and not the layout {layout}")
    groups = int(context.get_attrs().get("groups") or context.get_attrs().get("group") or 1)
    about = context.get_variable(index), context.get_parameter_name(index)
    return Weight(index, value, layout, groups, *about)


def data_index(context: OpContext, weight: Weight) -> int:
    """Return the position of the data that an operator multiplies with its weight."""
    # addmm(bias, input, weight) has the data in the middle.
    return min({0, 1, 2} - {weight.index, context["bias_index"]})


def weak_reference(value: Any) -> Callable[[], Any]:
    """Return a function that gives a value while it is alive, else None.

    It always gives None for objects that take no weak reference.
    """
    try:
        return Reference(value, nothing)
    except TypeError:
        return lambda: None


class WeightsOfRun:
    """The weights that the operators of one run have read.

    Args:
        run: runs the model.
        places: op id to the positions of weights among its inputs.
    """

    def __init__(self, run: Callable[[], Any], places: Mapping[str, Collection[int]]) -> None:
        self._places = places
        self._by_place: dict[tuple[str, int], Weight] = {}
        self._by_identity: dict[Hashable, Weight] = {}
        collector = amanda.Tool()
        collector.depends_on(MappingTool.standard())
        collector.add_inst_for_op(self._collect)
        with amanda.apply(collector):
            run_model(run)

    def _collect(self, context: OpContext) -> None:
        op_id, own = context.get_op_id(), context["weight_index"]
        for index in self._places.get(op_id, () if own is None else (own,)):
            value = context.get_value(index)
            if value is None:
                continue
            layout, variable = context["weight_layout"] or "", context.get_variable(index)
            found = Weight(index, value, layout, variable=variable)
            self._by_place[op_id, index] = found
            if variable is not None:
                self._by_identity[found.identity] = found

    def of_op(self, op_id: str, index: int) -> Weight | None:
        """Return the weight that an operator has read at a position; None if it has not run."""
        return self._by_place.get((op_id, index))

    def of_variable(self, identity: Hashable) -> Weight | None:
        """Return the weight with this identity, whichever operator has read it."""
        return self._by_identity.get(identity)


def values_of_run(
    run: Callable[[], Any], places: Mapping[str, Collection[int]], tool: str
) -> dict[tuple[str, int], Any]:
    """Run a model once and return the values of weights, as the framework holds them, by op id and
    position.

    Args:
        run: runs the model.
        places: op id to the positions of weights among its inputs.
        tool: name of the tool, for the error message.

    Raises:
        AmandaError: `run` did not execute one of the operators.
    """
    weights = WeightsOfRun(run, places)
    values = {}
    for op_id, index in [(op_id, index) for op_id, found in places.items() for index in found]:
        weight = weights.of_op(op_id, index)
        if weight is None:
            raise not_executed(tool, op_id)
        values[op_id, index] = weight.value
    return values


def not_executed(tool: str, op_id: str) -> AmandaError:
    """The error for a run that lacks an operator which a tool knows."""
    return AmandaError(f"{tool}: the run has not executed op {op_id}, which the tool knows")
