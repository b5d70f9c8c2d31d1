"""Masks of a file, and the weights that they belong to.

A mask belongs to the operator with its id. Where an id means another operator, as it can in another
mode of TensorFlow, the name of the weight decides: each mask serves one weight, and never one of
another name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

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
        self._used: dict[str, Hashable] = {}

    def mask(self, op_id: str, found: Weight, by_name: bool = False) -> Array:
        """Return the mask of a weight that an operator reads.

        Args:
            op_id: the operator's id.
            found: the weight.
            by_name: the id is also that of another operator, and only the name counts.

        Raises:
            AmandaError: there is none, or it has another shape.
        """
        own = name_of(found)
        theirs = self._names.get(op_id, "")
        entry = op_id
        is_other = bool(own and theirs) and not is_same_name(own, theirs)
        if op_id not in self._masks or is_other or by_name:
            entry = self._named(op_id, own, theirs)
        check_shape(op_id, self._masks[entry].shape, found)
        self._use(entry, found)
        return self._masks[entry]

    def _named(self, op_id: str, own: str, theirs: str) -> str:
        """Return the op id under which the file has the mask of the weight of this name."""
        ids = [i for i, name in self._names.items() if own and is_same_name(own, name)]
        ids = [i for i in ids if i in self._masks]
        if ids and all(np.array_equal(self._masks[i], self._masks[ids[0]]) for i in ids):
            if ids[0] not in self._used:
                return ids[0]
            reason = f"its mask for the weight {own} is used for another weight of that name"
        elif ids:
            reason = f"it has several masks for weights that are called {own}"
        elif op_id in self._masks:
            reason = f"its mask for that op is of the weight {theirs}, and the op reads {own}"
        else:
            reason = "it is of another model, or of other ops or other options"
        raise AmandaError(
            f"prune: {self._source} has no mask for op {op_id}, the first one that is missing: "
            f"{reason}"
        )

    def unused(self) -> list[str]:
        """Return the op ids of the masks that no weight has."""
        return [op_id for op_id in self._masks if op_id not in self._used]

    def _use(self, entry: str, found: Weight) -> None:
        name = self._names.get(entry, "")
        same = [i for i, other in self._names.items() if name and other == name] or [entry]
        self._used.update(dict.fromkeys(same, found.identity))
