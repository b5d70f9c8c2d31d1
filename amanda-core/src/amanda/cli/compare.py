"""``amanda compare``: the results of two runs side by side, as text or as a page.

Figures are compared by their names in the results of the tools that both runs have; no tool is
known by its name here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from amanda.cli import pages
from amanda.cli.merge import is_common, is_number
from amanda.cli.messages import CommandParser, complain
from amanda.errors import AmandaError, FileError
from amanda.files import read_json
from amanda.python.text import printable
from amanda.results import RunReport, Table, ToolReport, plural
from amanda.tools.reporting import plain_text

_PAGE = Path("amanda-compare.html")

_NO_FIGURES = frozenset({"phases", "min", "max"})
"""Keys of a summary that repeat other figures: sums of rows, ranges of a figure."""

_PLACE = ("id", "kind", "tensor", "step")
"""Keys that tell the rows of a tool apart."""

_NOT_COMPARED = frozenset({"order", "source"})
"""Keys of a row that change with what stands before the operator, in the run or in a file."""

_Result = Mapping[str, Any]
_Pairs = Mapping[str, tuple[_Result, _Result]]
"""The results of both runs by tool."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if the results cannot be compared."""
    parser = CommandParser(
        prog="amanda compare",
        description="Compare the results of two runs: folders of amanda run -o, or files in them.",
    )
    for run in "AB":
        parser.add_argument(run, type=Path)
    parser.add_argument("--full", action="store_true", help="print all rows")
    parser.add_argument(
        "--html", nargs="?", const=_PAGE, type=Path, metavar="FILE", help=f"write a page ({_PAGE})"
    )
    given = parser.parse_args(arguments)
    try:
        report = compare(given.A, given.B)
        if given.html is not None:
            pages.check_page(given.html)
            pages.write_page(given.html, report)
    except (AmandaError, OSError) as error:
        complain(f"error: {error}")
        return 2
    for table in report.tools[0].tables:
        print(plain_text(table, given.full))
    if given.html is not None:
        print(printable(f"amanda: wrote {given.html}"))
    return 0


def compare(ours: Path, theirs: Path) -> RunReport:
    """The contents of the page of two runs; its first section has the tables of the comparison.

    Args:
        ours: a folder of results, or the result file of one tool: run A.
        theirs: the same of run B.

    Raises:
        FileError: a file cannot be read or is no result, or the runs have no tool in common.
    """
    one, other = _read(ours), _read(theirs)
    pairs = {name: (one[name], other[name]) for name in one if name in other}
    if not pairs:
        tools = f"{ours} ({', '.join(one)}) and {theirs} ({', '.join(other)})"
        raise FileError(f"{tools} have no tool in common")
    title = f"{ours} (A) and {theirs} (B)"
    tables = [_figures(title, pairs), _of_one_alone(pairs), _first_differences(pairs)]
    facts = {"A": _about(ours, one), "B": _about(theirs, other)}
    compared = ToolReport(name="comparison", tables=tables)
    a, b = ([ToolReport(name=name, result=run[name]) for name in pairs] for run in (one, other))
    return RunReport(title=title, facts=facts, tools=[compared, *a], other=b)


def _read(path: Path) -> Mapping[str, _Result]:
    """The results in a folder, or in a file, by the tool's name in the run."""
    is_folder = path.is_dir()
    files = sorted(path.glob("*.json")) if is_folder else [path]
    results = {file: read_json(file) for file in files if ".timeline." not in file.name}
    # A file may have been renamed; a folder may have count.json and count-2.json.
    found = {f.stem if is_folder else r["tool"]: r for f, r in results.items() if is_common(r)}
    if not found:
        raise FileError(f"{path} has no results of amanda run -o")
    return found


def _about(path: Path, results: Mapping[str, _Result]) -> str:
    written = datetime.fromtimestamp(path.stat().st_mtime)
    return f"{path}, {pages.namespaces(results.values())}, {written:%Y-%m-%d %H:%M}"


def _figures(title: str, pairs: _Pairs) -> Table:
    """The figures of the summaries that differ."""
    rows, equal = [], 0
    for tool, results in pairs.items():
        ours, theirs = (dict(_flat(result["summary"])) for result in results)
        for name in {**ours, **theirs}:
            a, b = ours.get(name), theirs.get(name)
            equal += a == b
            if a != b:
                ratio = f"{b / a:.3g}" if a and is_number(a) and is_number(b) else ""
                rows.append((tool, name, _text(a), _text(b), ratio))
    title = f"{title}: {plural(len(rows), 'figure')} of {len(rows) + equal:,} not equal"
    return Table(title, ("tool", "figure", "A", "B", "B / A"), rows, limit=30)


def _flat(summary: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a summary, and the ids of the operators that it names."""
    for key, value in summary.items():
        name = f"{before}{key.replace('_', ' ')}"
        if is_number(value):
            yield name, value
        elif isinstance(value, Mapping) and "id" in value:
            yield name, str(value["id"])
        elif isinstance(value, Mapping) and not (key in _NO_FIGURES or key.startswith("by_")):
            yield from _flat(value, f"{name}: ")


def _text(value: Any) -> str:
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if isinstance(value, list) and all(isinstance(t, Mapping) and "shape" in t for t in value):
        return ", ".join(f"{t['shape']} {t.get('dtype', '')}".rstrip() for t in value)
    return "-" if value is None else str(value)


def _of_one_alone(pairs: _Pairs) -> Table:
    """The modules and operators that only one of the runs has."""
    rows: list[tuple[str, ...]] = []
    for kind, key in (("module", "module"), ("operator", "id")):
        names = [
            dict.fromkeys(str(row.get(key)) for result in run for row in result["ops"])
            for run in zip(*pairs.values(), strict=True)
        ]
        for run, mine, others in zip("AB", names, reversed(names), strict=True):
            rows += [(name, kind, run) for name in mine if name not in others]
    title = f"modules and operators of one run alone: {len(rows):,}"
    return Table(title, ("name", "kind", "run"), rows)


def _first_differences(pairs: _Pairs) -> Table:
    """The first difference in the rows of each tool, in the order of run A."""
    rows: list[tuple[str, ...]] = []
    for tool, results in pairs.items():
        ours, theirs = map(_by_place, results)
        found = (
            (tool, place[0], key, _text(row[key]), _text(theirs[place].get(key)))
            for place, row in ours.items()
            for key in (row.keys() if place in theirs else ())
            if key not in _NOT_COMPARED and row[key] != theirs[place].get(key)
        )
        rows += itertools.islice(found, 1)
    title = "first difference in an operator of both runs" + ("" if rows else ": none")
    return Table(title, ("tool", "operator", "figure", "A", "B"), rows)


def _by_place(result: _Result) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The rows of a result by operator and tensor, without rows of times, which always differ."""
    rows = [row for row in result["ops"] if "seconds" not in row]
    return {tuple(str(row.get(key)) for key in _PLACE): row for row in rows}
