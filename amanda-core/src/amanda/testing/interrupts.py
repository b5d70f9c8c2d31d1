"""Interrupts a program at any line of Amanda's own code, as a key press may do.

For tests that nothing is left behind then::

    points = interrupts.points(program, is_ours)
    for point in points:
        interrupts.run(program, is_ours, point)
        assert nothing_is_left()

A point is a line of code together with how often it has run before. The interrupt comes before the
line runs. Programs have to run the same lines each time.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

_CORE = Path(__file__).parents[1]
_FIRST = 2
"""How many of the first executions of a line are tried, beside the last one."""

VARIABLE = "AMANDA_INTERRUPTS"
"""The environment variable that says which points the contract kit tries of each program: their
number, ``all``, or ``2/5`` for the second of five parts, each of which is spread evenly."""
_USUAL = 3

IsOurs = Callable[[CodeType], bool]


class Point(NamedTuple):
    """One execution of one line.

    Attributes:
        place: file and line.
        runs: how often the line has run before.
    """

    place: tuple[str, int]
    runs: int

    def __str__(self) -> str:
        return f"{self.place[0]}:{self.place[1]} ({self.runs})"


def in_packages(*modules: str) -> IsOurs:
    """Whether code is Amanda's own: of core without its small framework, or of these packages.

    Args:
        modules: names of modules; the packages that they are in are meant.
    """
    folders = []
    for name in modules:
        top = sys.modules[name.partition(".")[0]]
        folders += [f"{folder}{os.sep}" for folder in getattr(top, "__path__", ())]
    testing = f"{_CORE / 'testing'}{os.sep}"
    loopback = str(_CORE / "testing" / "loopback" / "driver.py")
    folders = [folder for folder in folders if Path(folder) != _CORE] + [f"{_CORE}{os.sep}"]

    def is_ours(code: CodeType) -> bool:
        name = code.co_filename
        if name.startswith(testing):
            return name == loopback
        return name.startswith(tuple(folders))

    return is_ours


def points(program: Callable[[], Any], is_ours: IsOurs) -> list[Point]:
    """The points that a program passes: of each line the first executions and the last one."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()

    def passed(place: tuple[str, int]) -> None:
        counts[place] += 1

    _trace(program, is_ours, passed)
    return [
        Point(place, count)
        for place, runs in counts.items()
        for count in sorted({*range(min(runs, _FIRST)), runs - 1})
    ]


def run(program: Callable[[], Any], is_ours: IsOurs, point: Point) -> bool:
    """Run a program with an interrupt at one point; whether that was reached."""
    left = [point.runs]

    def passed(place: tuple[str, int]) -> None:
        if place == point.place:
            left[0] -= 1
            if left[0] < 0:
                # Python ends the tracing when the tracer raises.
                raise KeyboardInterrupt(str(point))

    try:
        _trace(program, is_ours, passed)
    except KeyboardInterrupt:
        return True
    return left[0] < 0


def sample(found: Sequence[Point], offset: int = 0) -> Iterable[Point]:
    """The points to try: as many as ``AMANDA_INTERRUPTS`` says, evenly spread.

    Args:
        offset: which of the possible samples.
    """
    wanted = os.environ.get(VARIABLE, str(_USUAL))
    if wanted == "all":
        return found
    part, slash, parts = wanted.partition("/")
    if slash:
        return found[int(part) - 1 :: int(parts)]
    step = max(1, len(found) // int(wanted))
    return found[offset % step :: step]


def _trace(
    program: Callable[[], Any], is_ours: IsOurs, passed: Callable[[tuple[str, int]], None]
) -> None:
    known: dict[CodeType, bool] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            passed((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in known:
            known[code] = is_ours(code)
        return local if known[code] else None

    def steps() -> Iterator[None]:
        program()
        yield

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        # A generator handles exceptions on its own: one that a tracer raises at the ``pass`` of an
        # ``except`` clause leaves the handled one to be the current one for ever (Python 3.11).
        next(steps())
    finally:
        sys.settrace(outer)
