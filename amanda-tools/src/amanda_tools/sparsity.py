"""``sparsity``: how many activations, weights and gradients are zero, and in which pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from amanda.results import Chart, Table
from amanda.tools.description import OUTSIDE, place
from amanda_tools._bases.watching import (
    KINDS,
    Watched,
    WatchingOptions,
    WatchingTool,
)
from amanda_tools._output.charting import ranked
from amanda_tools._output.csv_files import write_rows
from amanda_tools._values.numerics import Array

__all__ = ["SparsityOptions", "SparsityTool", "pattern_share"]

_PATTERN = re.compile(r"([1-9]\d*):([1-9]\d*)")


def _pattern(_: Any, attribute: Any, value: str) -> None:
    found = _PATTERN.fullmatch(value)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"pattern must be N:M with N <= M, such as 2:4, got {value!r}")


@attrs.frozen(kw_only=True)
class SparsityOptions(WatchingOptions):
    """The options of ``sparsity``.

    Attributes:
        tensors: some of activations, weights and gradients.
        ops: types of operators; none for all.
        modules: patterns of module paths, such as layer1.*; none for all.
        every: look at each N-th execution of an operator only.
        limit: looks that the series hold; sums have them all.
        pattern: N:M, at most N of M consecutive weights along the inputs are not zero.
        csv: write the rows as a table.
    """

    pattern: str = attrs.field(default="2:4", validator=_pattern)
    csv: bool = True


class SparsityTool(WatchingTool[SparsityOptions]):
    """Zeros in activations, weights and gradients: their share, N:M patterns, empty outputs."""

    name = "sparsity"
    Options = SparsityOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        kept, of = self.options.pattern.split(":")
        self._kept, self._of = int(kept), int(of)
        self._last: dict[str, dict[str, Any]] = {}

    def note(self, watched: Watched, array: Array) -> None:
        zeros = int((array == 0).sum())
        found: dict[str, Any] = {
            "last_sparsity": zeros / array.size if array.size else 0.0,
            "pattern_share": None,
        }
        if watched.kind == "weights" and array.ndim > 1:
            axis = array.ndim - 1 if watched.axis is None else watched.axis
            found["pattern_share"] = pattern_share(array, self._kept, self._of, axis)
        self._last[watched.key] = found

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per tensor: ``elements`` and ``zeros`` of all looks, ``sparsity``,
        ``last_sparsity``, ``units`` and ``dead_units`` of activations, and of a weight
        ``pattern_share``, the share of its groups that the pattern allows, at the last look."""
        rows = []
        for watched in self.watched.values():
            row = watched.moments.row()
            names = ("executions", "elements", "zeros", "sparsity", "units", "dead_units")
            figures = {name: row[name] for name in names}
            about = {"kind": watched.kind, "tensor": watched.tensor}
            rows.append({**watched.op.row(), **about, **figures, **self._last[watched.key]})
        return rows

    def summary(self) -> dict[str, Any]:
        """The share of zeros of each kind of tensor, by type too, and of allowed groups."""
        rows = self.op_rows()
        shares = [row["pattern_share"] for row in rows if row["pattern_share"] is not None]
        return {
            "pattern": self.options.pattern,
            "conforming_weights": sum(share == 1 for share in shares),
            "checked_weights": len(shares),
            **{kind: self._share([r for r in rows if r["kind"] == kind]) for kind in KINDS},
            "by_type": {
                kind: {
                    name: self._share([r for r in rows if (r["kind"], r["type"]) == (kind, name)])
                    for name in sorted({r["type"] for r in rows if r["kind"] == kind})
                }
                for kind in KINDS
            },
        }

    def _share(self, rows: Sequence[dict[str, Any]]) -> float | None:
        elements = sum(row["elements"] for row in rows)
        return sum(row["zeros"] for row in rows) / elements if elements else None

    def tables(self) -> Iterable[Table]:
        """A table for each kind of tensor, those of modules and the sparsest first."""
        rows, summary = self.op_rows(), self.summary()
        for kind in KINDS:
            part = [row for row in rows if row["kind"] == kind]
            if not part:
                continue
            part.sort(
                key=lambda row: (place(row["id"], row["module"]) == OUTSIDE, -row["sparsity"])
            )
            title = f"sparsity: {100 * (summary[kind] or 0):.1f} % of the {kind} are zero"
            columns = ["tensor", "zeros", "at last", "of elements"]
            columns += {"activations": ["dead units"], "weights": [self.options.pattern]}.get(
                kind, []
            )
            yield Table(title, columns, [_shown(row) for row in part])

    def charts(self) -> Iterable[Chart]:
        """The share of zeros of each tensor that has some, the sparsest first."""
        for kind in KINDS:
            part = [row for row in self.op_rows() if row["kind"] == kind]
            shares = {f"{r['id']} {r['tensor']}": {"zeros": 100 * r["sparsity"]} for r in part}
            yield from ranked(f"zeros of the {kind}", shares, {"zeros": "zeros"}, "%")

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.csv``: a line per tensor."""
        if not self.options.csv:
            return []
        path = folder / f"{stem}.csv"
        write_rows(path, self.op_rows())
        return [path]


def pattern_share(array: Array, kept: int, of: int, axis: int) -> float | None:
    """The share of groups of `of` consecutive elements along an axis with at most `kept` that
    are not zero; None if the axis is no multiple of `of` long."""
    moved = np.moveaxis(array, axis, -1)
    if moved.shape[-1] % of or not moved.size:
        return None
    groups = moved.reshape(-1, of)
    return float(((groups != 0).sum(axis=1) <= kept).mean())


def _rank(row: dict[str, Any]) -> tuple[bool, float]:
    return place(row["id"], row["module"]) == OUTSIDE, -row["sparsity"]


def _shown(row: dict[str, Any]) -> tuple[Any, ...]:
    shares = tuple(f"{100 * row[name]:.1f} %" for name in ("sparsity", "last_sparsity"))
    found: tuple[Any, ...] = (f"{row['id']} {row['tensor']}", *shares, row["elements"])
    if row["kind"] == "activations":
        units = row["units"]
        found += ("-" if units is None else f"{row['dead_units']} of {units}",)
    elif row["kind"] == "weights":
        share = row["pattern_share"]
        found += ("-" if share is None else f"{100 * share:.1f} %",)
    return found
