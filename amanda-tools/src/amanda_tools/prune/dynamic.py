"""What the methods share that choose anew for every input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from amanda import OpContext
from amanda_tools._operators.weights import Untreatable, Weight, data_index
from amanda_tools._values.shapes import rank_of, shape_of
from amanda_tools._values.tensors import Array, arithmetic_of


@attrs.define(eq=False)
class Gate:
    """What a method adds to one operator.

    Attributes:
        source: which of the operator's inputs the data are.
        initial: what of it can be trained, by name, as it begins.
        values: the same as the framework's variables; there when it has run once.
        channels: the axis of channels in the operator's input and output.
        rank: how many axes they have.
        kept: channels that stay; of methods that do not choose channels None.
    """

    source: int
    channels: int
    rank: int
    initial: dict[str, Array] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    kept: int | None = None

    @property
    def positions(self) -> list[int]:
        """The axes that are neither samples nor channels."""
        return [axis for axis in range(1, self.rank) if axis != self.channels]

    def value(self, name: str, like: Any) -> Any:
        """One of its values, beside a tensor."""
        arithmetic = arithmetic_of(like)
        if not self.values:
            wide = arithmetic.widen(like)
            self.values = {n: arithmetic.variable(v, wide) for n, v in self.initial.items()}
        return arithmetic.cast_like(self.values[name], like)

    def arrays(self) -> Mapping[str, Array]:
        """What was trained, with numpy."""
        return {name: arithmetic_of(value).wide_numpy(value) for name, value in self.values.items()}


def new_gate(context: OpContext, weight: Weight) -> Gate:
    """A gate without values, for an operator whose first axis has samples.

    Raises:
        Untreatable: the input has another number of axes than it should, or nobody
            knows how many.
    """
    source = data_index(context, weight)
    rank = rank_of(context.get_inputs()[source])
    layout = context["data_layout"]
    if layout is not None:
        if rank not in (None, len(layout)):
            raise Untreatable(f"its input has {rank} axes, without one of samples")
        gate = Gate(source, layout.index("C"), len(layout))
        channels = None if rank is None else context.get_inputs()[source].shape[gate.channels]
        if channels not in (None, input_channels(weight)):
            raise Untreatable(f"its input has {channels} channels, more than its weight shows")
        return gate
    # A matrix product: whatever comes before the last axis are samples and positions.
    if rank is None or rank < 2:
        raise Untreatable(f"its input has {rank or 'an unknown number of'} axes")
    return Gate(source, rank - 1, rank)


def input_channels(weight: Weight) -> int:
    """The channels of an operator's input, from its weight.

    Raises:
        Untreatable: its layout does not tell.
    """
    shape = shape_of(weight.value)
    if "C" in weight.layout:
        return shape[weight.layout.index("C")]  # a depthwise convolution
    axis = weight.axis("I")
    # Of a transposed convolution the axis holds all groups.
    return shape[axis] * (weight.groups if axis > weight.axis("O") else 1)


def check_groups(weight: Weight) -> None:
    """Refuse transposed convolutions with groups, whose weights stand in another order.

    Raises:
        Untreatable: it is one.
    """
    if weight.groups > 1 and weight.axis("I") < weight.axis("O"):
        raise Untreatable(f"it is a transposed convolution with {weight.groups} groups")
