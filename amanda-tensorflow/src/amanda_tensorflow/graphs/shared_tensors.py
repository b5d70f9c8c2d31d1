"""Tensors of a copy in place of one of the vanilla graph, whose readers cannot tell them apart.

The gradients of ``a + b`` are one tensor. What reads it outside of gradient calls, such as the
output of a function, does not tell which of them it wants. Likewise the gradient of ``h * h`` reads
``h`` once. Where routines are to change the several tensors, a node checks at run time that
the changed tensors are equal::

    tensor = shared_tensor([of_a, of_b], building, message)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda.errors import CapabilityError
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.run_time_routines import PythonNode


class _Alike(PythonNode):
    """The first of several tensors, which have to be equal at run time."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def compute(self, values: Sequence[Any]) -> list[Any]:
        first, *others = (value.numpy() for value in values)
        # Bytes, so that NaNs are equal.
        if any(other.tobytes() != first.tobytes() for other in others):
            raise CapabilityError(self._message)
        return [values[0]]


def shared_tensor(values: Sequence[Any], building: Building, message: str) -> Any:
    """One tensor for several that are to be equal.

    Args:
        values: distinct tensors of the copy, or None for gradients that are gone.
        message: of the error.

    Raises:
        CapabilityError: some are None, and others are not. At run time: their values differ.
    """
    if any(value is None for value in values):
        raise CapabilityError(message)
    building.is_changed = building.has_python = True
    [tensor] = _Alike(message).insert(values, [values[0].dtype], [values[0].shape])
    return tensor
