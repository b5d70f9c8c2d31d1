"""Compares corresponding tensors of two runs: relative error, largest difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from amanda_tools._values.tensors import Array
from amanda_tools.diff.recordings import Record, Recording

_CHANNELS = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3), 3: (0, 2, 1)}
"""Order of the axes that makes channels-last data channels-first, by number of axes."""


@attrs.frozen
class Pair:
    """Two corresponding tensors.

    Attributes:
        record: of the run at hand.
        reference: of the reference.
        relative: norm of the difference divided by the norm of the reference; infinite where only
            one of them is finite, or only the reference is zero.
        largest: largest difference of two elements; None where the shapes do not fit.
        note: peculiarities: other shapes, another layout, elements that are not finite.
        agrees: the relative error is within the tolerance.
    """

    record: Record
    reference: Record
    relative: float
    largest: float | None
    note: str
    agrees: bool


def compare(
    run: Recording, reference: Recording, ops: Mapping[str, str], tolerance: float
) -> Iterator[Pair]:
    """Yield the pairs of corresponding tensors, in the order of the run."""
    theirs = {(record.id, *record.place): record for record in reference.records}
    for record in run.records:
        other = theirs.get((ops.get(record.id, ""), *record.place))
        if other is not None:
            yield compare_tensors(record, other, tolerance)


def compare_tensors(record: Record, reference: Record, tolerance: float) -> Pair:
    """Compare two tensors; a channels-last one may correspond to a channels-first one."""
    ours, theirs = record.load(), reference.load()
    note = ""
    if ours.shape != theirs.shape:
        ours, theirs, note = _match_layouts(ours, theirs)
        if not note:
            shapes = f"shapes {list(ours.shape)} and {list(theirs.shape)}"
            return Pair(record, reference, math.inf, None, shapes, agrees=False)
    relative, largest, special = distance(ours, theirs)
    note = ", ".join(text for text in (note, special) if text)
    return Pair(record, reference, relative, largest, note, relative <= tolerance)


def _match_layouts(ours: Array, theirs: Array) -> tuple[Array, Array, str]:
    axes = _CHANNELS.get(ours.ndim) if ours.ndim == theirs.ndim else None
    if axes is not None and ours.transpose(axes).shape == theirs.shape:
        return ours.transpose(axes), theirs, "channels last here"
    if axes is not None and theirs.transpose(axes).shape == ours.shape:
        return ours, theirs.transpose(axes), "channels last in the reference"
    return ours, theirs, ""


def distance(ours: Array, theirs: Array) -> tuple[float, float, str]:
    """Return relative error, largest difference and a note, of two arrays of one shape.

    Elements that are NaN in both, or the same infinity in both, are equal.
    """
    a, b = (array.astype(np.float64).ravel() for array in (ours, theirs))
    # Infinities of one sign are equal; their difference would be NaN.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    if not (finite | same).all():
        return math.inf, math.inf, "finite in one of them only"
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, a - b)
    largest = float(np.abs(difference).max()) if difference.size else 0.0
    if largest == 0:
        return 0.0, 0.0, "" if finite.all() else "not all finite, alike in both"
    scale = float(np.linalg.norm(b[finite]))
    error = float(np.linalg.norm(difference[finite]))
    return (error / scale if scale else math.inf), largest, ""


def to_row(pair: Pair) -> dict[str, Any]:
    """Return the keys that a pair adds to a row of the result."""
    record = pair.record
    return {
        "tensor": record.tensor,
        "step": record.step,
        "reference": pair.reference.id,
        "relative_error": pair.relative,
        "largest_difference": pair.largest,
        "agrees": pair.agrees,
        "note": pair.note,
    }
