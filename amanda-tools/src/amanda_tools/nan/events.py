"""Findings of ``nan``: operators that produced NaN or infinities, statistics of their tensors."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from amanda.errors import AmandaError, AmandaWarning
from amanda.interface.specs import TensorSpec
from amanda.python.text import printable
from amanda.tools.description import OpDescription
from amanda_tools._values.tensors import reader_of
from amanda_tools.nan.replay import OpReplay


class NonFiniteError(AmandaError):
    """An operator has produced NaN or an infinity, and the tool was asked to abort."""


class NonFiniteWarning(AmandaWarning):
    """An operator has produced NaN or an infinity."""


def find_new_kind(inputs: Sequence[Any], outputs: Sequence[Any], *, infinities: bool) -> str:
    """Return ``"nan"`` or ``"inf"`` if outputs have one that inputs do not explain, else "".

    A NaN is new if no input holds one; it may come from infinities. An infinity is new if all
    inputs are finite.
    """
    has_nan = any(reader_of(t).has_nan(t) for t in _floating(outputs))
    if has_nan:
        return "" if any(reader_of(t).has_nan(t) for t in _floating(inputs)) else "nan"
    is_finite = all(reader_of(t).is_finite(t) is not False for t in _floating(inputs))
    return "inf" if infinities and is_finite else ""


def _floating(tensors: Sequence[Any]) -> list[Any]:
    return [t for t in tensors if t is not None and reader_of(t).may_hold_nan(t)]


@attrs.define(eq=False)
class NonFiniteEvent:
    """An operator that has produced NaN or an infinity.

    Attributes:
        op: the operator, in the backward pass a backward one.
        kind: ``"nan"`` or ``"inf"``.
        source: line of the user's program, ``file:line``; of a backward operator that of its
            forward operator.
        inputs, outputs: :func:`statistics`, None for absent tensors; of a backward operator the
            gradients that it consumes and produces.
        overwritten: positions of inputs that the operator wrote into before they could be examined.
        parameter: path of the parameter that holds it, or whose gradient does; None for neither.
        attributes: non-tensor arguments, as text where they are not plain data.
        step: the number of the step in which it first produced one, from 0 on.
        last: ids of the operators watched before it, the latest last.
        times: number of executions that produced NaN or an infinity.
        fates: in how many iterations it ``reached`` the outputs of the model, a gradient or a
            parameter, was ``masked`` before, or in the gradients before the step, or ``skipped``
            with the step; ``""`` where that is not known.
        replay: the operator with its inputs; None if they are not kept.
    """

    op: OpDescription
    kind: str
    source: str
    inputs: list[dict[str, Any] | None]
    outputs: list[dict[str, Any] | None]
    overwritten: list[int]
    parameter: str | None
    attributes: dict[str, Any]
    step: int
    last: list[str]
    times: int = 0
    fates: collections.Counter[str] = attrs.field(factory=collections.Counter)
    replay: OpReplay | None = None

    @property
    def fate(self) -> str:
        """``reached``, ``masked`` or ``skipped``; "" where it is not known."""
        fates = "reached", "skipped", "masked"
        return next((fate for fate in fates if self.fates[fate]), "")

    def row(self) -> dict[str, Any]:
        """Return the row of the result."""
        return {
            **self.op.identity(),
            "phase": self.op.phase,
            "kind": self.kind,
            "step": self.step,
            "source": self.source,
            "times": self.times,
            "fate": self.fate,
            "inputs": _with_devices(self.inputs, self.op.tensors.inputs),
            "outputs": _with_devices(self.outputs, self.op.tensors.outputs),
            "overwritten": self.overwritten,
            "parameter": self.parameter,
            "attributes": self.attributes,
            "last": self.last,
        }

    def message(self) -> str:
        """Return one line for people."""
        where = f" ({self.op.module})" if self.op.module else ""
        source = f", {self.source}" if self.source else ""
        # A NaN may come from infinities.
        is_nan = self.kind == "nan"
        what = "NaN from inputs without NaN" if is_nan else "an infinity from finite inputs"
        when = _PLACES.get(self.op.phase, f"in the {self.op.direction} pass")
        if self.parameter:
            gradient = "the gradient of " if self.op.forward else ""
            when += f", in {gradient}{self.parameter}"
        return printable(
            f"{self.op.type} produced {what} {when}"
            f"{_FATES.get(self.fate, '')}: op {self.op.id}{where}{source}"
        )


_FATES = {
    "masked": ", which reached no output of the model and no step of training",
    "skipped": ", and the step was skipped",
}

_PLACES = {
    "setup": "while the model was built",
    "optimizer": "in the optimizer",
    "other": "outside of the model",
}
"""Where an operator of a phase beside the model's passes runs."""


def _with_devices(
    tensors: Sequence[dict[str, Any] | None], specs: Sequence[TensorSpec | None] | None
) -> list[dict[str, Any] | None]:
    """Add to each tensor's statistics its device, "" if unknown."""
    devices = [None if spec is None else spec.device for spec in specs or ()]
    return [
        None if tensor is None else {**tensor, "device": device or ""}
        for tensor, device in zip(tensors, [*devices, *[None] * len(tensors)], strict=False)
    ]


def describe_tensors(tensors: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return :func:`statistics` of each tensor, None for absent ones."""
    return [None if tensor is None else statistics(tensor) for tensor in tensors]


def statistics(tensor: Any) -> dict[str, Any]:
    """Return shape, element type, counts of NaN, infinities and zeros, and moments of a tensor.

    ``min``, ``max``, ``mean`` and ``std`` are of the finite elements, None without any. A tensor
    that cannot be read has ``shape`` and ``dtype`` only.
    """
    reader = reader_of(tensor)
    found: dict[str, Any] = {"shape": reader.shape(tensor), "dtype": reader.dtype(tensor)}
    array = reader.numbers(tensor)
    if array is None or array.dtype.kind not in "fiub":
        return found
    values = array.astype(np.float64, copy=False).ravel()
    finite = values[np.isfinite(values)]
    found.update(
        nan=int(np.isnan(values).sum()),
        posinf=int(np.isposinf(values).sum()),
        neginf=int(np.isneginf(values).sum()),
        zeros=int((values == 0).sum()),
    )
    for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        # The sum of huge numbers may leave the range of float64.
        with np.errstate(over="ignore", invalid="ignore"):
            value = float(function(finite)) if finite.size else math.nan
        found[name] = value if math.isfinite(value) else None
    return found
