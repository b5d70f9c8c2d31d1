"""``sparsity``: how many activations, weights and gradients are zero, and in which pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from amanda.results import Chart, Table
from amanda.tools.description import OUTSIDE, place
from amanda.tools.reporting import applies_if
from amanda_tools._bases.watching import KINDS, WatchedTensor, WatchingOptions, WatchingTool
from amanda_tools._output.folding import in_model
from amanda_tools._output.ranked_charts import rank_groups
from amanda_tools._values.moments import Moments
from amanda_tools._values.tensors import Array

__all__ = ["SparsityOptions", "SparsityTool", "pattern_share"]

_PATTERN = re.compile(r"([1-9]\d*):([1-9]\d*)")

_NOT_REPORTED = ("mean", "std", "min", "max", "nan", "inf", "saturated", "histogram")
"""Figures of ``stats`` that the rows of ``sparsity`` do not have."""


def _check_pattern(_: Any, attribute: Any, value: str) -> None:
    found = _PATTERN.fullmatch(value)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"pattern must be N:M with N <= M, such as 2:4, got {value!r}")


@attrs.frozen(kw_only=True)
class SparsityOptions(WatchingOptions):
    """The options of ``sparsity``.

    Attributes:
        pattern: N:M, at most N of M consecutive weights along the inputs are not zero.
        csv: write the rows as a table.
    """

    pattern: str = attrs.field(
        default="2:4",
        validator=_check_pattern,
        metadata=applies_if("tensors=weights", lambda o: "weights" in o.tensors),
    )
    csv: bool = True


class SparsityTool(WatchingTool[SparsityOptions]):
    """Zeros in tensors: their share, N:M patterns, empty outputs.

    Example: ``amanda run -t sparsity:pattern=2:4,csv=true -o out -- train.py``
    """

    name = "sparsity"
    Options = SparsityOptions
    only_watches = True
    zeros_only = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        kept, of = self.options.pattern.split(":")
        self._kept, self._of = int(kept), int(of)
        self._last: dict[str, dict[str, Any]] = {}

    def examine(self, watched: WatchedTensor, array: Array, now: Moments) -> None:
        share = None
        if watched.kind == "weights" and array.ndim > 1:
            axis = array.ndim - 1 if watched.input_axis is None else watched.input_axis
            share = pattern_share(array, self._kept, self._of, axis)
        self._last[watched.key] = {"last_sparsity": now.sparsity, "pattern_share": share}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per tensor.

        ``elements``, ``zeros`` and ``sparsity`` are of all executions, ``last_sparsity`` is of the
        last one. Activations have ``units`` and ``dead_units``, weights ``pattern_share``: the
        fraction of groups at the last execution that the pattern allows.
        """
        return [
            {
                **{key: value for key, value in row.items() if key not in _NOT_REPORTED},
                **self._last[key],
            }
            for key, row in zip(self.watched, self.tensor_rows(), strict=True)
        ]

    def summary(self) -> dict[str, Any]:
        """Fraction of zeros of each kind of tensor, in all and by type; weights in the pattern."""
        rows = self.op_rows()
        shares = [row["pattern_share"] for row in rows if row["pattern_share"] is not None]
        by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
        return {
            "pattern": self.options.pattern,
            "conforming_weights": sum(share == 1 for share in shares),
            "checked_weights": len(shares),
            **{kind: _share_of_zeros(part) for kind, part in by_kind.items()},
            "by_type": {
                kind: {
                    name: _share_of_zeros([row for row in part if row["type"] == name])
                    for name in sorted({row["type"] for row in part})
                }
                for kind, part in by_kind.items()
            },
            "not_looked_at": self.not_looked_at.by_kind(),
        }

    def tables(self) -> Iterable[Table]:
        """Activations, parameters with their gradients, other gradients: tensors of modules first,
        the sparsest first."""
        last_column = {"activation": ["dead units"], "parameter": [self.options.pattern]}
        rows = self._rows()
        for noun, pairs in self.groups():
            columns = ["tensor", "zeros", "last zeros", "of elements", *last_column.get(noun, [])]
            has_gradients = any(gradient for _, gradient in pairs)
            columns += ["gradient zeros"] if has_gradients else []
            pairs.sort(key=lambda pair: _rank(rows[pair[0].key]))
            if pairs:
                share = _share_of_zeros([rows[watched.key] for watched, _ in pairs]) or 0.0
                title = f"sparsity: {100 * share:.1f} % of the {noun}s are zero"
                cells = [
                    (
                        *_cells(rows[w.key]),
                        *([_zeros(rows[of.key] if of else None)] if has_gradients else []),
                    )
                    for w, of in pairs
                ]
                yield Table(title, columns, cells, detail=noun == "other gradient")
        yield from self.outside_of_model()
        yield from self.not_looked_at.tables(self.name)

    def _rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows by the key of the tensor, with its name in tables."""
        pairs = zip(self.watched.values(), self.op_rows(), strict=True)
        return {w.key: {**row, "label": w.label} for w, row in pairs}

    def charts(self) -> Iterable[Chart]:
        """Fraction of zeros of each tensor that has some, the sparsest first."""
        rows = self._rows()
        for kind in KINDS:
            of_kind = [rows[w.key] for w in self.listed(kind)]
            shares = {row["label"]: {"zeros": 100 * row["sparsity"]} for row in of_kind}
            yield from rank_groups(f"zeros of the {kind}", shares, {"zeros": "zeros"}, "%")


def pattern_share(array: Array, kept: int, of: int, axis: int) -> float | None:
    """Return the fraction of groups that an N:M pattern allows.

    Args:
        array: the weight.
        kept: N: elements of a group that may be other than zero.
        of: M: consecutive elements along `axis` that make a group.
        axis: the axis of the inputs.

    Returns:
        The fraction; None if the axis is not a multiple of `of` long.
    """
    moved = np.moveaxis(array, axis, -1)
    if moved.shape[-1] % of or not moved.size:
        return None
    groups = moved.reshape(-1, of)
    return float(((groups != 0).sum(axis=1) <= kept).mean())


def _share_of_zeros(rows: Sequence[Mapping[str, Any]]) -> float | None:
    elements = sum(row["elements"] for row in rows)
    return sum(row["zeros"] for row in rows) / elements if elements else None


def _rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    return place(row["id"], row["module"]) == OUTSIDE, -row["sparsity"]


def _zeros(row: Mapping[str, Any] | None) -> str:
    return f"{100 * row['sparsity']:.1f} %" if row else "-"


def _cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    shares = (f"{100 * row[name]:.1f} %" for name in ("sparsity", "last_sparsity"))
    label = in_model(row["label"], row["module"])
    cells: tuple[Any, ...] = (label, *shares, f"{row['elements']:,}")
    if row["kind"] == "activations":
        units = row["units"]
        cells += ("-" if units is None else f"{row['dead_units']:,} of {units:,}",)
    elif row["kind"] == "weights":
        share = row["pattern_share"]
        cells += ("-" if share is None else f"{100 * share:.1f} %",)
    return cells
