"""``amanda flight``: where each rank was, by the rings of the tool ``flight``.

The rings are those of processes that run, have ended, were killed or hang; a ring or a dump of
collectives that cannot be read is named, and the others are shown.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from amanda.cli.collective_dumps import NAME, read_dump
from amanda.cli.messages import WRONG_USAGE, CommandParser, complain
from amanda.errors import FileError
from amanda.python.text import printable
from amanda.results import Table, listed, plural
from amanda.tools.reporting import plain_text
from amanda.tools.rings import Recording, cells_of, read_ring, table_of

_RING = re.compile(r"flight.*?(?:-rank(?P<rank>[0-9]{1,9}))?\.ring")
"""The name of the ring of a process; the only one has no rank."""

_T = TypeVar("_T")

_SHOWN = 8
"""Ranks that a message lists."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if there is no ring that can be read."""
    parser = CommandParser(
        prog="amanda flight",
        description="Show where each process was, by the rings that the tool flight keeps in DIR.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of -o, or one ring")
    parser.add_argument("--full", action="store_true", help="list all executions of each ring")
    given = parser.parse_args(arguments)
    place = given.folder
    try:
        rings = _read(place, _RING, read_ring, "ring")
        if not rings:
            raise FileError(f"{place} has no ring that can be read (flight-rank<n>.ring)")
        dumps = _read(place, NAME, read_dump, "dump") if place.is_dir() else {}
    except FileError as error:
        complain(f"error: {error}")
        return WRONG_USAGE
    lines = [
        (rank, f"{rings[rank].begun:,}", *cells_of(rings[rank], last), *dumps.get(rank, ("", "")))
        if rank in rings and (last := rings[rank].last)
        else (rank, *[""] * 8, *dumps[rank])
        for rank in sorted({*dumps, *(rank for rank in rings if rings[rank].last)})
    ]
    heads = "rank begun step state operator inputs at ms memory in_collective last_ended"
    columns = [head.replace("_", " ") for head in heads.split()]
    print(plain_text(Table(f"flight: {plural(len(rings), 'rank')}", columns, lines, None), True))
    for line in _apart(rings):
        print(printable(line))
    for rank, recording in rings.items() if given.full or len(rings) == 1 else ():
        limit = None if given.full else 10
        print(plain_text(table_of(recording, f"rank {rank}", limit), given.full))
    return 0


def _read(
    place: Path, named: re.Pattern[str], read: Callable[[Path], _T], what: str
) -> Mapping[int, _T]:
    """The files of that name in a folder, or the only one, by rank; one that cannot be read is
    complained of.

    Raises:
        FileError: the folder cannot be read.
    """
    try:
        paths = sorted(place.iterdir()) if place.is_dir() else [place]
    except OSError as error:
        raise FileError(f"{place} cannot be read: {error.strerror}") from error
    found: dict[int, _T] = {}
    for path in paths:
        name = named.fullmatch(path.name)
        if path is not place and not (name and path.is_file()):
            continue
        rank = int((name and name["rank"]) or 0)
        try:
            contents = read(path)
        except FileError as error:
            complain(f"warning: {error}")
            continue
        if rank in found:
            complain(f"warning: {path.name} is a second {what} of rank {rank}, and left out")
        found.setdefault(rank, contents)
    return dict(sorted(found.items()))


def _apart(rings: Mapping[int, Recording]) -> Sequence[str]:
    """Lines about ranks without a ring, and about those that are not where most others are."""
    missing = set(range(max(rings))) - rings.keys()
    lines = [f"no ring of rank {listed(missing)}"] if missing else []
    places = {rank: each.last.place for rank, each in rings.items() if each.last}
    if len(set(places.values())) < 2:
        return lines
    [(common, count), *_] = collections.Counter(places.values()).most_common(1)
    behind = min(places, key=lambda rank: (places[rank][0], rings[rank].begun))
    if count * 2 <= len(places):
        # Stages of a pipeline, or two ranks: the one that has come least far.
        lines.append(f"the ranks are in {len(set(places.values()))} places; the least far is:")
        others = [behind]
    else:
        step, state, op = common
        lines.append(f"most ranks ({count}) are {state} {op} in step {step}; elsewhere:")
        others = [rank for rank, place in places.items() if place != common]
    for rank in others[:_SHOWN]:
        step, state, op = places[rank]
        lines.append(f"  rank {rank}: {state} {op} in step {step}, {rings[rank].begun:,} begun")
    return lines + ["  ..."] * (len(others) > _SHOWN)
