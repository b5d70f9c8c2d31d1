"""Which operators an optimization tool acts on, and why not on others."""

from __future__ import annotations

import fnmatch
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import amanda
from amanda import OpContext
from amanda.errors import AmandaError
from amanda.results import Table
from amanda.tools.description import OpDescription
from amanda_tools._values.arithmetic import arithmetic_of

Array = np.ndarray[Any, Any]

_PRODUCTS = frozenset({"matmul", "einsum"})
"""Types of products, which have a weight if one of the factors is a parameter."""


class Untreatable(Exception):
    """An operator that a method has no way to treat; the message is the reason."""


@attrs.frozen
class Weight:
    """The weight of an operator.

    Attributes:
        index: which input of the operator it is.
        value: its value; of PyTorch the parameter itself.
        layout: one letter per axis: I for inputs, O for outputs, B for what the data have, too
            (each position has a matrix of its own), others for positions.
        groups: into how many groups a convolution parts its channels.
        key: what it has in common with the same weight elsewhere (``context.get_value_key``),
            where the framework gives another object at each reading.
    """

    index: int
    value: Any
    layout: str
    groups: int = 1
    key: Hashable | None = None

    def axes(self, letters: str) -> tuple[int, ...]:
        """The axes of some roles, in their order."""
        return tuple(axis for axis, letter in enumerate(self.layout) if letter in letters)

    def width(self, letter: str) -> int:
        """How many inputs or outputs there are, over all axes of the role.

        Raises:
            Untreatable: the weight has no such axis.
        """
        axes = self.axes(letter) or (self.axis(letter),)
        return math.prod(shape_of(self.value)[axis] for axis in axes)

    def matrix(self, array: Array, letter: str) -> Array:
        """An array of the weight's shape with the axes of a role as its columns."""
        axes = self.axes(letter)
        last = np.moveaxis(array, axes, range(-len(axes), 0))
        return last.reshape(-1, math.prod(array.shape[axis] for axis in axes))

    def folded(self, matrix: Array, letter: str, shape: tuple[int, ...]) -> Array:
        """What :meth:`matrix` was made of, from its elements."""
        axes = self.axes(letter)
        rest = [size for axis, size in enumerate(shape) if axis not in axes]
        last = matrix.reshape(*rest, *(shape[axis] for axis in axes))
        return np.moveaxis(last, range(-len(axes), 0), axes)

    @property
    def identity(self) -> Hashable:
        """What it is known by while it is alive."""
        return id(self.value) if self.key is None else self.key

    def axis(self, letter: str) -> int:
        """The axis of a role.

        Raises:
            Untreatable: the weight has none, or several.
        """
        if self.layout.count(letter) != 1:
            role = {"I": "input", "O": "output"}[letter]
            raise Untreatable(f"a weight with the layout {self.layout} has no one {role} axis")
        return self.layout.index(letter)


def weight_of(context: OpContext) -> Weight:
    """The weight that the mapping rules name.

    Raises:
        Untreatable: there is none, or none that could be changed.
    """
    index, layout = context["weight_index"], context["weight_layout"]
    if index is None or layout is None:
        raise Untreatable("none of its inputs is known as its weight")
    if context.get_inputs()[index] is None:
        raise Untreatable("it is called without a weight")
    value = context.get_value(index)
    if value is None:
        raise Untreatable("its weight is no parameter: the program computes it")
    if not arithmetic_of(value).is_floating(value):
        raise Untreatable(f"its weight is of type {value.dtype}")
    if len(value.shape) != len(layout):
        raise Untreatable(f"its weight has {len(value.shape)} axes, and not the layout {layout}")
    groups = int(context.get_attrs().get("groups") or 1)
    key, view = context.get_value_key(index), context.get_value_view(index)
    # A mask of one view of a variable is no mask of another.
    return Weight(index, value, layout, groups, (key, view) if key and view else key)


@attrs.define
class Selection:
    """The operators of some types, without those that were excluded; it remembers what it met.

    Attributes:
        types: canonical types, or names of the framework.
        exclude: patterns of op ids and module paths (``*``, ``?``, ``[...]``).
        is_default: whether the tool has named the types, and not its user.
        skipped: id to (operator, reason), for those of the types that are not treated.
    """

    types: Sequence[str]
    exclude: Sequence[str] = ()
    is_default: bool = False
    skipped: dict[str, tuple[OpDescription, str]] = attrs.field(factory=dict)
    _met: set[str] = attrs.field(factory=set)

    def takes(self, op: OpDescription, *, has_weight: bool = False) -> bool:
        """Whether the tool is to act on an operator.

        Args:
            op: the operator.
            has_weight: take it for a ``linear`` if it is a product, which has a weight.
        """
        self._met |= {op.type, op.name}
        is_linear = has_weight and op.type in _PRODUCTS and "linear" in self.types
        if is_linear:
            self._met.add("linear")
        if not op.is_selected(self.types) and not is_linear:
            return False
        if self.excludes(op):
            self.skip(op, "it is excluded")
            return False
        return True

    def excludes(self, op: OpDescription) -> bool:
        """Whether one of the patterns is of this operator."""
        return any(
            name == pattern or fnmatch.fnmatchcase(name, pattern)
            for pattern in self.exclude
            for name in (op.id, op.module)
        )

    def skip(self, op: OpDescription, reason: str) -> None:
        """Remember that an operator of the types is not treated."""
        self.skipped[op.id] = (op, reason)

    def never_met(self) -> list[str]:
        """The types of which no operator was there; of default types one is enough."""
        missing = [kind for kind in self.types if kind not in self._met]
        return missing if len(missing) == len(self.types) or not self.is_default else []

    def rows(self) -> list[dict[str, Any]]:
        """The operators that are not treated, each with the reason."""
        return [
            {"id": op.id, "type": op.type, "module": op.module, "reason": reason}
            for op, reason in self.skipped.values()
        ]

    def tables(self, tool: str) -> Iterable[Table]:
        """What is not treated, for people."""
        if self.skipped:
            rows = [(row["id"], row["type"], row["reason"]) for row in self.rows()]
            yield Table(f"{tool}: {len(rows)} ops skipped", ("op", "type", "reason"), rows)
        if missing := self.never_met():
            title = f"{tool}: types that were asked for and never met"
            yield Table(title, ("type",), [(kind,) for kind in missing])


def values_of_run(run: Callable[[], Any], places: Mapping[str, int], tool: str) -> dict[str, Any]:
    """The values of weights, as the framework holds them, by op id.

    Args:
        run: runs the model once.
        places: op id to the input that is the weight.
        tool: who asks.

    Raises:
        AmandaError: one of the operators does not run.
    """
    values: dict[str, Any] = {}

    def collect(context: OpContext) -> None:
        op_id = context.get_op_id()
        if op_id in places:
            values[op_id] = context.get_value(places[op_id])

    collector = amanda.Tool()
    collector.add_inst_for_op(collect)
    with amanda.apply(collector):
        run()
    if missing := [op_id for op_id in places if values.get(op_id) is None]:
        raise AmandaError(f"{tool}: the run has not executed op {missing[0]}, which the tool knows")
    return values


def weakly(value: Any) -> Callable[[], Any]:
    """What gives a value as long as it is alive; None of one that has no weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor of any framework, as plain numbers."""
    return tuple(int(size) for size in value.shape)


def rank_of(value: Any) -> int | None:
    """How many axes a tensor has; None of a symbolic one if nobody knows."""
    rank = value.shape.rank if hasattr(value.shape, "rank") else len(value.shape)
    return None if rank is None else int(rank)


def checked(options: Mapping[str, bool], tool: str) -> None:
    """Refuse options that cannot be.

    Raises:
        ValueError: a condition, which is its own message, does not hold.
    """
    for condition, holds in options.items():
        if not holds:
            raise ValueError(f"tool {tool}: {condition}")
