"""What the search for NaN and infinities finds, and what tells a producer from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from amanda.errors import AmandaError, AmandaWarning
from amanda.tools.reporting import OpDescription
from amanda_tools.flops.free import VIEWS
from amanda_tools.numerics import numerics_of, statistics


class NonFiniteError(AmandaError):
    """An operator has produced NaN or an infinity, and the tool was asked to stop there."""


class NonFiniteWarning(AmandaWarning):
    """An operator has produced NaN or an infinity."""


CONVERTING = frozenset("bfloat16 double float half to type type_as".split())
"""Types that may hand on their input, and may convert it to a type with a smaller range."""

PASSING = (VIEWS - CONVERTING) | frozenset(
    """
    cat chunk embedding flip gather index_select masked_select pixel_shuffle pixel_unshuffle
    relu repeat repeat_interleave roll scatter slice_scatter sort stack take take_along_dim tile
    topk where clone copy threshold clamp_min clamp_max hardtanh relu6 max_pool1d max_pool2d
    max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin max min
    maximum minimum abs neg identity_n column_stack hstack vstack dstack tril triu
    """.split()
)
"""Types whose outputs are among their inputs, or zero: they cannot make a number none."""

PLACING = frozenset(
    """
    const constant constant_pad_nd empty empty_like empty_permuted empty_strided fill
    fill_diagonal full full_like index_fill masked_fill new new_empty new_empty_strided new_full
    new_tensor nan_to_num pad set setitem tensor from_numpy as_tensor read read_variable
    """.split()
)
"""Types that write what the program gave them, or leave memory as it was."""

PASSING_BACKWARD = frozenset(
    f"{kind}_backward"
    for kind in """
    alias cat clone detach flip narrow permute reshape reshape_alias select slice split squeeze
    stack t transpose unbind unsafe_split unsafe_view unsqueeze view relu max_pool2d_with_indices
    """.split()
) | {"accumulate_grad"}
"""The same of backward operators; the sum of gradients is checked where it is consumed."""


def can_produce(op: OpDescription) -> bool:
    """Whether an operator has to be watched."""
    if op.direction == "backward":
        return op.type not in PASSING_BACKWARD
    return op.type not in PASSING and op.type not in PLACING


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
