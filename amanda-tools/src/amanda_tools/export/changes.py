"""What a tool changes, as data: what it returns from ``changes()``, and what is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from amanda_tools._values.tensors import Array


@attrs.frozen(eq=False)
class Rounding:
    """An input is rounded, to ``(integer - zero_point) * scale``, where the integer is
    ``clamp(round(x / scale) + zero_point, low, high)``.

    Attributes:
        op: id of the operator.
        input: position of the input.
        scale, zero_point: one number, or one for each channel; with groups, arrays of the input's
            shape, but for the axis of groups.
        low, high: smallest and largest integer.
        axis: axis of the channels, or of the groups; None if there is one scale.
        group: positions on the axis that share a scale; 0 without groups.
        integers: of a constant input, where they are not those of the formula.
        divides: `x` is divided by `scale`; else it is multiplied by ``1 / scale``, which rounds
            some values differently.
    """

    op: str
    input: int
    scale: Array
    zero_point: Array
    low: int
    high: int
    axis: int | None = None
    group: int = 0
    integers: Array | None = None
    divides: bool = False

    @property
    def is_small(self) -> bool:
        """True if two of its integers fit into a byte."""
        return self.low >= -8 and self.high <= 7

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return False if an input of this shape has other channels or groups."""
        if self.integers is not None and np.shape(self.integers) != shape:
            return False
        if self.axis is None or self.axis >= len(shape):
            return self.axis is None
        given = list(np.shape(self.scale))
        if not self.group:
            return shape[self.axis] == np.size(self.scale)
        given[self.axis] *= self.group
        return tuple(given) == shape

    def grid(self, rank: int) -> tuple[Array, Array]:
        """Return scale and zero point, float32, so that they broadcast to an input of this rank."""
        given = [np.asarray(part, np.float32) for part in (self.scale, self.zero_point)]
        if self.group:
            scale, zero = (np.repeat(part, self.group, self.axis) for part in given)
        else:
            shape = [-1 if axis == self.axis else 1 for axis in range(rank)]
            scale, zero = (part.reshape(shape) for part in given)
        return scale, zero


@attrs.frozen(eq=False)
class Mask:
    """A weight is multiplied by a mask.

    Attributes:
        op: id of the operator.
        input: position of the weight.
        mask: an array of the weight's shape, True where it stays.
    """

    op: str
    input: int
    mask: Array


@attrs.frozen(eq=False)
class Function:
    """An input is replaced by a function of it, of the framework's operators only.

    Attributes:
        op: id of the operator.
        input: position of the input.
        function: the function.
    """

    op: str
    input: int
    function: Callable[[Any], Any]


Change = Rounding | Mask | Function


@attrs.frozen
class Exported:
    """An exported model.

    Attributes:
        path: the file.
        ops: ids of the operators that are changed in it.
        in_floating_point: ids of operators that are as in the original model, with the reason.
        difference: largest absolute difference of an output to that of the model under the tool.
    """

    path: Path
    ops: Sequence[str]
    in_floating_point: Mapping[str, str]
    difference: float
