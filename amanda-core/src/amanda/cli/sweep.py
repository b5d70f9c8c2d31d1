"""``amanda sweep``: runs a program once for each combination of values of tools' options.

Each run is an ``amanda run`` in a process of its own, here, or on the cluster of ``RAY_ADDRESS``.
Its results are in ``DIR/<tool>_<option>=<value>/...``, which ``amanda query`` reads as one table
per tool with a column for each option.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from amanda.cli import grammar, pages, program, run
from amanda.cli.messages import WRONG_USAGE, CommandParser, complain, loading_plugins
from amanda.errors import AmandaError
from amanda.files import ERRORS
from amanda.python.text import printable
from amanda.registry import plugins

USAGE = "amanda sweep [OPTIONS] -o DIR [--] script.py ARGS | -m MODULE ARGS | -c TEXT ARGS"

_ABOUT = """\
Run a program once for each combination of values of tools' options: in -t, seed=0..9 gives an
option ten values, bit=3++7 two. Other options are those of amanda run. With RAY_ADDRESS the runs
are tasks of that cluster of Ray."""

Run = tuple[Sequence[str], Path]
"""The arguments of Python, and the folder of the results."""

Start = Callable[[Sequence[str], Path], Awaitable[int]]
"""Runs Python with arguments, and writes what it prints into files of a folder; returns the exit
status. If the task of asyncio is cancelled, the process ends."""

OUTPUT = "output.txt"
"""The file of its output; that of errors is :data:`~amanda.files.ERRORS`."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, 1 if runs have failed, or 2 for wrong usage."""
    own = _create_parser()
    with_value = (*run.WITH_VALUE, "--jobs", "--retries")
    ours, words = program.split(arguments, with_value)
    given, others = own.parse_known_args(ours)
    cluster = None
    try:
        with loading_plugins():
            tasks = _tasks(given.tool)
            _check(tasks.values(), others, words)
            _check_others(given.output, next(iter(tasks)))
            if address := os.environ.get("RAY_ADDRESS"):
                cluster = plugins.cluster(address)
    except (program.ProgramError, run.UsageError, grammar.GrammarError, AmandaError) as error:
        complain(f"error: {error}")
        return WRONG_USAGE
    runs = {}
    for name, tools in tasks.items():
        folder = given.output.absolute() / name
        options = [*others, "-t", tools, "-o", str(folder)]
        runs[name] = ["-m", "amanda", "run", *options, "--", *words], folder
    # Ended like by Ctrl-C, which ends the runs before.
    earlier = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    limit = given.jobs or (len(runs) if cluster else 1)
    start = cluster.run if cluster else run_here
    try:
        failed = asyncio.run(_run_all(runs, start, limit, given.retries))
    finally:
        if cluster:
            cluster.close()
        signal.signal(signal.SIGTERM, earlier)
    ending = f", {failed} failed" if failed else ""
    print(printable(f"amanda: {len(runs)} runs in {given.output}{ending}"))
    return 1 if failed else 0


def _create_parser() -> CommandParser:
    own = CommandParser(prog="amanda sweep", usage=USAGE, description=_ABOUT, allow_abbrev=False)
    own.add_argument("-t", "--tool", "--tools", metavar="TOOL", action="append", required=True)
    own.add_argument("-o", "--output", metavar="DIR", type=run.named_path, required=True)
    number = run.number_from
    own.add_argument(
        "--jobs", metavar="N", type=number(1), help="runs at a time (default: 1; on a cluster all)"
    )
    own.add_argument(
        "--retries", metavar="N", type=number(0), default=1, help="of a failed run (default: 1)"
    )
    return own


def _tasks(texts: Sequence[str]) -> dict[str, str]:
    """The runs of a sweep: what ``-t`` gets, by the values of the options that have several.

    Raises:
        GrammarError: a text does not follow the grammar.
        UsageError: no option has several values, or there are too many runs.
    """
    specs = grammar.parse(texts)
    names = pages.distinct([re.split("[/:]", spec.name)[-1] for spec in specs])
    options = [
        (re.sub(r"\W", "_", f"{name}_{option}"), grammar.alternatives(value))
        for spec, name in zip(specs, names, strict=True)
        for option, value in spec.options.items()
    ]
    count = math.prod(len(values) for _, values in options)
    if not 1 < count <= grammar.MOST_RUNS:
        raise run.UsageError(
            f"these options give {count} runs; seed=0..9 or bit=3++7 gives an option several values"
        )
    tasks = {}
    for values in itertools.product(*(several for _, several in options)):
        # Folders as Hive names them.
        places = [
            f"{name}={urllib.parse.quote(grammar.unescape(value), safe='+,')}"
            for (name, several), value in zip(options, values, strict=True)
            if len(several) > 1
        ]
        left = iter(values)
        words = [
            word
            for spec in specs
            for word in (spec.name, *(f"{option}={next(left)}" for option in spec.options))
        ]
        tasks["/".join(places)] = ",".join(words)
    return tasks


def _check(tasks: Iterable[str], others: Sequence[str], words: Sequence[str]) -> None:
    """Check what can be before the first run.

    Raises:
        ProgramError, UsageError, AmandaError: something is wrong.
    """
    run.check_options(run.parse_options(others, words))
    target = program.parse(words)
    target.check()
    if target.kind == "input":
        raise run.UsageError("standard input can be read once only: name a script")
    for tools in tasks:
        run.create_tools([tools])


def _check_others(folder: Path, name: str) -> None:
    """Check that a folder, which is created, has no runs of other options than one of this name.

    Raises:
        UsageError: it has.
    """
    run.check_folder(folder)
    keys = [part.partition("=")[0] for part in name.split("/")]
    for depth in range(1, len(keys) + 2):
        for other in folder.glob("/".join(["*=*"] * depth)):
            is_other = [other.name.partition("=")[0]] != keys[depth - 1 : depth]
            if is_other or (depth < len(keys) and (other / ERRORS).exists()):
                place = other.relative_to(folder).as_posix()
                raise run.UsageError(f"{folder} has runs of another sweep, {place}; name another")


async def _run_all(runs: Mapping[str, Run], start: Start, limit: int, retries: int) -> int:
    """Run all, so many at a time, and those that fail again; the number of those that still do."""
    free = asyncio.Semaphore(limit)

    async def run_one(name: str) -> bool:
        async with free:
            return await _succeeds(name, *runs[name], start, retries)

    # An interrupt waits until all have ended.
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(name)) for name in runs]
    return sum(not task.result() for task in tasks)


async def _succeeds(
    name: str, command: Sequence[str], folder: Path, start: Start, retries: int
) -> bool:
    for left in range(retries, -1, -1):
        try:
            # Of an earlier try or sweep: it would be counted twice.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            status = await start(command, folder)
            if not status:
                return True
            ending = f"signal {-status}" if status < 0 else f"status {status}"
            why = "; ".join(filter(None, (ending, _last_line(folder / ERRORS))))
        except (AmandaError, OSError) as error:
            why = str(error)
        what = "it is run again" if left else f"see {folder}"
        complain(f"warning: {name} failed ({why}); {what}")
    return False


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1000))
        return file.read().decode(errors="replace").strip().rpartition("\n")[2]


async def run_here(words: Sequence[str], folder: Path) -> int:
    """Run Python in a process of this machine, see :data:`Start`."""
    with (folder / OUTPUT).open("wb") as output, (folder / ERRORS).open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
