"""Writing the zeros of masks into the weights themselves.

check_is_same(weight, found)        # the weight that a run has read
write_zeros(weight, found.value, found.variable)
"""

from __future__ import annotations

from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.interface.calls import Variable
from amanda_tools._operators.weights import FoundWeight
from amanda_tools._values.shapes import shape_of
from amanda_tools._values.tensors import arithmetic_of
from amanda_tools.prune.given_masks import is_same_name, variable_name
from amanda_tools.prune.static import PrunedWeight


def check_is_same(weight: PrunedWeight, found: FoundWeight) -> None:
    """Refuse a weight that a run has read instead of a pruned one.

    Raises:
        AmandaError: the shape or the name differs.
    """
    shape, name = shape_of(found.value), variable_name(found.variable)
    own = variable_name(weight.weight.variable)
    is_renamed = bool(name and own) and not is_same_name(name, own)
    if shape != weight.shape or (found.identity != weight.weight.identity and is_renamed):
        raise AmandaError(
            f"prune: the mask of op {weight.readers[0]} is for a weight {own} of the "
            f"shape {weight.shape}, and the run has read {name or 'one'} of the shape {shape}: "
            "it is of another model"
        )


def write_zeros(weight: PrunedWeight, value: Any, variable: Variable | None) -> None:
    """Write the zeros of a weight's mask into the weight.

    Args:
        weight: the weight, with a mask.
        value: value of the weight; the parameter itself if there is no `variable`.
        variable: the variable that the value was read from.

    Raises:
        TypeError: the value is none that can be written.
        AmandaError: the variable cannot be written.
    """
    mask = weight.mask
    assert mask is not None
    with amanda.disabled():
        if variable is not None:
            variable.change(lambda old: old * arithmetic_of(old).constant(mask, old))
            return
        arithmetic = arithmetic_of(value)
        arithmetic.assign(value, arithmetic.wide_numpy(value) * mask)
