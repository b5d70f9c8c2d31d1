"""Tables of results of all ranks, merged and asked: :func:`merge`, :func:`query`.

What cannot be read is left out and named.
"""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import duckdb

from amanda.errors import AmandaError, FileError
from amanda.files import TemporaryFolder, new_beside, parse_json, read_json
from amanda.results import Table
from amanda_tools.tables.rows import COLUMNS, copy_to, quoted, rows_of, write_rows
from amanda_tools.tables.views import VIEWS
from amanda_tools.tables.writing import PART, SCHEMA

_T = TypeVar("_T")

_MEMORY = "400MB"
"""Of DuckDB, which writes what is more to a temporary folder; Python and the code are beside it."""

_SHOWN = 8
"""Numbers of ranks in a message."""

_MOST_ROWS = 10_000
"""Rows of an answer that are printed."""

_CLOCKS = 1.0
"""Seconds by which clocks may differ."""

_JSON = re.compile(r"(?P<tool>.+?)(?:-rank(?P<rank>\d{1,9}))?\.json")

_IN_SQL = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)
"""Mistakes in a query."""


class TablesError(AmandaError):
    """There are no tables, or a query cannot be answered."""


def merge(folder: str) -> tuple[list[str], list[str]]:
    """Write ``<tool>.parquet`` for each tool with parts of ranks.

    Returns:
        The names of the files, and a line for what is left out.

    Raises:
        TablesError: there are no parts that can be read, or a file cannot be written.
    """
    with _opened(folder) as tables:
        names = [name for name, files in tables.files.items() if PART.fullmatch(files[0])]
        for name in names:
            tables.try_again(lambda name=name: _write(tables, folder, name))  # type: ignore[misc]
        if not names:
            raise TablesError(f"{folder} has no parts of ranks; {'; '.join(tables.problems)}")
        return [f"{name}.parquet" for name in names], tables.problems


def _write(tables: _Tables, folder: str, name: str) -> None:
    rows = f"FROM {tables.source(name)}"
    if "://" in folder:
        tables.connection.execute(copy_to(f"{folder}/{name}.parquet", rows))
        return
    with new_beside(Path(folder, f"{name}.parquet")) as partial:
        tables.connection.execute(copy_to(partial, rows))


def query(folder: str, sql: str) -> tuple[Table, list[str]]:
    """Answer a query, see :class:`~amanda.registry.hookspecs.TableStore`.

    Raises:
        TablesError: there are no tables, or the query is wrong.
    """
    with _opened(folder) as tables:
        found = tables.try_again(lambda: _answer(tables, sql))
        return found, tables.problems


def _answer(tables: _Tables, sql: str) -> Table:
    for name in tables.files:
        view = f'CREATE OR REPLACE VIEW "{name}" AS FROM {tables.source(name)}'
        tables.connection.execute(view)
    if not sql:
        return _contents(tables)
    cursor = tables.connection.execute(sql)
    columns = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchmany(_MOST_ROWS)
    more = cursor.fetchone() is not None
    title = f"the first {_MOST_ROWS} rows; LIMIT or an aggregate gives others" if more else ""
    return Table(title or f"{len(rows)} rows", columns, rows)


def _contents(tables: _Tables) -> Table:
    """What can be asked: the tables with their figures, and the views."""
    rows = []
    for name in tables.files:
        about = f'SELECT count(*), count(DISTINCT rank), list(DISTINCT figure) FROM "{name}"'
        count, ranks, figures = tables.connection.execute(about).fetchall()[0]
        rows.append((name, count, ranks, " ".join(sorted(figures))))
    views = [(f"{name}('table', 'figure')", "", "", about) for name, (about, _) in VIEWS.items()]
    return Table("tables of results", ("table", "rows", "ranks", "figures"), [*rows, *views])


@attrs.define(eq=False)
class _Tables:
    """The tables of a folder.

    Attributes:
        connection: to DuckDB.
        files: of each table.
        problems: what is left out, a line for each.
    """

    connection: duckdb.DuckDBPyConnection
    files: dict[str, list[str]] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)

    def source(self, name: str) -> str:
        """The rows of a table in SQL."""
        files = ", ".join(map(quoted, self.files[name]))
        options = "hive_partitioning = true, hive_types = {rank: INTEGER}"
        if not PART.fullmatch(self.files[name][0]):
            options = "hive_partitioning = false"
        columns = (f"{column}::{kind} AS {column}" for column, kind in COLUMNS.items())
        return f"(SELECT rank, {', '.join(columns)} FROM read_parquet([{files}], {options}))"

    def try_again(self, act: Callable[[], _T]) -> _T:
        """Do something with the tables; if a file is damaged, once more without it.

        Raises:
            TablesError: something else is wrong.
        """
        try:
            return act()
        except duckdb.Error as error:
            if isinstance(error, _IN_SQL) or not self._drop(self._is_damaged):
                raise TablesError(_line(error)) from None
        try:
            return act()
        except duckdb.Error as error:
            raise TablesError(_line(error)) from None

    def drop_unreadable(self) -> None:
        """Leave out the files that are no Parquet or have other columns."""
        every = [file for files in self.files.values() for file in files]
        try:
            columns = self._columns(every)
        except duckdb.Error:
            self._drop(lambda file: self._explain(file, self._columns([file])[file]))
        else:
            self._drop(lambda file: self._explain(file, columns[file]))

    def _columns(self, files: Sequence[str]) -> dict[str, set[str]]:
        names = "SELECT file_name, list(name) FROM parquet_schema($1) GROUP BY file_name"
        rows = self.connection.execute(names, [files]).fetchall() if files else ()
        return {file: {*columns} for file, columns in rows}

    def _explain(self, file: str, columns: set[str]) -> str:
        wanted = {*COLUMNS} - columns | ({"rank"} - columns if not PART.fullmatch(file) else set())
        return f"it has no column {', '.join(sorted(wanted))}" if wanted else ""

    def _is_damaged(self, file: str) -> str:
        # All values are read; a count or a minimum may come from the statistics of the file.
        values = ", ".join(f"{column}::{kind}" for column, kind in COLUMNS.items())
        every = f"SELECT bit_xor(hash({values})) FROM read_parquet($1)"
        self.connection.execute(every, [[file]]).fetchall()
        return ""

    def _drop(self, explain: Callable[[str], str]) -> int:
        """Leave out the files for which there is a reason or an error; returns how many."""
        dropped = 0
        for name, files in list(self.files.items()):
            for file in files[:]:
                try:
                    reason = explain(file)
                except duckdb.Error as error:
                    reason = _line(error)
                if reason:
                    files.remove(file)
                    dropped += 1
                    self.problems.append(f"{file} is left out: {reason}")
            if not files:
                del self.files[name]
        return dropped


def _line(error: BaseException) -> str:
    """A message of DuckDB in one line, without the picture of the query."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[_Tables]:
    """The tables of a folder, or of the URL of one or of a single table.

    Raises:
        TablesError: there are none.
    """
    spill = TemporaryFolder("tables")
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MEMORY,
        "temp_directory": str(spill.path),
        "threads": 2,
        "preserve_insertion_order": False,
    }
    try:
        with duckdb.connect(config=settings) as connection:
            tables = _Tables(connection)
            _find(tables, folder, spill.path)
            tables.drop_unreadable()
            if not tables.files:
                why = "; ".join(tables.problems) or "no <tool>/rank=<n>, <tool>.parquet or .json"
                raise TablesError(f"{folder} has no tables of results: {why}")
            for name, (_, text) in VIEWS.items():
                connection.execute(f"CREATE MACRO {name}(of_table, of_figure) AS TABLE {text}")
            yield tables
    except duckdb.Error as error:
        raise TablesError(_line(error)) from None
    finally:
        spill.remove()


def _find(tables: _Tables, folder: str, spare: Path) -> None:
    """Find the files of the tables: parts of ranks, else merged tables, else JSON."""
    if folder.endswith(".parquet"):
        tables.files[Path(folder).stem] = [folder]
        return
    headers: dict[str, dict[int, Any]] = collections.defaultdict(dict)
    for path in _glob(tables, folder, "*/rank=*/header.json"):
        tool, rank = path.split("/")[-3], path.split("=")[-1].split("/")[0]
        try:
            headers[tool][int(rank)] = _header(tables, path)
        except (AmandaError, ValueError) as error:
            tables.problems.append(str(error))
    for path in sorted(_glob(tables, folder, "*/rank=*/part-*.parquet")):
        if found := PART.fullmatch(path):
            name = path.split("/")[-3]
            header = headers[name].setdefault(int(found["rank"]), {})
            if int(found["number"]) >= header.get("first_part", 0):
                tables.files.setdefault(name, []).append(path)
            else:
                header["earlier"] = header.get("earlier", 0) + 1
    for name, of_ranks in headers.items():
        tables.problems += (f"{name}: {problem}" for problem in _compare(of_ranks))
    _add_ranks(tables, headers)
    for path in _glob(tables, folder, "*.parquet"):
        tables.files.setdefault(Path(path).stem, [path])
    if "://" not in folder:
        _read_results(tables, Path(folder), spare)


def _glob(tables: _Tables, folder: str, pattern: str) -> list[str]:
    if "://" not in folder:
        return [path.as_posix() for path in Path(folder).glob(pattern)]
    found = tables.connection.execute("SELECT file FROM glob($1)", [f"{folder}/{pattern}"])
    return [file for (file,) in found.fetchall()]


def _header(tables: _Tables, path: str) -> dict[str, Any]:
    """The header of a rank.

    Raises:
        FileError: it cannot be read, or is of another version.
    """
    if "://" in path:
        text = tables.connection.execute("SELECT content FROM read_text($1)", [path]).fetchall()
        header = parse_json(text[0][0], path)
    else:
        header = read_json(path)
    kinds = {"schema": int, "first_part": int, "rank": Mapping, "run": str, "attempt": int}
    if not isinstance(header, dict) or not all(isinstance(header.get(k), kinds[k]) for k in kinds):
        raise FileError(f"{path} is not the header of a table")
    if header["schema"] != SCHEMA:
        raise FileError(f"{path} is of version {header['schema']}, not {SCHEMA}: its rows may lack")
    return header


def _compare(headers: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the headers of a tool's ranks say of what is missing or does not fit."""
    counts = {h["rank"].get("count") for h in headers.values() if "rank" in h}
    known = [count for count in counts if type(count) is int]
    if missing := sorted(set(range(min(max(known, default=0), 1_000_000))) - headers.keys()):
        yield f"no table of {_ranks(missing)}"
    if len(known) > 1:
        yield f"the tables are of runs with {' and '.join(map(str, sorted(known)))} ranks"
    if without := [rank for rank, header in headers.items() if "rank" not in header]:
        yield f"no header of {_ranks(without)}"
    for what in ("tool_schema", "versions"):
        if len({str(h[what]) for h in headers.values() if what in h}) > 1:
            yield f"the tables are of different versions ({what} in their headers)"
    if lost := [rank for rank, header in headers.items() if header.get("rows_dropped")]:
        yield f"rows were not written on {_ranks(lost)}"
    if earlier := [rank for rank, header in headers.items() if header.get("earlier")]:
        yield f"parts of an earlier run, which had ended, are left out on {_ranks(earlier)}"
    clocks = [h.get("clock_offset") for h in headers.values()]
    offsets = [offset for offset in clocks if isinstance(offset, (int, float))]
    if offsets and max(offsets) - min(offsets) > _CLOCKS:
        yield f"clocks differ by {max(offsets) - min(offsets):.0f} s, see clock_offset of headers"


def _ranks(numbers: Iterable[int]) -> str:
    some = sorted(numbers)
    return f"rank {', '.join(map(str, some[:_SHOWN]))}{', ...' * (len(some) > _SHOWN)}"


def _add_ranks(tables: _Tables, headers: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """Create the table ``ranks``: what is known of each rank, with its coordinates in meshes."""
    tables.connection.execute(
        "CREATE TABLE ranks (tool VARCHAR, rank INTEGER, run VARCHAR, attempt INTEGER, "
        "host VARCHAR, clock_offset DOUBLE, first_step BIGINT, last_step BIGINT, "
        "rows_dropped BIGINT, has_ended BOOLEAN, mesh MAP(VARCHAR, INTEGER))"
    )
    names = ("run", "attempt", "host", "clock_offset", "first_step", "last_step", "rows_dropped")
    rows = [
        (tool, rank, *map(header.get, (*names, "has_ended")), header["rank"].get("mesh"))
        for tool, of_ranks in headers.items()
        for rank, header in of_ranks.items()
        if "rank" in header
    ]
    if rows:
        places = ", ".join("?" * 11)
        tables.connection.executemany(f"INSERT INTO ranks VALUES ({places})", rows)


def _read_results(tables: _Tables, folder: Path, spare: Path) -> None:
    """Add the results in JSON of tools that have no tables."""
    found: dict[str, dict[int, Path]] = collections.defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        if (name := _JSON.fullmatch(path.name)) and name["tool"] not in tables.files:
            found[name["tool"]][int(name["rank"] or -1)] = path
    for tool, paths in found.items():
        if len(paths) > 1:
            # That of all ranks repeats theirs.
            paths.pop(-1, None)
        for rank, path in paths.items():
            try:
                result = read_json(path)
                parts = list(_parts_of(result, max(rank, 0)))
            except (AmandaError, AttributeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, AmandaError):
                    tables.problems.append(str(error))
                continue
            for number, steps, rows in parts:
                part = spare / tool / f"rank={number}" / "part-0.parquet"
                part.parent.mkdir(parents=True, exist_ok=True)
                write_rows(part, rows, {"attempt": 0, "step": steps})
                tables.files.setdefault(tool, []).append(part.as_posix())


def _parts_of(result: Any, rank: int) -> Iterator[tuple[int, int, list[Mapping[str, Any]]]]:
    """Yield rank, steps and rows of a result in JSON, of a merged one for each of its ranks."""
    groups: dict[int, list[Any]] = collections.defaultdict(list)
    for row in result["ops"]:
        groups[int(row.get("rank", rank))].append({**row, "rank": None})
    for number, rows in groups.items():
        phases = _of_rank(result["summary"].get("phases"), number) or {}
        steps = _of_rank(result["summary"].get("steps"), number) or 0
        figures = [name for name in next(iter(phases.values()), ()) if name != "ops"]
        yield number, steps, list(rows_of(rows, figures, steps, {}))


def _of_rank(figure: Any, rank: int) -> Any:
    is_merged = isinstance(figure, Mapping) and "by_rank" in figure
    return figure["by_rank"].get(str(rank)) if is_merged else figure
