"""Rows of results as CSV files.

Names of modules and operators are the program's: one that begins like a formula would be computed
by the spreadsheet that opens the file, and is written with an apostrophe before it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.files import replaced

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that spreadsheets take for formulas."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a line per row, with a column for each key that any row has.

    Raises:
        OSError: the file cannot be written; an earlier one is as it was.
    """
    rows = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_table(path, columns, ([row.get(key) for key in columns] for row in rows))


def _flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the figures of ``per_step`` as columns of their own."""
    if "per_step" not in row:
        return row
    found = {key: value for key, value in row.items() if key != "per_step"}
    return {**found, **{f"{name}_per_step": value for name, value in row["per_step"].items()}}


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a heading and a line per row.

    Raises:
        OSError: the file cannot be written; an earlier one is as it was.
    """
    with replaced(path) as file:
        writer = csv.writer(file)
        writer.writerow([_cell(name) for name in columns])
        writer.writerows([_cell(value) for value in row] for row in rows)


def _cell(value: Any) -> Any:
    """Put an apostrophe before a text that begins like a formula; numbers stay."""
    if isinstance(value, list):
        value = " ".join(map(_item, value))
    text = value if value is None or isinstance(value, (int, float)) else str(value)
    is_formula = isinstance(text, str) and text.startswith(_FORMULA) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _item(item: Any) -> str:
    """Format an item of a list; a tensor as ``float32[2,3]``."""
    if isinstance(item, Mapping) and "shape" in item:
        shape = "?" if item["shape"] is None else ",".join(map(str, item["shape"]))
        return f"{item.get('dtype', '')}[{shape}]"
    return "-" if item is None else str(item)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text[0] not in "\t\r"
