"""``amanda merge``: merges the result files of the ranks of a distributed run.

Under ``torchrun`` each rank writes ``<tool>-rank<n>.json``; :func:`merge` makes ``<tool>.json`` of
them. There a row carries its rank, and a figure of the summary has its value for each rank and, if
it is a number, their sum, minimum and maximum. The timelines of the ranks become one timeline with
a process for each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.cli import pages
from amanda.cli.messages import CommandParser, complain
from amanda.errors import AmandaError, FileError
from amanda.files import read_json, read_result, result_files, sweep_runs, write_json
from amanda.python.text import printable
from amanda.registry import plugins
from amanda.results import listed

_TIMELINE = ".timeline.json"

_MOST_RANKS = 1_000_000
"""A count of ranks beyond this is damage."""


class MergeError(Exception):
    """The files of the ranks cannot be merged."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if there is nothing to merge."""
    parser = CommandParser(
        prog="amanda merge",
        description="Merge the files that the ranks of a distributed run have written into DIR.",
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="merge the existing files if others are missing or damaged",
    )
    parser.add_argument("--html", action="store_true", help="write a page, DIR/report.html")
    given = parser.parse_args(arguments)
    left_out: list[str] = []
    try:
        names = _merge_tables(given.folder, left_out)
        if not names or any(Path(given.folder).glob("*-rank*.json")):
            written = merge(Path(given.folder), left_out if given.partial else None)
            names += [path.name for path in written]
        if given.html:
            page = pages.page_path(Path(given.folder), "")
            pages.check_page(page)
            report = plugins.table_store("amanda merge --html").report(given.folder)
            pages.write_page(page, report)
            names.append(page.name)
    except (MergeError, AmandaError, OSError) as error:
        complain(f"error: {error}")
        return 2
    for problem in left_out:
        complain(f"warning: {problem}")
    print(printable(f"amanda: wrote {', '.join(names)} in {given.folder}"))
    return 0


def _merge_tables(folder: str, left_out: list[str]) -> list[str]:
    """Merge the tables of the ranks, if there are any; the names of the files written.

    Raises:
        AmandaError: they cannot be read or written.
    """
    has_tables = "://" in folder or any(Path(folder).glob("*/rank=*"))
    if not has_tables and not sweep_runs(Path(folder)):
        return []
    names, problems = plugins.table_store("amanda merge").merge(folder)
    left_out += problems
    return [*names]


def merge(folder: Path, left_out: list[str] | None = None) -> list[Path]:
    """Merge the files of the ranks in a folder; they are not removed.

    Nothing is written unless everything can be merged.

    Args:
        folder: the output folder of the ranks.
        left_out: to merge what there is, a list to which each file that is missing or damaged is
            appended; None to refuse.

    Returns:
        The files written, ``<tool>.json`` and ``<tool>.timeline.json``.

    Raises:
        MergeError: the folder has no files of ranks, one of them is missing or cannot be read, or
            the results of the ranks have different schemas.
        OSError: a file cannot be written.
    """
    problems: list[str] = []
    groups = {
        name: _read_ranks(name, paths, problems)
        for name, paths in _find_ranks(folder, problems).items()
    }
    problems += _missing(groups)
    if left_out is not None:
        left_out += problems
    elif problems:
        raise MergeError(f"{'; '.join(problems)}; amanda merge --partial merges the others")
    merged = {
        name: (merge_timelines if name.endswith(_TIMELINE) else merge_results)(name, contents)
        for name, contents in groups.items()
        if contents
    }
    for name, content in merged.items():
        write_json(folder / name, content)
    return [folder / name for name in merged]


def _find_ranks(folder: Path, problems: list[str]) -> dict[str, dict[int, Path]]:
    """The files of the ranks by rank, by the name of the file that is made of them.

    Raises:
        MergeError: there are none.
    """
    groups: dict[str, dict[int, Path]] = {}
    for name, rank, path in result_files(folder):
        if rank is not None:
            known = groups.setdefault(name, {}).setdefault(rank, path)
            if known is not path:
                problems.append(f"{known.name} and {path.name} are of the same rank")
    if not groups:
        raise MergeError(f"{folder} has no files of ranks (<tool>-rank<n>.json)")
    return groups


def _read_ranks(name: str, paths: Mapping[int, Path], problems: list[str]) -> dict[int, Any]:
    """The contents of the files of one tool that can be read, by rank."""
    contents = {}
    read = read_json if name.endswith(_TIMELINE) else read_result
    for rank in sorted(paths):
        try:
            found = read(paths[rank])
            if found is None:
                raise FileError(f"{paths[rank]} does not have the common form of results")
            contents[rank] = found
        except FileError as error:
            problems.append(str(error))
    return contents


def _missing(groups: Mapping[str, Mapping[int, Any]]) -> Iterator[str]:
    """A line for each tool without the files of some ranks.

    The ranks are the ranks of all tools together, and the number of ranks in the results.
    """
    ranks = {rank for contents in groups.values() for rank in contents}
    counts = {_rank_count(c) for contents in groups.values() for c in contents.values()} - {None}
    if len(counts) > 1:
        yield f"the files are of runs with {' and '.join(map(str, sorted(counts)))} ranks"
    for count in counts:
        if too_high := sorted(rank for rank in ranks if rank >= count):
            yield f"rank {too_high[0]} is of another run than those with {count} ranks"
        ranks |= set(range(count))
    for name, contents in groups.items():
        if missing := ranks - contents.keys():
            yield f"{name} has no result of rank {listed(missing)}"


def _rank_count(result: Any) -> Any:
    """The number of ranks of the run that has written a result; None if it does not say so."""
    found = result.get("rank") if isinstance(result, Mapping) else None
    count = found.get("count") if isinstance(found, Mapping) else None
    return count if type(count) is int and 0 < count <= _MOST_RANKS else None


def merge_results(name: str, results: Mapping[int, Any]) -> dict[str, Any]:
    """Merge the results of one tool.

    Args:
        name: name of the merged file, for messages.
        results: the result of each rank.

    Raises:
        MergeError: they are not all of one tool and schema.
    """
    kinds = {(result["tool"], result["schema"]) for result in results.values()}
    if len(kinds) != 1:
        raise MergeError(f"{name}: the ranks' results are of different tools or versions")
    [(tool, schema)] = kinds
    summaries = {rank: result["summary"] for rank, result in results.items()}
    return {
        "tool": tool,
        "schema": schema,
        "ranks": list(results),
        "places": [result.get("rank") for result in results.values()],
        # Missing below the highest rank; results of `amanda run` know the number of ranks.
        "missing_ranks": [r for r in range(min(max(results), _MOST_RANKS)) if r not in results],
        "namespaces": sorted({n for result in results.values() for n in result["namespaces"]}),
        "summary": _merge_summaries(summaries),
        "ops": [{"rank": rank, **row} for rank, result in results.items() for row in result["ops"]],
    }


def _merge_summaries(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """For each figure its value by rank; for a number also sum, minimum and maximum."""
    figures = dict.fromkeys(key for summary in summaries.values() for key in summary)
    found: dict[str, Any] = {}
    for figure in figures:
        values = {rank: summary.get(figure) for rank, summary in summaries.items()}
        numbers: list[Any] = [value for value in values.values() if is_number(value)]
        found[figure] = {"by_rank": {str(rank): value for rank, value in values.items()}}
        if len(numbers) == len(values):
            # An integer that a float cannot hold cannot be added to one.
            is_exact = all(isinstance(number, int) for number in numbers)
            total = sum(numbers if is_exact else map(float, numbers))
            found[figure].update(sum=total, min=min(numbers), max=max(numbers))
    return found


def is_number(value: Any) -> bool:
    """True if a value of JSON can be added up with others."""
    # A bool is an int for Python; a sum of flags says nothing. JSON has integers of any length.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


def merge_timelines(name: str, timelines: Mapping[int, Any]) -> dict[str, Any]:
    """Merge timelines in Chrome's trace format into one with a process for each rank.

    The clocks of the ranks are not aligned: each timeline begins at its own zero.

    Args:
        name: name of the merged file, for messages.
        timelines: the timeline of each rank.

    Raises:
        MergeError: one has no ``traceEvents``.
    """
    events: list[dict[str, Any]] = []
    for rank, timeline in timelines.items():
        found = timeline.get("traceEvents") if isinstance(timeline, Mapping) else None
        if not isinstance(found, list) or not all(isinstance(e, Mapping) for e in found):
            raise MergeError(f"{name}: the timeline of rank {rank} has no list of events")
        named = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        events.append(named)
        events += [{**event, "pid": rank} for event in found]
    return {"displayTimeUnit": "ms", "traceEvents": events}
