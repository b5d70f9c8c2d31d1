"""The rows of tables of results: of one tool, operator, figure and window of steps each.

:func:`rows_of` gives those since the last call, :func:`write_rows` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from amanda.files import new_beside

COLUMNS = {
    **dict.fromkeys(("run", "host"), "VARCHAR"),
    "attempt": "INTEGER",
    "step": "BIGINT",
    **dict.fromkeys(("op_id", "type", "direction", "phase", "module", "figure"), "VARCHAR"),
    "count": "BIGINT",
    **dict.fromkeys(("sum", "min", "max", "sum_squares"), "DOUBLE"),
    "histogram": "MAP(DOUBLE, BIGINT)",
}
"""The columns and their types; a part of a rank has its ``rank`` in its path."""

_OF_OP = ("type", "direction", "phase", "module")
_OF_SAMPLES = ("count", "sum", "min", "max", "sum_squares", "histogram")

Row = Mapping[str, Any]
Sums = dict[tuple[str, str], tuple[float | None, int]]
"""By operator and figure the last known sum, and the steps that had ended then."""


def rows_of(
    rows: Iterable[Row],
    figures: Sequence[str],
    ended: int,
    before: Sums,
    began: int = 0,
) -> Iterator[Row]:
    """Convert rows of a tool to those of a table.

    Args:
        rows: as of :meth:`~amanda.tools.reporting.ReportingTool.window_rows`.
        figures: the figures that add up; without any each number is a sample.
        ended: the steps of the run that have ended.
        before: what was known in the last window, which is updated. What was in none counts from
            the begin of the tools, such as times of a graph, which are known at its end.
        began: the steps that had ended when the tools began.
    """
    for row in rows:
        about = {"op_id": row.get("id"), **{key: row.get(key) for key in _OF_OP}}
        if "figure" in row:
            samples = {key: row.get(key) for key in _OF_SAMPLES}
            yield {**about, "figure": row["figure"], **samples}
            continue
        # Of several rows of an operator the tensor tells them apart.
        prefix = f"{row['tensor']}." if isinstance(row.get("tensor"), str) else ""
        for name in figures or row:
            value, figure = _number(row.get(name)), prefix + name
            if figures:
                place = str(row.get("id")), figure
                (earlier, since), before[place] = before.get(place, (0.0, 0)), (value, ended)
                amount = None if value is None or earlier is None else value - earlier
                steps = ended - max(since, began)
                yield {**about, "figure": figure, "count": steps or None, "sum": amount}
            elif value is not None:
                ends = dict.fromkeys(("sum", "min", "max"), value)
                yield {**about, "figure": figure, "count": 1, **ends, "sum_squares": value * value}


def _number(value: Any) -> float | None:
    """A number that a column can hold; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def write_rows(path: Path, rows: Sequence[Row], common: Row) -> None:
    """Write rows as a file that is complete or not there.

    Args:
        path: the file.
        rows: the rows.
        common: values that all rows have.

    Raises:
        OSError: it cannot be written.
        duckdb.Error: the same, or there is no memory for it.
    """
    kinds = {name: kind for name, kind in COLUMNS.items() if name not in common}
    values = [f"{quoted(value)}::{COLUMNS[name]} AS {name}" for name, value in common.items()]
    # Without threads of DuckDB, which a fork would not survive.
    with new_beside(path) as partial, duckdb.connect(config={"threads": 1}) as connection:
        create_table(connection, "part", kinds, rows)
        connection.execute(copy_to(partial, f"SELECT {', '.join([*values, '*'])} FROM part"))


def create_table(
    connection: duckdb.DuckDBPyConnection, name: str, kinds: Mapping[str, str], rows: Sequence[Row]
) -> None:
    """Create a table with the values of rows.

    Args:
        connection: to DuckDB.
        name: of the table.
        kinds: the columns and their types.
        rows: the rows; what one lacks, or its type cannot hold, is null.
    """
    columns = {key: _texts([row.get(key) for row in rows]) for key in kinds}
    connection.register("given", columns)
    values = ", ".join(f"try_cast({key} AS {kind}) AS {key}" for key, kind in kinds.items())
    connection.execute(f"CREATE TABLE {name} AS SELECT {values} FROM given")
    connection.unregister("given")


def copy_to(path: Path | str, query: str) -> str:
    """The statement that writes the answer to a query as a compressed file."""
    return f"COPY ({query}) TO {quoted(path)} (FORMAT parquet, COMPRESSION zstd)"


def quoted(value: Any) -> str:
    """A value as text of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def _texts(values: list[Any]) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = [value if value is None else _text(value) for value in values]
    return found


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={count}" for key, count in value.items()) + "}"
    # A lone surrogate stands for an undecodable byte of a name, and is not UTF-8.
    return str(value).encode("utf-8", "backslashreplace").decode()
