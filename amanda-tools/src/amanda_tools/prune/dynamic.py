"""Base of the methods that choose anew for every input: operators with a gate on their output."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import attrs

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._operators.weights import Untreatable, Weight, data_index, treatable, weight_of
from amanda_tools._values.shapes import rank_of, shape_of
from amanda_tools._values.tensors import Array, arithmetic_of, guarded
from amanda_tools.prune.options import PruneOptions


@attrs.define(eq=False)
class Gate:
    """Trainable values that a method adds to one operator, and the axes that it works on.

    Attributes:
        source: position of the data among the operator's inputs.
        channels: axis of the channels in data and output.
        rank: number of axes of data and output.
        initial: initial values by name.
        values: the framework's variables by name; there when the gate has run once.
        kept: number of channels that stay; None for methods that do not choose channels.
    """

    source: int
    channels: int
    rank: int
    initial: dict[str, Array] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    kept: int | None = None

    @property
    def positions(self) -> list[int]:
        """Axes that are neither samples nor channels."""
        return [axis for axis in range(1, self.rank) if axis != self.channels]

    def value(self, name: str, like: Any) -> Any:
        """Return one of the values, with the element type and device of a tensor."""
        arithmetic = arithmetic_of(like)
        if not self.values:
            wide = arithmetic.widen(like)
            self.values = {n: arithmetic.variable(v, wide) for n, v in self.initial.items()}
        return arithmetic.cast_like(self.values[name], like)

    def arrays(self) -> Mapping[str, Array]:
        """Return the current values as NumPy arrays."""
        return {name: arithmetic_of(value).wide_numpy(value) for name, value in self.values.items()}


class GatedPruning(abc.ABC):
    """Base class: puts a gate on the output of operators.

    Attributes:
        options: options of the tool.
        gates: gates by operator id.
    """

    def __init__(self, options: PruneOptions) -> None:
        self.options = options
        self.gates: dict[str, Gate] = {}

    def treat(self, context: OpContext, op: OpDescription) -> None:
        """Put a gate on the output of an operator.

        Raises:
            Untreatable: the method has no gate for it.
        """
        if op.id not in self.gates:
            self.gates[op.id] = self.make_gate(context, weight_of(context))
        gate, operator = self.gates[op.id], context.get_function()
        context.replace_op(guarded(self.run_gated, gate.source), operator=operator, gate=gate)

    @abc.abstractmethod
    def make_gate(self, context: OpContext, weight: Weight) -> Gate:
        """Make a gate with its initial values.

        Raises:
            Untreatable: the method has no gate for this operator.
        """

    @abc.abstractmethod
    def run_gated(self, *inputs: Any, operator: Any, gate: Gate) -> Any:
        """Replacement routine: the operator, with the gate on its output."""


def new_gate(context: OpContext, weight: Weight) -> Gate:
    """Make a gate without values, for an operator whose first data axis is the batch.

    Raises:
        Untreatable: the data have an unexpected or unknown number of axes or channels.
    """
    source = data_index(context, weight)
    rank = rank_of(treatable(context.get_inputs()[source]))
    layout = context["data_layout"]
    if layout is not None:
        if rank not in (None, len(layout)):
            raise Untreatable(f"its input has {rank} axes, without one of samples")
        gate = Gate(source, layout.index("C"), len(layout))
        channels = None if rank is None else context.get_inputs()[source].shape[gate.channels]
        if channels not in (None, input_channels(weight)):
            raise Untreatable(f"its input has {channels} channels, more than its weight shows")
        return gate
    # A matrix product: all axes before the last one are batch and positions.
    if rank is None or rank < 2:
        raise Untreatable(f"its input has {rank or 'an unknown number of'} axes")
    return Gate(source, rank - 1, rank)


def input_channels(weight: Weight) -> int:
    """Return the number of channels of an operator's data, from its weight.

    Raises:
        Untreatable: the layout does not tell.
    """
    shape = shape_of(weight.value)
    if "C" in weight.layout:
        return shape[weight.layout.index("C")]  # a depthwise convolution
    axis = weight.axis("I")
    # The axis of a transposed convolution holds the channels of all groups.
    return shape[axis] * (weight.groups if axis > weight.axis("O") else 1)


def check_groups(weight: Weight) -> None:
    """Refuse transposed convolutions with groups, whose weights are ordered differently.

    Raises:
        Untreatable: the weight is of a transposed convolution with groups.
    """
    if weight.groups > 1 and weight.axis("I") < weight.axis("O"):
        raise Untreatable(f"it is a transposed convolution with {weight.groups} groups")
