"""Compares corresponding tensors of two runs: relative error, largest difference.

``compare(run, reference, ops, tolerance)`` yields a :class:`Pair` for each tensor of the run whose
operator has a counterpart in `ops`, as :func:`amanda_tools.diff.alignment.align_ops` pairs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import numpy as np

from amanda_tools._values.recordings import Recording, TensorRecord
from amanda_tools._values.tensors import Array

_CHANNELS = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3), 3: (0, 2, 1)}
"""Order of the axes that makes channels-last data channels-first, by number of axes."""


@attrs.frozen
class Counterpart:
    """The operator of the reference that corresponds to an operator of the run.

    Attributes:
        id: id of the operator in the reference.
        by: criterion that paired them: ``id``, ``value``, ``order``, or ``part`` of an operator
            that computes at once what several of the other run compute.
    """

    id: str
    by: Literal["id", "value", "order", "part"]


@attrs.frozen
class Pair:
    """Two corresponding tensors.

    Attributes:
        record: tensor of the run.
        reference: tensor of the reference.
        relative: norm of the difference divided by the norm of the reference; infinite if only one
            of the norms is finite, or only the reference is zero.
        largest: largest difference of two elements; None if the shapes differ.
        note: peculiarities: other shapes, another layout, elements that are not finite.
        agrees: True if the relative error is within the tolerance.
        by: criterion that paired the operators, as of :class:`Counterpart`.
    """

    record: TensorRecord
    reference: TensorRecord
    relative: float
    largest: float | None
    note: str
    agrees: bool
    by: Literal["id", "value", "order", "part"] = "id"


def compare(
    run: Recording, reference: Recording, ops: Mapping[str, Counterpart], tolerance: float
) -> Iterator[Pair]:
    """Yield the pairs of corresponding tensors, in the order of the run.

    If one run has executed an operator more often than the other, as a loop that the other has
    unrolled, the first execution is compared.
    """
    theirs = {(record.id, *record.place): record for record in reference.records}
    ours, others = _executions(run), _executions(reference)
    paired = [(ours[i], others[c.id]) for i, c in ops.items() if i in ours and c.id in others]
    steps = tuple(map(min, zip(*paired, strict=True)))
    for record in run.records:
        counterpart = ops.get(record.id)
        if counterpart is None:
            continue
        times = ours[record.id], others.get(counterpart.id, 0)
        # Operators that are paired by their ids are the same code. What a loop runs in another
        # order is not known. The others run as often in both runs, or once in each step.
        is_loop = counterpart.by != "id" and times not in (steps, times[:1] * 2)
        if is_loop and (record.step or counterpart.by == "order"):
            continue
        other = theirs.get((counterpart.id, *record.place))
        if other is not None:
            pair = compare_tensors(record, other, tolerance)
            notes = [pair.note] if pair.note else []
            if is_loop:
                notes.append("the first execution: one run has more than the other")
            if counterpart.by == "order":
                notes.append("paired by order")
            yield attrs.evolve(pair, by=counterpart.by, note=", ".join(notes))


def _executions(recording: Recording) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in recording.records:
        found[record.id] = max(found.get(record.id, 0), record.step + 1)
    return found


def compare_tensors(record: TensorRecord, reference: TensorRecord, tolerance: float) -> Pair:
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
    """Return relative error, largest difference and a note, of two arrays of equal shape.

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
    # In its units, squares stay in the range of float64.
    unit = max(largest, float(np.abs(b[finite]).max(initial=0)))
    scale, error = (float(np.linalg.norm(part[finite] / unit)) for part in (b, difference))
    return (error / scale if scale else math.inf), largest, ""


def to_row(pair: Pair) -> dict[str, Any]:
    """Return the keys that a pair adds to a row of the result."""
    record = pair.record
    return {
        "tensor": record.tensor,
        "step": record.step,
        "reference": pair.reference.id,
        "paired_by": pair.by,
        "relative_error": pair.relative,
        "largest_difference": pair.largest,
        "agrees": pair.agrees,
        "note": pair.note,
    }
