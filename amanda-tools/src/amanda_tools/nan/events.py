"""What the search for NaN and infinities finds, and what tells a producer from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda.errors import AmandaError, AmandaWarning
from amanda.tools.description import OpDescription
from amanda_tools._values.numerics import numerics_of, statistics


class NonFiniteError(AmandaError):
    """An operator has produced NaN or an infinity, and the tool was asked to stop there."""


class NonFiniteWarning(AmandaWarning):
    """An operator has produced NaN or an infinity."""


def what_is_new(inputs: Sequence[Any], outputs: Sequence[Any], *, infinities: bool) -> str:
    """``"nan"`` or ``"inf"`` if the outputs have such and the inputs do not justify it, else "".

    A NaN is new if no input has one: infinities that meet make one. An infinity is new
    if all inputs are finite numbers.
    """
    has_nan = any(numerics_of(t).has_nan(t) for t in _floating(outputs))
    if has_nan:
        return "" if any(numerics_of(t).has_nan(t) for t in _floating(inputs)) else "nan"
    is_finite = all(numerics_of(t).is_finite(t) for t in _floating(inputs))
    return "inf" if infinities and is_finite else ""


def _floating(tensors: Sequence[Any]) -> list[Any]:
    return [t for t in tensors if t is not None and numerics_of(t).is_floating(t)]


@attrs.define(eq=False)
class Event:
    """An operator that has produced what is no finite number.

    Attributes:
        op: the operator, of the backward pass a backward one.
        kind: ``"nan"`` or ``"inf"``.
        source: the user's line, ``file:line``; of a backward operator that of its forward one.
        inputs, outputs: statistics, null for an absent tensor; of a backward
            operator the gradients that it consumes and produces.
        overwritten: positions of inputs that the operator has written into before
            they could be looked at.
        attributes: the operator's non-tensor arguments, as text where they are no plain data.
        last: the operators watched before it, the latest last.
        times: how often it produced such.
    """

    op: OpDescription
    kind: str
    source: str
    inputs: list[dict[str, Any] | None]
    outputs: list[dict[str, Any] | None]
    overwritten: list[int]
    attributes: dict[str, Any]
    last: list[str]
    times: int = 1

    def row(self) -> dict[str, Any]:
        """The event as plain data."""
        return {
            **self.op.row(),
            "kind": self.kind,
            "source": self.source,
            "times": self.times,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "overwritten": self.overwritten,
            "attributes": self.attributes,
            "last": self.last,
        }

    def message(self) -> str:
        """One line for people."""
        where = f" ({self.op.module})" if self.op.module else ""
        source = f", {self.source}" if self.source else ""
        what = "NaN" if self.kind == "nan" else "an infinity"
        return (
            f"{self.op.type} produced {what} from finite inputs in the {self.op.direction} pass: "
            f"op {self.op.id}{where}{source}"
        )


def described(tensors: Sequence[Any]) -> list[dict[str, Any] | None]:
    """The statistics of each tensor."""
    return [None if tensor is None else statistics(tensor) for tensor in tensors]
