"""Masks of a file, and the weights that they belong to.

A mask belongs to the operator with its id. Where an id means another operator, as it can in another
mode of TensorFlow, the weight has another name, and the mask is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from amanda.errors import AmandaError
from amanda.interface.calls import Variable
from amanda_tools._operators.weights import Weight
from amanda_tools._values.shapes import Shape, shape_of
from amanda_tools._values.tensors import Array

_DEFAULT_NAME = "Variable"
"""The name that TensorFlow gives to variables without one, which identifies nothing."""


def name_of(weight: Weight) -> str:
    """Return the name of a weight's variable, with the view of it; "" if it has none."""
    name, variable = variable_name(weight.variable), weight.variable
    return f"{name}|{variable.view}" if name and variable and variable.view else name


def variable_name(variable: Variable | None) -> str:
    """Return the name of a variable; "" if it has none that identifies it."""
    name = "" if variable is None else variable.name
    return "" if name.startswith(_DEFAULT_NAME) else name


def is_same_name(one: str, other: str) -> bool:
    """Return whether two names can be of one weight: the shorter one is the end of the other.

    Keras gives the variables of a model that is loaded from a file paths without the model's name.
    """
    return f"/{one}".endswith(f"/{other}") or f"/{other}".endswith(f"/{one}")


def check_shape(op_id: str, shape: Shape, found: Weight) -> None:
    """Refuse a mask of another shape than that of the weight.

    Raises:
        AmandaError: the shapes differ.
    """
    if shape != shape_of(found.value):
        raise AmandaError(
            f"prune: the mask of op {op_id} has the shape {shape}, its weight has "
            f"{shape_of(found.value)}: the mask is of another model; use a new tool for it"
        )


class GivenMasks:
    """The masks of a file.

    Args:
        masks: the masks by op id.
        source: origin of the masks, for error messages.
        names: the names of their weights by op id, as far as they are known.
    """

    def __init__(self, masks: Mapping[str, Array], source: str, names: Mapping[str, str]) -> None:
        self._masks = masks
        self._source = source
        self._names = names
        self._used: set[str] = set()

    def mask(self, op_id: str, found: Weight) -> Array:
        """Return the mask of a weight that an operator reads.

        Raises:
            AmandaError: there is none, it is of a weight of another name, or has another shape.
        """
        own, theirs = name_of(found), self._names.get(op_id, "")
        reason = "it is of another model, or of other ops or other options"
        if op_id in self._masks:
            if not (own and theirs) or is_same_name(own, theirs):
                check_shape(op_id, self._masks[op_id].shape, found)
                self._used.add(op_id)
                return self._masks[op_id]
            reason = f"its mask for that op is of the weight {theirs}, and the op reads {own}"
        raise AmandaError(
            f"prune: {self._source} has no mask for op {op_id}, the first one that is missing: "
            f"{reason}"
        )

    def unused(self) -> list[str]:
        """Return the op ids of the masks that no weight has."""
        return [op_id for op_id in self._masks if op_id not in self._used]
