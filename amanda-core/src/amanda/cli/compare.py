"""``amanda compare``: the results of two runs side by side, as text or as a page.

Figures are compared by their names in the results of the tools that both runs have; no tool is
known by its name here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.cli import pages
from amanda.cli.merge import is_number
from amanda.cli.messages import CommandParser, complain
from amanda.errors import AmandaError, FileError
from amanda.files import read_result
from amanda.python.text import printable
from amanda.results import RunReport, Table, ToolReport, plural
from amanda.tools.reporting import plain_text

_PAGE = Path("amanda-compare.html")

_NO_FIGURES = frozenset({"phases", "min", "max"})
"""Keys of a summary that repeat other figures: sums of rows, ranges of a figure."""

_PLACE = ("id", "kind", "tensor", "step", "rank")
"""Keys that tell the rows of a tool apart."""

_NOT_COMPARED = frozenset({"id", "order", "source", "tensor"})
"""Keys that name an operator or tensor, or depend on its place in the run or file."""

_TIMES = frozenset({"seconds", "host_us"})
"""Keys of rows of times, which always differ."""

_Pairs = Mapping[str, Sequence[Mapping[str, Any]]]
"""The results of both runs by tool."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if the results cannot be compared."""
    parser = CommandParser(
        prog="amanda compare", description="Compare the results of two runs, written with -o."
    )
    for run in "AB":
        parser.add_argument(run, type=Path, help=f"folder of the results of run {run}")
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


def compare(*folders: Path) -> RunReport:
    """The contents of the page of two runs; its section has the tables of the comparison.

    Args:
        folders: the folder of the results of run A, and of run B.

    Raises:
        FileError: a file cannot be read, a folder has no results, or the runs have no tool in
            common.
    """
    one, other = map(_read, folders)
    pairs = {name: (one[name], other[name]) for name in one if name in other}
    if not pairs:
        tools = f"{folders[0]} ({', '.join(one)}) and {folders[1]} ({', '.join(other)})"
        raise FileError(f"{tools} have no tool in common")
    title = " and ".join(f"{path} ({run})" for path, run in zip(folders, "AB", strict=True))
    tables = [_figures(title, pairs), _operators(pairs)]
    runs = [
        [ToolReport(name=f"{name} {run}", result=results[name]) for name in pairs]
        for run, results in (("A", one), ("B", other))
    ]
    facts = {"A": pages.namespaces(one.values()), "B": pages.namespaces(other.values())}
    for operator, values in tables[-1].rows[:1]:
        facts["first difference"] = f"{operator}, {values}"
    compared = ToolReport(name="comparison", tables=tables)
    return RunReport(title=title, facts=facts, tools=[compared], runs=runs)


def _read(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The results in a folder, by the names of the files."""
    paths = [path for path in sorted(folder.glob("*.json")) if ".timeline." not in path.name]
    found = {path.stem: result for path in paths if (result := read_result(path))}
    if not found:
        raise FileError(f"{folder} is no folder with results of reporting tools (amanda run -o)")
    return found


def _figures(title: str, pairs: _Pairs) -> Table:
    """The figures of the summaries that differ."""
    rows, count = [], 0
    for tool, results in pairs.items():
        figures = _side_by_side(*({"schema": r["schema"], **r["summary"]} for r in results))
        count += len(figures)
        for name, (a, b) in figures.items():
            if a != b:
                ratio = f"{b / a:.3g}" if a and is_number(a) and is_number(b) else ""
                rows.append((f"{tool}: {name}", _text(a), _text(b), ratio))
    title = f"{title}: {len(rows):,} of {plural(count, 'figure')} not equal"
    return Table(title, ("figure", "A", "B", "B / A"), rows, limit=16)


def _side_by_side(*values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The figures of two summaries, or of two rows, by name; None for a missing one."""
    ours, theirs = (dict(_flat(each)) for each in values)
    return {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield numbers, words and shapes, and the ids of operators that a summary names, by name."""
    of_step = values.get("per_step")
    # Runs may have more or fewer steps.
    left_out = _NOT_COMPARED.union(of_step if isinstance(of_step, Mapping) else ())
    for key, value in values.items():
        name = f"{before}{key.replace('_', ' ')}"
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {f"{number}": item for number, item in enumerate(value)}
        if key in left_out:
            continue
        if isinstance(value, Mapping) and "id" in value:
            yield name, value["id"]
        elif isinstance(value, Mapping) and not (key in _NO_FIGURES or key.startswith("by_")):
            yield from _flat(value, f"{name}: ")
        elif _is_figure(value):
            yield name, value


def _is_figure(value: Any) -> bool:
    is_shape = isinstance(value, list) and not any(isinstance(item, str) for item in value)
    return is_shape or is_number(value) or isinstance(value, (str, bool))


def _text(value: Any) -> str:
    if is_number(value):
        is_whole = isinstance(value, int) or abs(value) >= 1000
        return f"{round(value):,}" if is_whole else f"{value:.6g}"
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return "-" if value is None else str(value)


def _operators(pairs: _Pairs) -> Table:
    """The operators that differ, each with its first figure, shape or attribute that does."""
    found: dict[str, str] = {}
    for ours, theirs in (map(_by_place, results) for results in pairs.values()):
        for place in {**ours, **theirs}:
            figures = _side_by_side(ours.get(place, {}), theirs.get(place, {})).items()
            unequal = (f"{n}: {_text(a)} → {_text(b)}" for n, (a, b) in figures if a != b)
            found[place[0]] = found.get(place[0]) or next(unequal, "")
    rows = [row for row in found.items() if row[1]]
    title = (
        f"{len(rows):,} of {plural(len(found), 'operator')} not equal" if found else "no operators"
    )
    return Table(title, ("operator", "A → B"), rows, limit=8)


def _by_place(result: Mapping[str, Any]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The rows of a result by operator and tensor, without rows of times."""
    rows = [row for row in result["ops"] if not _TIMES & row.keys()]
    # Operators that initialise a model come last: they differ wherever the model does.
    rows.sort(key=lambda row: row.get("phase") == "setup")
    return {tuple(str(row.get(key)) for key in _PLACE): row for row in rows}
