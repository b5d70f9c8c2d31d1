"""Arguments of extraction rules: an executed operator, and the critical elements of its output.

A rule reads a :class:`Call` and adds critical elements of the inputs to a :class:`Wanted`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np

import amanda
from amanda_tools._values.tensors import Array
from amanda_tools.path.recording import RecordedExecution, is_real

T = TypeVar("T")

_EXACT = {"float64": 52, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of the integers that an element type holds exactly."""


class NoRule(Exception):
    """A rule does not know this form of its operator; the message describes the form."""


@attrs.define(eq=False)
class Call:
    """An executed operator.

    Attributes:
        execution: the execution, with its values.
        theta: fraction of a value that critical contributions make up.
        width: number of products that make up one value of its output; rules set it.
    """

    execution: RecordedExecution
    theta: float
    width: int = 1
    _memory: dict[str, Any] = attrs.field(factory=dict)

    def memo(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once for all inputs of the batch."""
        if name not in self._memory:
            self._memory[name] = make()
        found: T = self._memory[name]
        return found

    def attribute(self, *names: str, default: Any = None) -> Any:
        """Return the first non-tensor argument with one of these names, else `default`."""
        known = self.execution.op.signature.attributes
        return next((known[n] for n in names if known.get(n) is not None), default)

    def array(self, *names: str | int) -> Array:
        """Return the values of the input at a position, or of the first declared with one of these
        names.

        Raises:
            NoRule: it is absent, or has no numbers.
        """
        position = self.position(*names)
        found = None if position is None else self.execution.inputs[position]
        if found is None:
            raise NoRule(f"its input {names[0]} has no values")
        return found

    def position(self, *names: str | int) -> int | None:
        """Return the position of an input, None if it is absent."""
        declared = list(self.execution.op.signature.names)
        for name in names:
            if isinstance(name, int):
                return name if name < len(self.execution.inputs) else None
            if name in declared and self.execution.inputs[declared.index(name)] is not None:
                return declared.index(name)
        return None

    def output(self, position: int = 0) -> Array:
        """Return the values of an output.

        Raises:
            NoRule: it has none.
        """
        found = self.execution.outputs[position]
        if found is None:
            raise NoRule(f"its output {position} has no values")
        return found

    @property
    def data(self) -> list[int]:
        """Positions of the inputs of real numbers that depend on the model's input."""
        inputs = self.execution.inputs
        return [
            position
            for position, is_data in enumerate(self.execution.is_data)
            if is_data and is_real(inputs[position])
        ]

    def origins(self) -> tuple[list[Array], list[slice]]:
        """Find where each output element comes from, for an operator that only rearranges elements.

        The operator runs again on the indices of its input elements, those of all inputs in
        :attr:`data` counted on: once per digit, in a base that the element types hold exactly, and
        again with the opposite sign, which tells indices from constants that the operator fills in.
        Other inputs of real numbers are zero.

        Returns:
            For each output the indices, -1 for elements from elsewhere; for each input in
            :attr:`data` which indices are those of its elements.

        Raises:
            NoRule: the driver cannot run the operator again.
        """
        sources = {position: self.array(position) for position in self.data}
        # One run for all inputs: the result of a concatenation of many is large.
        ends = np.cumsum([0, *(source.size for source in sources.values())]).tolist()
        parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        numbers = np.arange(1, ends[-1] + 1)
        types = self.execution.op.types
        base = 1 << min((_EXACT.get(types[position], 7) for position in sources), default=7)
        found: list[Array] = []
        factor = 1
        while factor <= len(numbers):
            digits = numbers // factor % base
            given = {
                position: digits[part].reshape(source.shape)
                for part, (position, source) in zip(parts, sources.items(), strict=True)
            }
            plus = self._run(given)
            minus = self._run({position: -part for position, part in given.items()})
            for i, (one, other) in enumerate(zip(plus, minus, strict=True)):
                part = np.where(one == -other, one, 0).astype(np.int64) * factor
                if factor == 1:
                    found.append(part)
                else:
                    found[i] = found[i] + part
            factor *= base
        return [np.where((f > 0) & (f <= len(numbers)), f - 1, -1) for f in found], parts

    def _run(self, given: Mapping[int, Array]) -> list[Array]:
        op = self.execution.op
        if op.run is None:
            raise NoRule("the driver cannot run it again")
        tensors = []
        for i, (value, make) in enumerate(zip(self.execution.inputs, op.tensors, strict=True)):
            if i in given:
                value = given[i]
            elif is_real(value):
                value = np.zeros_like(value)
            if value is not None and make is None:
                raise NoRule(f"no tensor can be made for its input {i}")
            tensors.append(None if value is None or make is None else make(value))
        with amanda.disabled():
            outputs = op.run(*tensors)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return [np.asarray(o.detach().cpu().double() if hasattr(o, "detach") else o, np.float64)
                for o in outputs]  # fmt: skip


@attrs.define(eq=False)
class Wanted:
    """Critical elements of one output of an operator, for one input of the batch.

    Attributes:
        index: flat indices, ascending.
        values: the values to explain: the elements' own, or those after what follows, where that is
            a part of the same weighted sum (a bias, a batch norm).
        output: position of the output.
        critical: elements found so far: input, flat indices, values or None for the input's
            own.
        synapses: critical products: index in the output times the call's ``width`` plus position
            among the products. If a rule notes none, all products of the critical elements are
            critical.
    """

    index: Array
    values: Array
    output: int = 0
    critical: list[tuple[int, Array, Array | None]] = attrs.field(factory=list)
    synapses: list[Array] = attrs.field(factory=list)

    def add(self, position: int, index: Array, values: Array | None = None) -> None:
        """Note elements of an input as critical.

        Args:
            position: position of the input.
            index: flat indices.
            values: the values to explain; None for the elements' own.
        """
        self.critical.append((position, index, values))


Rule = Callable[[Call, Wanted], None]


def unbroadcast(index: Array, shape: Sequence[int], like: Sequence[int]) -> Array:
    """Convert flat indices in a result to those in a factor that was broadcast to it."""
    if tuple(shape) == tuple(like):
        return index
    strides = np.cumprod([1, *like[:0:-1]])[::-1]
    places = np.unravel_index(index, tuple(shape))[len(shape) - len(like) :]
    found = np.zeros(len(index), np.int64)
    for place, size, stride in zip(places, like, strides, strict=True):
        if size > 1:
            found += place * stride
    return found
