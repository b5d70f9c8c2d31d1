"""The parameters that operators use, each counted once however often it is used.

PyTorch has a type for them. TensorFlow has variables, and keeps in them also what an
optimizer, a metric or a random generator remembers; which is which follows from what the
run does with them, see :class:`Use`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import attrs

from amanda import OpContext
from amanda_tools._values.numerics import numerics_of

_HANDING_ON = frozenset({"read_variable", "identity", "cast"})
"""Types that give a variable's value to those that use it."""

_ASKING = frozenset({"variable_shape", "var_is_initialized", "is_variable_initialized"})
"""Types that take a variable's handle, and neither use nor change its value."""


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


@attrs.define(eq=False)
class Use:
    """What a run does with a variable.

    Attributes:
        weight: the variable as a parameter.
        is_scalar: whether it is a single number.
        is_number: whether its elements are floating-point numbers.
        has_role: whether a mapping rule calls it a weight or a bias.
        came_first: whether an operator used it before any gradient was computed.
        is_assigned: whether an operator has written into it.
        users: ids of the operators that use it.
    """

    weight: Weight
    is_scalar: bool
    is_number: bool
    has_role: bool = False
    came_first: bool = False
    is_assigned: bool = False
    users: set[str] = attrs.field(factory=set)

    def is_parameter(self, differentiated: set[str]) -> bool:
        """Whether it belongs to the model.

        It does if a gradient flows to one of its users. If none does (inference, statistics of
        a batch norm), numbers that are used before gradients are computed, or never changed,
        do: what an optimizer keeps comes after. Single numbers that the run changes, such as
        the sum of a metric, do not.

        Args:
            differentiated: ids of the operators whose gradients were computed.
        """
        if self.has_role or (self.is_number and not differentiated.isdisjoint(self.users)):
            return True
        if not self.is_number or (self.is_scalar and self.is_assigned):
            return False
        return self.came_first or not (self.is_assigned or self.is_scalar)


class Weights:
    """Recognizes the parameters among the inputs of operators, and keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Weight]] = {}
        self._of_inputs: dict[tuple[str, int], Weight] = {}
        self._uses: dict[Hashable, Use] = {}
        self._assigned: set[Hashable] = set()
        self._differentiated: set[str] = set()
        self._count = 0

    def of(self, context: OpContext) -> Iterator[Weight]:
        """The parameters that an operator uses; called in its analysis."""
        roles = (context["weight_index"], context["bias_index"])
        for position, tensor in enumerate(context.get_inputs()):
            if tensor is None:
                continue
            key = context.get_value_key(position)
            if key is not None:
                yield from self._variable(context, position, key, has_role=position in roles)
                continue
            value = context.get_value(position)
            if value is not None and (position in roles or _is_parameter(value)):
                yield self._weight(value, (context.get_op_id(), position))

    def note_gradient(self, op_id: str) -> None:
        """A gradient of an operator is computed."""
        self._differentiated.add(op_id)

    def counted(self, weights: Iterable[Weight]) -> set[Weight]:
        """Those of some that are parameters, by all that has run."""
        unused = {
            use.weight for use in self._uses.values() if not use.is_parameter(self._differentiated)
        }
        return set(weights) - unused

    def _variable(
        self, context: OpContext, position: int, key: Hashable, *, has_role: bool
    ) -> Iterator[Weight]:
        kind, tensor = context["op_type"], context.get_inputs()[position]
        if kind in _HANDING_ON or kind in _ASKING:
            return
        if numerics_of(tensor).is_opaque(tensor) and not has_role:
            self._assigned.add(key)
            if key in self._uses:
                self._uses[key].is_assigned = True
            return
        use = self._uses.get(key) or self._new_use(context.get_value(position), key)
        if use is not None:
            use.has_role |= has_role
            use.came_first |= not self._differentiated
            use.users.add(context.get_op_id())
            yield use.weight

    def _new_use(self, value: Any, key: Hashable) -> Use | None:
        if value is None:
            return None
        size = math.prod(int(n) for n in value.shape)
        weight = Weight(self._count, size, byte_size(value) or 0)
        self._count += 1
        is_number = numerics_of(value).is_floating(value)
        use = Use(weight, len(value.shape) == 0, is_number, is_assigned=key in self._assigned)
        self._uses[key] = use
        return use

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
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # Symbolic, or nested: a size of its own for each item.
        return None
    return None if item is None else size * int(item)
