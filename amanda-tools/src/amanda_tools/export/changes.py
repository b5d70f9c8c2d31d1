"""What a tool changes, as data: what it returns from ``changes()``, and what is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from amanda_tools._values.tensors import Array


@attrs.frozen(eq=False)
class Rounding:
    """An input is rounded, to ``(integer - zero_point) * scale``, where the integer is
    ``clamp(round(x / scale) + zero_point, low, high)``.

    Attributes:
        op: id of the operator.
        input: position of the input.
        scale, zero_point: one number, or one for each channel.
        low, high: smallest and largest integer.
        axis: axis of the channels; None if there is one scale.
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
    divides: bool = False


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


class ChangingTool(Protocol):
    """A tool whose changes can be exported."""

    def changes(self) -> Sequence[Change]:
        """Return what the tool changes.

        Raises:
            AmandaError: it is not known yet, or is no such change; the message gives the reason.
        """


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
