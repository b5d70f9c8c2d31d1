"""Shapes, roles, layouts and attributes of an operator's execution, as cost formulas read them.

:class:`OpSignature` has the facts that all executions share, :class:`CallShapes` adds the shapes of
one execution; a formula of FLOPs is a function of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from amanda import OpContext

Shape = tuple[int, ...]
FormulaT = TypeVar("FormulaT", bound=Callable[..., Any])


@attrs.frozen
class OpSignature:
    """Facts that all executions of an operator share.

    Attributes:
        type: canonical type.
        names: declared name of each input, "" without one.
        attributes: non-tensor arguments by name: canonical ones, and the framework's own.
        weight, bias: positions of these inputs, None without them.
        weight_layout: a letter per axis of the weight, such as ``OIHW`` or ``HWIO``; "" if unknown.
        data_layout: a letter per axis of the data, such as ``NCHW`` or ``NHWC``; "" if unknown.
    """

    type: str
    names: Sequence[str] = ()
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    weight: int | None = None
    bias: int | None = None
    weight_layout: str = ""
    data_layout: str = ""

    @classmethod
    def of(
        cls, context: OpContext, kind: str, canonical: Mapping[str, Any] | None = None
    ) -> OpSignature:
        """Read the signature in an analysis of a forward operator.

        Args:
            context: the context, with the keys of the standard mapping rules.
            kind: canonical type.
            canonical: canonical attributes, which take the place of the framework's own of the
                same name; None for the framework's own alone.
        """
        return cls(
            type=kind,
            names=tuple(context.get_input_names()),
            attributes={**context.get_attrs(), **(canonical or {})},
            weight=context.get("weight_index"),
            bias=context.get("bias_index"),
            weight_layout=context.get("weight_layout") or "",
            data_layout=context.get("data_layout") or "",
        )


Suffices = Callable[[OpSignature, Sequence["Shape | None"]], bool]
"""Given shapes of inputs, None for unknown ones: True if a formula reads no other of them."""


@attrs.frozen
class CallShapes:
    """The shapes and attributes of one execution, as a FLOP formula gets them.

    Attributes:
        signature: facts that all executions share.
        inputs: shapes of the inputs, tuples of int; None for an absent one. Of a backward operator,
            those of the gradients that it takes.
        outputs: shapes of the outputs; empty if the formula does not read them. Of a backward
            operator, those of the gradients that it computes, None for one that is not needed.
        forward: of a backward operator, the last execution of its forward operator, else None.
        forward_flops: the FLOPs of `forward`; None if they are not known.
    """

    signature: OpSignature
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None] = ()
    forward: CallShapes | None = None
    forward_flops: int | None = None

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes by name."""
        return self.signature.attributes

    @property
    def given(self) -> list[Shape]:
        """Shapes of the inputs that are present."""
        return [shape for shape in self.inputs if shape is not None]

    @property
    def output(self) -> Shape:
        """Shape of the first output that is present.

        Raises:
            StopIteration: there is none.
        """
        return next(shape for shape in self.outputs if shape is not None)

    @property
    def weight(self) -> Shape:
        """Shape of the weight.

        Raises:
            LookupError: the mapping rules name no weight.
        """
        index = self.signature.weight
        shape = None if index is None else self.inputs[index]
        if shape is None:
            raise LookupError("no weight")
        return shape

    @property
    def data(self) -> Shape:
        """Shape of the data: the first input that is neither weight nor bias.

        Raises:
            LookupError: there is none.
        """
        roles = (self.signature.weight, self.signature.bias)
        # A transposed convolution takes the output sizes, a vector, before the data.
        least = 2 if len(self.weight) > 2 else 1
        for index, shape in enumerate(self.inputs):
            if index not in roles and shape is not None and len(shape) >= least:
                return shape
        raise LookupError("no data")

    def named(self, name: str) -> Shape:
        """Return the shape of the first input declared with this name.

        Raises:
            LookupError: there is none.
        """
        return self.all_named(name)[0]

    def all_named(self, name: str) -> list[Shape]:
        """Return the shapes of all inputs declared with this name."""
        pairs = zip(self.signature.names, self.inputs, strict=False)
        return [shape for known, shape in pairs if known == name and shape is not None]

    def weight_axes(self, letters: str) -> int:
        """Return the product of the weight's sizes along the axes with these letters."""
        layout = self.signature.weight_layout
        product = 1
        # Of each new operator: a generator costs a frame for each size.
        for letter, size in zip(reversed(layout), reversed(self.weight), strict=False):
            if letter in letters:
                product *= size
        return product


def by_name(formulas: Mapping[FormulaT, str]) -> dict[str, FormulaT]:
    """Return formulas by type, from the types of each, separated by blanks."""
    return {name: formula for formula, names in formulas.items() for name in names.split()}


def channels(shape: Shape, layout: str) -> int:
    """Return the number of channels of data with this layout; the batch axis may be missing.

    Raises:
        LookupError: the layout has no channel axis.
    """
    if "C" not in layout:
        raise LookupError("no channels")
    return shape[layout.index("C") - len(layout)]


def broadcast(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the shape of a batch that two batches make, either of which may be repeated."""
    size = max(len(left), len(right))
    pairs = zip(
        [1] * (size - len(left)) + list(left), [1] * (size - len(right)) + list(right), strict=True
    )
    return [b if a == 1 else a for a, b in pairs]
