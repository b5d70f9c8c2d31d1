"""What the benchmarks of time have in common on the command line: options, tables, files.

A benchmark names its cases, and makes the comparisons of one when it is that case's turn::

    options = command.parser(__doc__, CASES).parse_args(arguments)
    rows = command.run(CASES, options)
    return command.exit_code(rows, options)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.timing import CONFIDENCE, Comparison, Row, Schedule, measure

Cases = Mapping[str, Callable[[], Sequence[Comparison]]]
"""Names of cases, and functions that make their models and comparisons."""

WIDTH = 150
"""Columns of a table that is not printed to a terminal."""


def parser(doc: str | None, cases: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks of time take.

    Args:
        doc: the docstring of the benchmark's module.
        cases: the names of its cases.
    """
    standard = Schedule()
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--case", action="append", choices=list(cases), help="only this; repeatable")
    made.add_argument(
        "--only", action="append", metavar="TEXT",
        help="only rows whose name has this; repeatable",
    )  # fmt: skip
    made.add_argument(
        "--rounds", type=int, default=standard.rounds,
        help="blocks of each row, with a block of the baseline before and after "
        "(default %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--seconds", type=float, default=standard.seconds,
        help="of timed runs in a block; one run at least (default %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--quick", action="store_true",
        help="one round, one run a block: shows that the benchmark works, and concludes nothing",
    )  # fmt: skip
    made.add_argument(
        "--strict", action="store_true",
        help="exit with 1 if nothing can be concluded from a row",
    )  # fmt: skip
    made.add_argument(
        "-o", "--output", type=Path, help="write the rows to this file, as JSON, after each case"
    )
    made.add_argument(
        "--resume", action="store_true",
        help="take cases that are in the file of --output from there instead of measuring them",
    )  # fmt: skip
    return made


def run(
    cases: Cases, options: argparse.Namespace, known: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Measure the chosen cases, print a table of each, and write the file after each.

    Args:
        options: of :func:`parser`.
        known: rows of cases that were measured elsewhere; they come first in the file.

    Returns:
        The rows as plain data: :meth:`Row.data`, the case's name as ``case``, and as ``share`` how
        much of a processor this process had: less than 1 if others had some of it.

    Raises:
        SystemExit: no row of a case is wanted, or there is no file to resume with.
    """
    schedule = _schedule(options)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    about = environment()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    found = [*known, *measured(options)]
    settings = {"rounds": schedule.rounds, "seconds": schedule.seconds}
    report = {"environment": about, "settings": settings, "rows": found}
    for name in missing(options.case or cases, found):
        wanted = _wanted(cases[name](), options.only)
        wall, processor = time.perf_counter(), time.process_time()
        rows = measure(wanted, schedule)
        share = (time.process_time() - processor) / (time.perf_counter() - wall)
        console.print(_table(name, rows, share))
        found += [{"case": name, "share": share, **row.data()} for row in rows]
        _write(report, options.output)
    _write(report, options.output)
    unsure = sum(1 for row in found if row["doubt"])
    if unsure:
        # On a line of its own, after everything: tables are long.
        console.print(f"NOTHING CAN BE CONCLUDED from {unsure} of {len(found)} rows.", style="bold")
    return found


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that an earlier run has written, if this one is to resume it.

    Raises:
        SystemExit: ``--resume`` without ``--output``.
    """
    if not options.resume:
        return []
    if options.output is None:
        raise SystemExit("--resume: --output FILE says where the rows are")
    if not options.output.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    return rows


def missing(names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cases that have no row yet."""
    known = {row["case"] for row in rows}
    return [name for name in names if name not in known]


def exit_code(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> int:
    """0, or 1 under ``--strict`` if nothing can be concluded from a row or there is none."""
    return int(options.strict and (not rows or any(row["doubt"] for row in rows)))


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    # Not the distribution's version: TensorFlow's goes by several names.
    frameworks = {
        name: str(sys.modules[name].__version__)
        for name in ("torch", "tensorflow")
        if name in sys.modules
    }
    return {
        "python": platform.python_version(),
        **frameworks,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, 1 thread used",
        "load": round(os.getloadavg()[0], 2),
    }


def _schedule(options: argparse.Namespace) -> Schedule:
    if options.quick:
        return Schedule(rounds=1, seconds=0, warm_up=1)
    return Schedule(rounds=options.rounds, seconds=options.seconds)


def _write(report: Mapping[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _wanted(comparisons: Sequence[Comparison], only: Sequence[str] | None) -> list[Comparison]:
    found = [c for c in comparisons if not only or any(part in c.name for part in only)]
    if not found:
        names = ", ".join(repr(c.name) for c in comparisons)
        raise SystemExit(f"--only {only}: no row has this in its name; there are {names}")
    return found


def _table(case: str, rows: Sequence[Row], share: float) -> Table:
    table = Table(
        title=f"\n{case}", title_justify="left", title_style="bold", box=None, pad_edge=False,
        caption=f"{share:.0%} of a processor was ours", caption_justify="left",
    )  # fmt: skip
    table.add_column("ratio to the baseline", no_wrap=True)
    for title in ("median", f"{CONFIDENCE:.0%} interval", "minimum", "control", "bound", "ms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("conclusion")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.median:.3f}",
            str(row.interval),
            f"{row.minimum:.3f}",
            str(row.control),
            "" if row.bound is None else f"{row.bound:.3f}",
            f"{row.milliseconds:.3f}",
            row.conclusion,
            style="yellow" if row.doubt else None,
        )
    return table
