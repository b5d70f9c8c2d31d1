"""Splits operators that compute at once what several of the other run compute, as ``qkv`` what
``q``, ``k`` and ``v`` do: outputs, weights and gradients are pieces of one axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any

import attrs

from amanda_tools._values.recordings import Recording, TensorRecord
from amanda_tools.diff.comparison import Counterpart

_PROJECTIONS = {"linear", "matmul", "bias_add"}


def split_fused(
    run: Recording, reference: Recording
) -> tuple[Recording, Recording, dict[str, Counterpart]]:
    """Return both runs with pieces of such operators, and the pairs of pieces and operators."""
    run, parts = _split(run, reference)
    reference, wholes = _split(reference, run)
    pairs = parts | {part: piece for piece, part in wholes.items()}
    return run, reference, {one: Counterpart(other, "part") for one, other in pairs.items()}


def _split(run: Recording, other: Recording) -> tuple[Recording, dict[str, str]]:
    """Split a run's operators; also return the other run's operators by the ids of pieces."""
    found = dict(_fused(run, other))
    theirs = {(record.id, *record.place): record for record in other.records}
    records: list[TensorRecord] = []
    pairs: dict[str, str] = {}
    for record in run.records:
        whole = record.forward or record.id
        if whole not in found:
            records.append(record)
            continue
        start: Any = 0
        for part in found[whole]:
            of = theirs.get((part.id + record.id.removeprefix(whole), *record.place))
            axis = None if of is None else _axis(record.load().shape, of.load().shape)
            # The gradient of the input is a sum: it has no pieces.
            if of is not None and axis is not None:
                stop = start + of.load().shape[axis]
                records.append(_piece(record, axis, start, stop))
                pairs[records[-1].id], start = of.id, stop
    return Recording(records), pairs


def _piece(record: TensorRecord, axis: int, start: int, stop: int) -> TensorRecord:
    piece = f"[{start}:{stop}]"
    index = (*[slice(None)] * axis, slice(start, stop))
    return attrs.evolve(
        record, id=record.id + piece, piece=piece, load=lambda: record.load()[index]
    )


def _axis(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """Return the only axis on which two shapes differ."""
    axes = [axis for axis, (n, m) in enumerate(zip(whole, part, strict=False)) if n != m]
    return axes[0] if len(axes) == 1 and len(whole) == len(part) else None


def _fused(run: Recording, other: Recording) -> Iterator[tuple[str, Sequence[TensorRecord]]]:
    """Yield ids of operators with a shape that none of the other run has, and consecutive operators
    of one module that together have it, with shapes that the other run has more often."""
    ours, theirs = (
        [(each, (each.type, each.load().shape)) for each in of.ops().values()]
        for of in (run, other)
    )
    counts, others = (Counter(kind for _, kind in part) for part in (ours, theirs))
    more = others - counts
    rest = [(each, kind[1]) for each, kind in theirs if each.type in _PROJECTIONS]
    for whole, kind in ours:
        if whole.type not in _PROJECTIONS or kind in others:
            continue
        for start in range(len(rest)):
            if parts := _parts(whole, kind[1], rest[start:], more):
                yield whole.id, parts
                rest = rest[start + len(parts) :]
                break


def _parts(
    whole: TensorRecord,
    size: Sequence[int],
    rest: Sequence[tuple[TensorRecord, Any]],
    more: Container[Any],
) -> list[TensorRecord]:
    """Return the first operators of `rest` if their shapes are those of an operator together."""
    parent, axis, total = rest[0][0].module.rpartition(".")[0], _axis(size, rest[0][1]), 0
    for count, (part, shape) in enumerate(rest, 1):
        is_alike = part.module.rpartition(".")[0] == parent and (whole.type, shape) in more
        if axis is None or not is_alike or part.type != whole.type or _axis(size, shape) != axis:
            break
        total += shape[axis]
        if total == size[axis]:
            return [each for each, _ in rest[:count]]
    return []
