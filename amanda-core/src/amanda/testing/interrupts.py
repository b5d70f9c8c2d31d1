"""Interrupts a program wherever Python takes an interrupt in Amanda's own code, as a key press may.

For tests that nothing is left behind then::

    points = interrupts.points(program, is_ours)
    for point in points:
        interrupts.run(program, is_ours, point)
        assert nothing_is_left()

A point is a place in the code together with how often it has run before. Python takes an interrupt
where a function begins, a loop goes round, or a call of C code returns. The exit of a with-block of
Amanda's is left out: if Python takes one as it calls ``__exit__``, the block is not left, as in any
with-statement. Programs have to run the same places each time.
"""

from __future__ import annotations

import collections
import dis
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from amanda.python import interrupts
from amanda.scope.blocks import WithBlock

_CORE = Path(__file__).parents[1]
_FIRST = 2
"""How many of the first executions of a line are tried, beside the last one."""

VARIABLE = "AMANDA_INTERRUPTS"
"""The environment variable that says which points the contract kit tries of each program: their
number, ``all``, or ``2/5`` for the second of five parts, each of which is spread evenly."""
_USUAL = 3

IsOurs = Callable[[CodeType], bool]

Place = tuple[str, int, str]
"""File, line, and "" for the begin of a function, or the function and the instruction before which
a call has returned or a loop goes round."""

_CALLS = frozenset(
    dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in dis.opmap
)
"""The instructions after which Python looks for an interrupt, unless they call Python code."""

_LOOPS = frozenset(
    number
    for name, number in dis.opmap.items()
    if "BACKWARD" in name and not name.endswith("NO_INTERRUPT")
)
"""The instructions at which Python looks for an interrupt as a loop goes round."""

_EXIT = WithBlock.__exit__.__code__


class InterruptPoint(NamedTuple):
    """One execution of one place.

    Attributes:
        place: where.
        runs: how often that has run before.
    """

    place: Place
    runs: int

    def __str__(self) -> str:
        file, line, after = self.place
        return f"{file}:{line} {after}({self.runs})"


def in_packages(*modules: str) -> IsOurs:
    """True if code is Amanda's own: of core without its small framework, or of these packages.

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
        if code is _EXIT or name == interrupts.__file__:
            return False
        if name.startswith(testing):
            return name == loopback
        return name.startswith(tuple(folders))

    return is_ours


def points(program: Callable[[], Any], is_ours: IsOurs) -> list[InterruptPoint]:
    """The points that a program passes: of each place the first executions and the last one."""
    counts: collections.Counter[Place] = collections.Counter()

    def passed(place: Place) -> None:
        counts[place] += 1

    _trace(program, is_ours, passed)
    return [
        InterruptPoint(place, count)
        for place, runs in counts.items()
        for count in sorted({*range(min(runs, _FIRST)), runs - 1})
    ]


def run(program: Callable[[], Any], is_ours: IsOurs, point: InterruptPoint) -> bool:
    """Run a program with an interrupt at one point; True if that was reached.

    The interrupt is a signal, which may wait (:mod:`amanda.python.interrupts`).
    """
    left = [point.runs]

    def passed(place: Place) -> None:
        if place == point.place:
            left[0] -= 1
            if left[0] == -1:
                # Python ends the tracing where this raises.
                signal.raise_signal(signal.SIGINT)

    try:
        _trace(program, is_ours, passed)
    except KeyboardInterrupt:
        return True
    return left[0] < 0


def sample(found: Sequence[InterruptPoint], offset: int = 0) -> Iterable[InterruptPoint]:
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


class _Places:
    """Notices the places that one call of a function passes.

    Args:
        code: of the function.
        passed: called at each place.

    Attributes:
        has_called: True if Python code was called since the last instruction.
    """

    def __init__(self, code: CodeType, passed: Callable[[Place], None]) -> None:
        self._file, self._name, self._code = code.co_filename, code.co_name, code.co_code
        self._handlers = _handlers(code)
        self._passed = passed
        self._last: int | None = None
        self.has_called = False

    def notice(self, frame: FrameType, event: str) -> None:
        """Take an event of Python's tracing."""
        if event == "opcode":
            last, self._last = self._last, frame.f_lasti
            has_called, self.has_called = self.has_called, False
            if last is None:
                return
            goes_round = self._code[last] in _LOOPS and frame.f_lasti < last
            has_returned = self._code[last] in _CALLS and not has_called
            # At the end of a try or a with, what Python raises there is still within it.
            is_same = self._handlers(last) == self._handlers(frame.f_lasti)
            if is_same and (goes_round or has_returned):
                self._passed((self._file, frame.f_lineno, f"{self._name}+{frame.f_lasti} "))


@functools.cache
def _handlers(code: CodeType) -> Callable[[int], int]:
    """A function that gives the place of the handler for an exception at an instruction."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ())

    def handler(offset: int) -> int:
        return next((e.target for e in entries if e.start <= offset < e.end), -1)

    return handler


def _trace(program: Callable[[], Any], is_ours: IsOurs, passed: Callable[[Place], None]) -> None:
    known: dict[CodeType, bool] = {}
    # By number: a frame that is held would keep what it knows alive.
    running: dict[int, _Places] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            running.pop(id(frame), None)
        else:
            running[id(frame)].notice(frame, event)
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        caller = running.get(id(frame.f_back))
        if caller is not None:
            caller.has_called = True
        code = frame.f_code
        if code not in known:
            known[code] = is_ours(code)
        if not known[code]:
            return None
        frame.f_trace_opcodes = True
        running[id(frame)] = _Places(code, passed)
        # The argument of RESUME: a generator that goes on is called, too.
        if code.co_code[frame.f_lasti + 1] == 0:
            passed((code.co_filename, code.co_firstlineno, ""))
        return local

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
