"""What the formulas know of one execution of an operator: shapes, roles, layouts, attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from amanda import OpContext

Shape = tuple[int, ...]


@attrs.frozen
class Signature:
    """What all executions of an operator have in common.

    Attributes:
        type: its canonical type.
        names: the declared name of each input, "" where it has none.
        attributes: its non-tensor arguments.
        weight, bias: positions of these inputs, None if it has none.
        weight_layout: a letter per axis of the weight, such as ``OIHW`` or ``HWIO``.
        data_layout: a letter per axis of the data, such as ``NCHW`` or ``NHWC``.
    """

    type: str
    names: Sequence[str] = ()
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    weight: int | None = None
    bias: int | None = None
    weight_layout: str = ""
    data_layout: str = ""

    @classmethod
    def of(cls, context: OpContext, kind: str) -> Signature:
        """What an analysis of a forward operator sees.

        Args:
            context: the operator's, with the keys of the mapping rules.
            kind: its canonical type.
        """
        return cls(
            type=kind,
            names=tuple(context.get_input_names()),
            attributes=context.get_attrs(),
            weight=context["weight_index"],
            bias=context["bias_index"],
            weight_layout=context["weight_layout"] or "",
            data_layout=context["data_layout"] or "",
        )


@attrs.frozen
class Call:
    """One execution, by its shapes.

    Attributes:
        signature: what the executions of the operator share.
        inputs: shapes of the inputs; None for an absent one.
        outputs: shapes of the outputs, of a formula that asks for them.
    """

    signature: Signature
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None] = ()

    @property
    def given(self) -> list[Shape]:
        """The shapes of the inputs that are there."""
        return [shape for shape in self.inputs if shape is not None]

    @property
    def weight(self) -> Shape:
        """The weight's shape.

        Raises:
            LookupError: the operator has no weight that the mapping rules know.
        """
        index = self.signature.weight
        shape = None if index is None else self.inputs[index]
        if shape is None:
            raise LookupError("no weight")
        return shape

    @property
    def data(self) -> Shape:
        """The shape of the first input of the weight's kind that is neither weight nor bias.

        Raises:
            LookupError: there is none.
        """
        roles = (self.signature.weight, self.signature.bias)
        # Some operators take the wanted sizes, a vector, before the data.
        least = 2 if len(self.weight) > 2 else 1
        for index, shape in enumerate(self.inputs):
            if index not in roles and shape is not None and len(shape) >= least:
                return shape
        raise LookupError("no data")

    def named(self, name: str) -> Shape:
        """The shape of the first input that is declared with this name.

        Raises:
            LookupError: there is none.
        """
        return self.all_named(name)[0]

    def all_named(self, name: str) -> list[Shape]:
        """The shapes of all inputs that are declared with this name."""
        pairs = zip(self.signature.names, self.inputs, strict=False)
        return [shape for known, shape in pairs if known == name and shape is not None]

    def weight_axes(self, letters: str) -> int:
        """The product of the weight's sizes along the axes of its layout with these letters."""
        layout = self.signature.weight_layout
        pairs = zip(reversed(layout), reversed(self.weight), strict=False)
        return math.prod(size for letter, size in pairs if letter in letters)


def channels(shape: Shape, layout: str) -> int:
    """How many channels data of this layout has; a batch axis may be missing.

    Raises:
        LookupError: the layout has no channel axis.
    """
    if "C" not in layout:
        raise LookupError("no channels")
    return shape[layout.index("C") - len(layout)]
