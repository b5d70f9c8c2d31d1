"""Tables of results in Parquet, written and asked by DuckDB: of many ranks, and of long runs.

Each tool is a table, ``DIR/<tool>/rank=<R>/part-<N>.parquet``; the columns are in
:data:`~amanda_tools.tables.rows.COLUMNS`. The functions here are those of
:class:`~amanda.registry.hookspecs.TableStore`.
"""

from __future__ import annotations

from amanda_tools.tables.reading import merge, query, report
from amanda_tools.tables.writing import TableRecorder as record  # noqa: N813 - it makes one

__all__ = ["merge", "query", "record", "report"]
