"""What the methods share that choose anew for every input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from amanda import OpContext
from amanda_tools.optimization_arrays import arithmetic_of
from amanda_tools.optimization_selection import Untreatable, Weight, shape_of
from amanda_tools.prune.rules import Array


@attrs.define(eq=False)
class Gate:
    """What a method adds to one operator.

    Attributes:
        source: which of the operator's inputs the data are.
        values: what of it can be trained, by name.
        channels: the axis of channels in the operator's input and output.
        rank: how many axes they have.
        kept: channels that stay; of methods that do not choose channels None.
    """

    source: int
    channels: int
    rank: int
    values: dict[str, Any] = attrs.field(factory=dict)
    kept: int | None = None

    @property
    def positions(self) -> list[int]:
        """The axes that are neither samples nor channels."""
        return [axis for axis in range(1, self.rank) if axis != self.channels]

    def arrays(self) -> Mapping[str, Array]:
        """What was trained, with numpy."""
        return {name: arithmetic_of(value).numpy(value) for name, value in self.values.items()}


def new_gate(context: OpContext, weight: Weight) -> Gate:
    """A gate without values, for an operator whose first axis has samples.

    Raises:
        Untreatable: the input has another number of axes than it should.
    """
    # addmm(bias, input, weight) has the data in the middle.
    source = min({0, 1, 2} - {weight.index, context["bias_index"]})
    rank = len(shape_of(context.get_inputs()[source]))
    layout = context["data_layout"]
    if layout is None:
        # A matrix product: whatever comes before the last axis are samples and positions.
        channels, expected = rank - 1, max(rank, 2)
    else:
        channels, expected = layout.index("C"), len(layout)
    if rank != expected:
        raise Untreatable(f"its input has {rank} axes, without one of samples")
    return Gate(source, channels, rank)


def check_groups(weight: Weight) -> None:
    """Refuse transposed convolutions with groups, whose weights stand in another order.

    Raises:
        Untreatable: it is one.
    """
    if weight.groups > 1 and weight.axis("I") < weight.axis("O"):
        raise Untreatable(f"it is a transposed convolution with {weight.groups} groups")
