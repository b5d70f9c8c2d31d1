"""Tensors in a canonical layout, and back: NCHW and OIHW whatever the framework uses.

A tool that depends on ``MappingTool.standard()`` converts a weight or data without a branch on the
framework::

    weight = layouts.conversion(context, "weight")
    array = weight.to_canonical(context.get_value(context["weight_index"]))     # OIHW
    context.insert_before_op(lambda w: weight.from_canonical(prune(weight.to_canonical(w))), ...)

Canonical are data with the batch and the channels first (``NCHW``), weights of convolutions and of
transposed ones with the outputs and then the inputs first (``OIHW``; of a depthwise convolution
too, with one input per group), and weights of linear operators with one axis of outputs and one of
inputs (``OI``), behind an axis for each batch of matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from amanda.errors import MappingError
from amanda.interface.context import OpContext

FUNCTIONS = "layout_functions"
"""The key of a context that holds two functions, of a tensor and its new order of axes, and of a
tensor and its new shape. Mapping rules set it for a framework whose tensors have no methods
``permute`` (or ``transpose``) and ``reshape``."""

Function = Callable[[Any, Sequence[int]], Any]


def _permute(tensor: Any, order: Sequence[int]) -> Any:
    # Arrays of NumPy transpose as PyTorch's tensors permute.
    method = getattr(tensor, "permute", None) or tensor.transpose
    return method(tuple(order))


def _reshape(tensor: Any, shape: Sequence[int]) -> Any:
    return tensor.reshape(tuple(shape))


@attrs.frozen
class Conversion:
    """Converts one tensor of an operator to its canonical layout and back.

    It holds no tensor, and may be used in routines.

    Attributes:
        layout: the layout that the framework uses, a letter per axis.
        canonical: the canonical one; axes that the conversion merges have one letter.
        shape: of a weight whose axes are merged, the shape that it has; else empty.
    """

    layout: str
    canonical: str
    shape: tuple[int, ...] = ()
    _functions: tuple[Function, Function] = (_permute, _reshape)

    @property
    def order(self) -> list[int]:
        """The axes of the framework's tensor, in the order of the canonical one before merging."""
        ranked = "B" if set(self.layout) == set("BIO") else ""
        letters = ranked + ("CMOI" if "M" in self.layout else "NCOIDHW")
        # Sorting keeps the order of axes with the same letter, such as the heads of an attention.
        return sorted(range(len(self.layout)), key=lambda axis: _rank(letters, self.layout[axis]))

    def to_canonical(self, tensor: Any) -> Any:
        """The tensor in the canonical layout.

        Raises:
            MappingError: it does not have the axes of the layout.
        """
        order = self._fitting(tensor)
        found = tensor
        if order != sorted(order):
            found = self._functions[0](tensor, order)
        if self.shape:
            found = self._functions[1](found, self._merged())
        return found

    def from_canonical(self, tensor: Any) -> Any:
        """The tensor in the framework's layout: undoes :meth:`to_canonical`."""
        found = tensor
        if self.shape:
            found = self._functions[1](found, [self.shape[axis] for axis in self.order])
        order = self._fitting(found)
        if order != sorted(order):
            found = self._functions[0](found, [order.index(axis) for axis in range(len(order))])
        return found

    def _fitting(self, tensor: Any) -> list[int]:
        """The order for a tensor that may lack the axis of the batch, or have more at the end."""
        rank, order = len(tensor.shape), self.order
        if rank == len(order):
            return order
        if rank == len(order) - 1 and self.layout[0] == "N":
            return [axis - 1 for axis in order if axis]
        if order == sorted(order):
            return list(range(rank))
        raise MappingError(
            f"a tensor of shape {tuple(tensor.shape)} does not have the layout {self.layout}, with "
            f"{len(self.layout)} axes"
        )

    def _merged(self) -> list[int]:
        """The shape of the canonical tensor, where axes of the framework's become one."""
        sizes = list(zip(self.layout, self.shape, strict=True))
        if "M" in self.layout:
            outputs = math.prod(size for letter, size in sizes if letter in "CM")
            return [outputs, 1, *(size for letter, size in sizes if letter not in "CM")]
        batch = [size for letter, size in sizes if letter == "B"]
        return batch + [math.prod(s for letter, s in sizes if letter == part) for part in "OI"]


def _rank(letters: str, letter: str) -> int:
    return letters.index(letter) if letter in letters else len(letters)


def conversion(context: OpContext, role: str = "data") -> Conversion | None:
    """The conversion of one tensor of an operator; None where no rule gives its layout.

    Args:
        context: a context of a tool that depends on ``MappingTool.standard()``, while an analysis
            of its operator runs.
        role: "weight", or "data" for the operator's data input and output.

    Raises:
        ValueError: another role is given.
    """
    if role not in ("weight", "data"):
        raise ValueError(f"a tensor's role is weight or data, got {role!r}")
    layout = context[f"{role}_layout"]
    if not layout:
        return None
    functions = context[FUNCTIONS] or (_permute, _reshape)
    shape: tuple[int, ...] = ()
    if role == "weight" and ("M" in layout or layout.count("O") > 1 or layout.count("I") > 1):
        value = context.get_value(context["weight_index"])
        shape = tuple(int(size) for size in value.shape)
    return _conversion(layout, shape, functions)


@functools.lru_cache(maxsize=256)
def _conversion(
    layout: str, shape: tuple[int, ...], functions: tuple[Function, Function]
) -> Conversion:
    plain = Conversion(layout, "", shape, functions)
    letters = "".join(layout[axis] for axis in plain.order)
    if "M" in layout:
        letters = "OI" + letters.removeprefix("CM")
    elif shape:
        letters = "B" * layout.count("B") + "OI"
    return attrs.evolve(plain, canonical=letters)
