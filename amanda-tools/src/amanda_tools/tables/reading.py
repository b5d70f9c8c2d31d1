"""Tables of results of all ranks, merged and asked: :func:`merge`, :func:`query`.

What cannot be read is left out and named.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import duckdb

from amanda.errors import AmandaError, FileError
from amanda.files import (
    TemporaryFolder,
    new_beside,
    parse_json,
    read_json,
    read_result,
    result_files,
    sweep_runs,
)
from amanda.results import RunReport, Table, ToolReport, listed
from amanda_tools.tables.rows import COLUMNS, copy_to, create_table, quoted, rows_of, write_rows
from amanda_tools.tables.views import VIEWS
from amanda_tools.tables.writing import PART, SCHEMA

_T = TypeVar("_T")
_Errors = tuple[type[Exception], ...]

_MEMORY = "400MB"
"""Of DuckDB, which writes what is more to a temporary folder; Python and the code are beside it."""

THREADS = min(4, os.cpu_count() or 1)
"""Of DuckDB; each of more threads needs a part of the memory."""

_MOST_ROWS = 10_000
"""Rows of an answer that are printed."""

_MOST_SHOWN = 1000
"""Rows of a view on a page."""

_CLOCKS = 1.0
"""Seconds by which clocks may differ."""

_IN_SQL: _Errors = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)
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
    with _opened(folder, merged=False) as tables:
        names = [name for name, files in tables.files.items() if PART.fullmatch(files[0])]
        for name in names:
            tables.try_again(partial(_write, tables, folder, name))
        # Of some tables all files may be damaged.
        names = [name for name in names if name in tables.files]
        if not names:
            raise TablesError(f"{folder} has no parts of ranks; {'; '.join(tables.problems)}")
        return [f"{name}.parquet" for name in names], tables.problems


def _write(tables: _Tables, folder: str, name: str) -> None:
    if name not in tables.files:
        return
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
        tables.try_again(tables.create_views)
        answer = partial(_select, tables, sql) if sql else partial(_contents, tables)
        return tables.try_again(answer, _IN_SQL), tables.problems


def _select(tables: _Tables, sql: str) -> Table:
    cursor = tables.connection.execute(sql)
    columns = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchmany(_MOST_ROWS)
    more = cursor.fetchone() is not None
    title = f"the first {_MOST_ROWS} rows; LIMIT or an aggregate gives others" if more else ""
    return Table(title or f"{len(rows)} rows", columns, rows)


def report(folder: str) -> RunReport:
    """The contents of a page: a section "ranks" with the views of each table and figure.

    Raises:
        TablesError: there are no tables.
    """
    with _opened(folder) as tables:
        if not tables.views:
            raise TablesError(f"{folder} is of a sweep; a page is about one of its runs")
        tables.try_again(tables.create_views)
        shown = tables.try_again(partial(_shown, tables))
        about = "The ranks of a run side by side, in a step or of the mean of samples."
        ranks = ToolReport(name="ranks", about=about, tables=shown, lost=tables.problems)
        return RunReport(title=f"amanda merge {folder}", facts={"folder": folder}, tools=[ranks])


def _shown(tables: _Tables) -> list[Table]:
    """The answers of the views for each table and figure, with their first rows."""
    found = []
    for name in tables.files:
        for (figure,) in tables.rows(f'SELECT DISTINCT figure FROM "{name}" ORDER BY figure'):
            for view, (about, _) in tables.views.items():
                call = f"FROM {view}({quoted(name)}, {quoted(figure)}) LIMIT {_MOST_SHOWN}"
                table = _select(tables, call)
                found.append(attrs.evolve(table, title=f"{name}, {figure}: {about}"))
    return found


def _contents(tables: _Tables) -> Table:
    """What can be asked: the tables with their figures, and the views."""
    rows = []
    for name in tables.files:
        about = f'SELECT count(*), count(DISTINCT rank), list(DISTINCT figure) FROM "{name}"'
        count, ranks, figures = tables.rows(about)[0]
        rows.append((name, count, ranks, " ".join(sorted(figures))))
    views = tables.views.items()
    rows += [(f"{name}('table', 'figure')", "", "", about) for name, (about, _) in views]
    return Table("tables of results", ("table", "rows", "ranks", "figures"), rows)


@attrs.define(eq=False)
class _Tables:
    """The tables of a folder.

    Attributes:
        connection: to DuckDB.
        files: of each table.
        problems: what is left out, a line for each.
        views: those that are ready; none of a sweep, whose runs have ranks of their own.
        options: columns of a sweep, which its paths have.
    """

    connection: duckdb.DuckDBPyConnection
    files: dict[str, list[str]] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    views: Mapping[str, tuple[str, str]] = attrs.field(factory=lambda: VIEWS)
    options: Sequence[str] = ()

    def source(self, name: str) -> str:
        """The rows of a table in SQL; of a sweep with its options."""
        files = ", ".join(map(quoted, self.files[name]))
        columns = ["rank", *(f"{column}::{kind} AS {column}" for column, kind in COLUMNS.items())]
        if PART.fullmatch(self.files[name][0]):
            reading = "hive_partitioning = true, hive_types = {rank: INTEGER}"
            columns += [f'"{option}"' for option in self.options]
        else:
            reading = "hive_partitioning = false"
            columns.append(f"* EXCLUDE (rank, {', '.join(COLUMNS)})")
        return f"(SELECT {', '.join(columns)} FROM read_parquet([{files}], {reading}))"

    def rows(self, query: str) -> list[Any]:
        """The rows of the answer to a query."""
        return self.connection.execute(query).fetchall()

    def create_views(self) -> None:
        """Create a view with the name of each table."""
        for name in self.files:
            view = f'CREATE OR REPLACE VIEW "{name}" AS FROM {self.source(name)}'
            self.connection.execute(view)

    def try_again(self, act: Callable[[], _T], mistakes: _Errors = ()) -> _T:
        """Do something with the tables; if files cannot be read, once more without them.

        Args:
            act: what to do.
            mistakes: errors that no file is to blame for.

        Raises:
            TablesError: something else is wrong.
        """
        try:
            return act()
        except duckdb.Error as error:
            if isinstance(error, mistakes):
                raise TablesError(_line(error)) from None
        self._drop_damaged()
        try:
            return act()
        except duckdb.Error as error:
            raise TablesError(_line(error)) from None

    def _drop_damaged(self) -> None:
        """Leave out the files of which not all values can be read.

        Raises:
            TablesError: no others are left.
        """
        # A count or a minimum may come from the statistics of the file.
        values = ", ".join(f"{column}::{kind}" for column, kind in COLUMNS.items())
        for name, files in list(self.files.items()):
            for file in files[:]:
                rank = "" if PART.fullmatch(file) else ", rank"
                every = f"SELECT bit_xor(hash({values}{rank})) FROM read_parquet($1)"
                try:
                    self.connection.execute(every, [[file]]).fetchall()
                except duckdb.Error as error:
                    files.remove(file)
                    self.problems.append(f"{file} is left out: {_line(error)}")
            if not files:
                del self.files[name]
        if not self.files:
            raise TablesError(f"no table can be read: {'; '.join(self.problems)}")
        self.create_views()


def _line(error: BaseException) -> str:
    """A message of DuckDB in one line, without the picture of the query."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())


@contextlib.contextmanager
def _opened(folder: str, *, merged: bool = True) -> Iterator[_Tables]:
    """The tables of a folder, or of the URL of one or of a single table.

    Args:
        folder: the folder.
        merged: whether a merged table stands for parts that have not changed since.

    Raises:
        TablesError: there are none.
    """
    spill = TemporaryFolder("tables")
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MEMORY,
        "temp_directory": str(spill.path),
        "threads": THREADS,
        "preserve_insertion_order": False,
        # A name in a query is a table, and no variable here.
        "python_enable_replacements": False,
    }
    try:
        with duckdb.connect(config=settings) as connection:
            tables = _Tables(connection)
            _find(tables, folder, spill.path, merged=merged)
            if not tables.files:
                why = "; ".join(tables.problems) or "no <tool>/rank=<n>, <tool>.parquet or .json"
                raise TablesError(f"{folder} has no tables of results: {why}")
            for name, (_, text) in tables.views.items():
                connection.execute(f"CREATE MACRO {name}(of_table, of_figure) AS TABLE {text}")
            yield tables
    except duckdb.Error as error:
        raise TablesError(_line(error)) from None
    finally:
        spill.remove()


def _find(tables: _Tables, folder: str, spare: Path, *, merged: bool) -> None:
    """Find the files of the tables: parts of ranks, else merged tables, else JSON."""
    if folder.endswith(".parquet"):
        tables.files[Path(folder).stem] = [folder]
        _add_ranks(tables, [])
        return
    runs, base = {"": folder}, Path(folder)
    if "://" not in folder:
        found = sweep_runs(base) or [base]
        runs = {"/".join((*run.relative_to(base).parts, "")): run.as_posix() for run in found}
    if "" not in runs:
        tables.views = {}
        parts = next(iter(runs)).rstrip("/").split("/")
        tables.options = [part.partition("=")[0] for part in parts]
    ranks: list[dict[str, Any]] = []
    for place, run in runs.items():
        _find_run(tables, run, place, spare, ranks)
    _add_ranks(tables, ranks)
    for path in _glob(tables, folder, "*.parquet"):
        name = Path(path).stem
        if name not in tables.files or (merged and _is_newest(path, tables.files[name])):
            tables.files[name] = [path]


def _find_run(
    tables: _Tables, folder: str, place: str, spare: Path, ranks: list[dict[str, Any]]
) -> None:
    """Add the parts of the ranks of a run, or its JSON.

    Args:
        folder: of the run.
        place: the same within a sweep, "" without one.
        spare: a folder for parts of JSON.
        ranks: gets a row for each header.
    """
    headers: dict[str, dict[int, Any]] = collections.defaultdict(dict)
    for path in _glob(tables, folder, "*/rank=*/header.json"):
        tool, rank = path.split("/")[-3], path.split("=")[-1].split("/")[0]
        try:
            headers[tool][int(rank)] = _header(tables, path)
        except (AmandaError, ValueError) as error:
            tables.problems.append(str(error))
    names = set()
    for path in sorted(_glob(tables, folder, "*/rank=*/part-*.parquet")):
        if found := PART.fullmatch(path):
            name = path.split("/")[-3]
            header = headers[name].setdefault(int(found["rank"]), {})
            if int(found["number"]) >= header.get("first_part", 0):
                tables.files.setdefault(name, []).append(path)
                names.add(name)
            else:
                header["earlier"] = header.get("earlier", 0) + 1
    if "://" not in folder:
        _read_results(tables, headers, Path(folder), spare / place, names)
    for name, of_ranks in headers.items():
        tables.problems += (f"{place}{name}: {problem}" for problem in _compare(of_ranks))
        for number, header in of_ranks.items():
            if rank := header.get("rank"):
                known = {"tool": name, "rank": number, "mesh": _mesh(rank)}
                ranks.append({**header, **rank, **known})


def _is_newest(path: str, others: Iterable[str]) -> bool:
    """True if a file of this machine was written after others."""
    if "://" in path:
        return False
    return os.stat(path).st_mtime_ns > max(os.stat(other).st_mtime_ns for other in others)


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
    counts = [h["rank"].get("count") for h in headers.values() if "rank" in h]
    known = {count for count in counts if type(count) is int}
    if missing := set(range(min(max(known, default=0), 1_000_000))) - headers.keys():
        yield f"no table of rank {listed(missing)}"
    if len(known) > 1:
        yield f"the tables are of runs with {' and '.join(map(str, sorted(known)))} ranks"
    if without := [rank for rank, header in headers.items() if "rank" not in header]:
        yield f"no header of rank {listed(without)}"
    for what in ("tool_schema", "versions"):
        if len({str(h[what]) for h in headers.values() if what in h}) > 1:
            yield f"the tables are of different versions ({what} in their headers)"
    if lost := [rank for rank, header in headers.items() if header.get("rows_dropped")]:
        yield f"rows were not written on rank {listed(lost)}"
    if earlier := [rank for rank, header in headers.items() if header.get("earlier")]:
        yield f"parts of an earlier run, which had ended, are left out on rank {listed(earlier)}"
    clocks = [h.get("clock_offset") for h in headers.values()]
    offsets = [offset for offset in clocks if isinstance(offset, (int, float))]
    if offsets and max(offsets) - min(offsets) > _CLOCKS:
        yield f"clocks differ by {max(offsets) - min(offsets):.0f} s, see clock_offset of headers"


def _add_ranks(tables: _Tables, rows: list[dict[str, Any]]) -> None:
    """Create the table ``ranks``: what is known of each rank, with its coordinates in meshes."""
    kinds = {
        **dict.fromkeys(("tool", "run", "host"), "VARCHAR"),
        **dict.fromkeys(("rank", "attempt", "first_step", "last_step", "rows_dropped"), "BIGINT"),
        "clock_offset": "DOUBLE",
        "has_ended": "BOOLEAN",
        "mesh": "MAP(VARCHAR, BIGINT)",
    }
    create_table(tables.connection, "ranks", kinds, rows)


def _mesh(place: Mapping[str, Any]) -> Mapping[str, int]:
    """The coordinates of a rank by axis."""
    found = place.get("mesh")
    axes = found.items() if isinstance(found, Mapping) else ()
    return {name: n for name, n in axes if name.isidentifier() and type(n) is int}


def _read_results(
    tables: _Tables,
    headers: dict[str, dict[int, Any]],
    folder: Path,
    spare: Path,
    others: Collection[str],
) -> None:
    """Add the results in JSON of tools that have no tables, as `others` do, and the places of their
    ranks."""
    found: dict[str, dict[int | None, Path]] = collections.defaultdict(dict)
    for name, rank, path in result_files(folder):
        tool = name.removesuffix(".json")
        if tool not in others and not (folder / f"{tool}.parquet").exists():
            found[tool][rank] = path
    for tool, paths in found.items():
        if len(paths) > 1:
            # That of all ranks repeats theirs.
            paths.pop(None, None)
        for rank, path in paths.items():
            try:
                result = read_result(path) or {"ops": ()}
                parts = list(_parts_of(result, rank or 0))
                for place in result.get("places", [result.get("rank")]):
                    if isinstance(place, dict):
                        headers[tool][int(place["number"])] = {"rank": place}
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                tables.problems.append(f"{path} is left out: {error}")
                continue
            for number, steps, rows in parts:
                part = spare / tool / f"rank={number}" / "part-0.parquet"
                part.parent.mkdir(parents=True, exist_ok=True)
                write_rows(part, rows, {"attempt": 0, "step": steps})
                tables.files.setdefault(tool, []).append(part.as_posix())


def _parts_of(
    result: Mapping[str, Any], rank: int
) -> Iterator[tuple[int, int, list[Mapping[str, Any]]]]:
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
