"""The page of a comparison: the error along the run, and a table to sort."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amanda.results import Chart
from amanda_tools._output.report import Document, Section, render
from amanda_tools._output.report.columns import make_table

_COLUMNS = {
    "id": "op",
    "type": "type",
    "phase": "phase",
    "module": "module",
    "tensor": "tensor",
    "step": "step",
    "relative_error": "relative error",
    "largest_difference": "largest difference",
    "note": "note",
}
"""Keys of a row, and the headings of their columns."""


def page(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the page as HTML."""
    first = summary["first"]
    if first is None:
        head = f"All {summary['compared']} compared tensors agree."
    else:
        head = (
            f"First divergence: {first['type']}, op {first['id']}, {first['tensor']}, "
            f"step {first['step']}, relative error {first['relative_error']:.3g}."
        )
    counts = (
        f"{summary['agreeing']} of {summary['compared']} tensors agree within "
        f"{summary['tolerance']:g}; {len(summary['only_here'])} operators have no match in the "
        f"reference, {len(summary['only_in_reference'])} none here."
    )
    cells = [[i, *(row.get(key) for key in _COLUMNS)] for i, row in enumerate(rows)]
    marks = [_mark(row, first) for row in rows]
    section = Section(
        name="diff",
        notes=[head, counts],
        charts=list(charts(rows, summary["tolerance"])),
        grids=[make_table("compared tensors", ["#", *_COLUMNS.values()], cells, marks=marks)],
    )
    return render(Document(title="amanda diff", sections=[section]))


def charts(rows: Sequence[Mapping[str, Any]], tolerance: float) -> Iterator[Chart]:
    """Yield the relative errors along the run, those beyond the tolerance as a series of their
    own."""
    if not rows:
        return
    errors = [row["relative_error"] for row in rows]
    kinds = {"within the tolerance": True, "beyond": False}
    yield Chart(
        title=f"relative error along the run; the tolerance is {tolerance:g}",
        kind="points",
        labels=range(len(rows)),
        values={
            name: [
                error if bool(row["agrees"]) is agrees else None
                for error, row in zip(errors, rows, strict=True)
            ]
            for name, agrees in kinds.items()
        },
        names=[f"{row['id']} {row['tensor']}, step {row['step']}" for row in rows],
        axis="tensors in the order of the run",
        log=True,
    )


def _mark(row: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    is_first = first is not None and all(row[key] == first[key] for key in ("id", "tensor", "step"))
    return "first" if is_first else "" if row["agrees"] else "bad"
