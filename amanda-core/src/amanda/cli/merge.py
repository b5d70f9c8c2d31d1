"""``amanda merge``: the files of all ranks of a run in one.

Under ``torchrun`` each rank writes ``<tool>-rank<n>.json``. Merged, a row says of which
rank it is, a number of the summary becomes its sum, smallest and largest value, and the
timelines of all ranks become one with a process for each. Where ranks have pages there is
one of what was merged, too.
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
    """Merge what is in a folder; the files of the ranks stay.

    Returns:
        The files written, ``<tool>.json`` and ``<tool>.timeline.json``, and ``report.html`` if
        the ranks have pages.

    Raises:
        MergeError: there are none of several ranks, one cannot be read, or the ranks' results
            are of different kinds.
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
        merged = merged_timelines(contents) if is_timeline else merged_results(name, contents)
        if not is_timeline:
            results[name.removesuffix(".json")] = merged
        written.append(folder / name)
        write_json(written[-1], merged)
    if any(folder.glob("report-rank*.html")):
        written.append(pages.page_of(folder, ""))
        pages.write_page(written[-1], page_of(results))
    return written


def page_of(results: Mapping[str, Mapping[str, Any]]) -> RunReport:
    """What the page of merged results is about."""
    ranks = dict.fromkeys(rank for result in results.values() for rank in result["ranks"])
    return RunReport(
        title=f"amanda merge: {', '.join(results)}",
        facts={
            "ranks": ", ".join(map(str, ranks)),
            "namespaces": pages.namespaces(results.values()),
            "versions": pages.versions(),
        },
        tools=[
            ToolReport(name=name, result=result, tables=[_by_rank(name, result)])
            for name, result in results.items()
        ],
    )


def _by_rank(name: str, result: Mapping[str, Any]) -> Table:
    """The numbers of a merged summary, a line each."""
    columns = ("figure", *(f"rank {rank}" for rank in result["ranks"]), "sum", "min", "max")
    rows = [
        (figure, *of["by_rank"].values(), *(of[key] for key in ("sum", "min", "max")))
        for figure, of in result["summary"].items()
        if "sum" in of
    ]
    return Table(f"{name} by rank", columns, rows)


def merged_results(name: str, results: Mapping[int, Any]) -> dict[str, Any]:
    """The results of one tool as one.

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
        "summary": _merged_summaries(summaries),
        "ops": [{"rank": rank, **row} for rank, result in results.items() for row in result["ops"]],
    }


def _merged_summaries(summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure of all ranks: numbers with their sum and range, the rest by rank."""
    figures = dict.fromkeys(key for summary in summaries.values() for key in summary)
    found: dict[str, Any] = {}
    for figure in figures:
        values = {rank: summary.get(figure) for rank, summary in summaries.items()}
        numbers: list[float] = [
            value
            for value in values.values()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        found[figure] = {"by_rank": {str(rank): value for rank, value in values.items()}}
        if len(numbers) == len(values):
            found[figure].update(sum=sum(numbers), min=min(numbers), max=max(numbers))
    return found


def merged_timelines(timelines: Mapping[int, Any]) -> dict[str, Any]:
    """The timelines as one, a process for each rank; each begins at its own zero.

    Raises:
        MergeError: one has no events.
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
