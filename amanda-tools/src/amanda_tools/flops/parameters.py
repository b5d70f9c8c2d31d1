"""The parameters that operators use, each counted once however often it is used."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import attrs

from amanda import OpContext


@attrs.frozen
class Weight:
    """One parameter.

    Attributes:
        number: tells it from the others.
        size: its elements.
        bytes: what they take.
    """

    number: int
    size: int
    bytes: int


class Weights:
    """Recognizes the parameters among the inputs of operators, and keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Weight]] = {}
        self._of_inputs: dict[tuple[str, int], Weight] = {}
        self._count = 0

    def of(self, context: OpContext) -> Iterator[Weight]:
        """The parameters that an operator uses; called in its analysis."""
        roles = (context["weight_index"], context["bias_index"])
        for position, tensor in enumerate(context.get_inputs()):
            value = None if tensor is None else context.get_value(position)
            if value is not None and (position in roles or _is_parameter(value)):
                yield self._weight(value, (context.get_op_id(), position))

    def _weight(self, value: Any, place: tuple[str, int]) -> Weight:
        entry = self._known.get(id(value))
        if entry is not None and entry[0]() is value:
            return entry[1]
        # A framework that gives its variables' values makes a new one at each reading.
        weight = self._of_inputs.get(place)
        size = math.prod(int(n) for n in value.shape)
        if weight is None or weight.size != size or _is_parameter(value):
            weight = Weight(self._count, size, byte_size(value) or 0)
            self._count += 1
            self._of_inputs[place] = weight
        # What has no weak references is told by its place alone.
        with contextlib.suppress(TypeError):
            self._known[id(value)] = (weakref.ref(value), weight)
        return weight


def _is_parameter(value: Any) -> bool:
    """Whether it is a parameter by its very type, in whatever place an operator has it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Parameter)


def byte_size(tensor: Any) -> int | None:
    """Bytes of a tensor's elements; None if its shape or its type is not known."""
    dtype = getattr(tensor, "dtype", None)
    item = getattr(dtype, "itemsize", None) or getattr(dtype, "size", None)
    try:
        size = math.prod(int(n) for n in tensor.shape)
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if item is None else size * int(item)
