"""``amanda merge``: merges the result files of the ranks of a distributed run.

Under ``torchrun`` each rank writes ``<tool>-rank<n>.json``; :func:`merge` makes ``<tool>.json`` of
them. There a row carries its rank, and a figure of the summary has its value for each rank and, if
it is a number, their sum, minimum and maximum. The timelines of the ranks become one timeline with
a process for each rank. If the ranks have pages (``--html``), the merged results get a page, too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.cli import pages
from amanda.cli.results import complain
from amanda.files import write_json
from amanda.results import RunReport, Table, ToolReport

_RANKED = re.compile(r"(?P<stem>.+)-rank(?P<rank>\d+)(?P<rest>(?:\.timeline)?\.json)")


class MergeError(Exception):
    """The files of the ranks cannot be merged."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if there is nothing to merge."""
    parser = argparse.ArgumentParser(
        prog="amanda merge",
        description="Merge the files that the ranks of a distributed run have written into DIR.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(arguments).folder
    try:
        written = merge(folder)
    except (MergeError, pages.PageError) as error:
        complain(f"error: {error}")
        return 2
    print(f"amanda: wrote {', '.join(path.name for path in written)} in {folder}")
    return 0


def merge(folder: Path) -> list[Path]:
    """Merge the files of the ranks in a folder; they are not removed.

    Args:
        folder: the output folder of the ranks.

    Returns:
        The files written, ``<tool>.json`` and ``<tool>.timeline.json``, and ``report.html`` if
        the ranks have pages.

    Raises:
        MergeError: the folder has no files of ranks, one of them cannot be read, or the results
            of the ranks have different schemas.
        PageError: no plugin draws the page.
    """
    groups: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if found := _RANKED.fullmatch(path.name):
            groups.setdefault(found["stem"] + found["rest"], {})[int(found["rank"])] = path
    if not groups:
        raise MergeError(f"{folder} has no files of ranks (<tool>-rank<n>.json)")
    written = []
    results: dict[str, Mapping[str, Any]] = {}
    for name, paths in groups.items():
        contents = {rank: _read(paths[rank]) for rank in sorted(paths)}
        is_timeline = name.endswith(".timeline.json")
        merged = merge_timelines(contents) if is_timeline else merge_results(name, contents)
        if not is_timeline:
            results[name.removesuffix(".json")] = merged
        written.append(folder / name)
        write_json(written[-1], merged)
    if any(folder.glob("report-rank*.html")):
        written.append(pages.page_path(folder, ""))
        pages.write_page(written[-1], create_report(results))
    return written


def create_report(results: Mapping[str, Mapping[str, Any]]) -> RunReport:
    """The contents of the page of merged results.

    Args:
        results: the merged result of each tool, by file name without its suffix.
    """
    ranks = dict.fromkeys(rank for result in results.values() for rank in result["ranks"])
    return RunReport(
        title=f"amanda merge: {', '.join(results)}",
        facts={
            "ranks": ", ".join(map(str, ranks)),
            "namespaces": pages.namespaces(results.values()),
            "versions": pages.versions(),
        },
        tools=[
            ToolReport(name=name, result=result, tables=[_table_by_rank(name, result)])
            for name, result in results.items()
        ],
    )


def _table_by_rank(name: str, result: Mapping[str, Any]) -> Table:
    """A table of the numbers of a merged summary: a row for each figure, a column for each rank."""
    columns = ("figure", *(f"rank {rank}" for rank in result["ranks"]), "sum", "min", "max")
    rows = [
        (figure, *of["by_rank"].values(), *(of[key] for key in ("sum", "min", "max")))
        for figure, of in result["summary"].items()
        if "sum" in of
    ]
    return Table(f"{name} by rank", columns, rows)


def merge_results(name: str, results: Mapping[int, Any]) -> dict[str, Any]:
    """Merge the results of one tool.

    Args:
        name: name of the merged file, for messages.
        results: the result of each rank.

    Raises:
        MergeError: they are not all of one tool and schema.
    """
    if not all(isinstance(result, Mapping) for result in results.values()):
        raise MergeError(f"{name}: the results are no tables of a tool in the common form")
    kinds = {(result.get("tool"), result.get("schema")) for result in results.values()}
    if len(kinds) != 1 or None in next(iter(kinds)):
        raise MergeError(f"{name}: the ranks' results are of different tools or versions")
    [(tool, schema)] = kinds
    summaries = {rank: result.get("summary", {}) for rank, result in results.items()}
    return {
        "tool": tool,
        "schema": schema,
        "ranks": list(results),
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
        numbers: list[float] = [
            value
            for value in values.values()
            # A bool is an int for Python; a sum of flags says nothing.
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        found[figure] = {"by_rank": {str(rank): value for rank, value in values.items()}}
        if len(numbers) == len(values):
            found[figure].update(sum=sum(numbers), min=min(numbers), max=max(numbers))
    return found


def merge_timelines(timelines: Mapping[int, Any]) -> dict[str, Any]:
    """Merge timelines in Chrome's trace format into one with a process for each rank.

    The clocks of the ranks are not aligned: each timeline begins at its own zero.

    Args:
        timelines: the timeline of each rank.

    Raises:
        MergeError: one has no ``traceEvents``.
    """
    events: list[dict[str, Any]] = []
    for rank, timeline in timelines.items():
        if not isinstance(timeline, Mapping) or "traceEvents" not in timeline:
            raise MergeError(f"the timeline of rank {rank} has no events")
        named = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        events.append(named)
        events += [{**event, "pid": rank} for event in timeline["traceEvents"]]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MergeError(f"{path} cannot be read: {error}") from error
