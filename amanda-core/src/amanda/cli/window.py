"""Runs the tools of ``amanda run`` in a part of the run: ``--trigger``, ``--ranks one-per-stage``.

Before, the run has one routine at the ends of steps, and no operator is analysed.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from amanda.cli.messages import complain
from amanda.engine.signals import is_unhandled
from amanda.errors import AmandaError
from amanda.files import read_text, replaced
from amanda.interface.points import PointContext
from amanda.interface.tool import Tool
from amanda.scope.apply import apply
from amanda.scope.scope import Statistics

_LOOK = 1.0
"""Seconds between two looks at the file, at least: a step is."""

_AHEAD = 10.0
"""Seconds until the tools begin, about: all ranks have seen the number of the step by then."""


class Trigger:
    """A file with the number of the step at whose end tools begin, for all ranks.

    A rank that sees it empty, or gets a signal, writes the number; the last one holds. The file is
    removed when the tools have run.

    Args:
        path: the file.
        is_signalled: whether SIGUSR1 does the same as an empty file.

    Raises:
        AmandaError: SIGUSR1 is not free.
    """

    def __init__(self, path: Path, *, is_signalled: bool) -> None:
        self.path = path
        self._is_asked = False
        self._begin, self._last = math.inf, -1
        self._told = ""
        self._seen, self._looked, self._rate = 0, 0.0, 0.0
        self._signal = getattr(signal, "SIGUSR1", None) if is_signalled else None
        if is_signalled:
            try:
                # Of an earlier run.
                path.unlink(missing_ok=True)
                if self._signal is None or not is_unhandled(self._signal):
                    raise ValueError("the signal is not free")
                signal.signal(self._signal, self._ask)
            except (OSError, ValueError) as error:
                raise AmandaError(f"--trigger SIGUSR1: {error}; name a file") from None

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def close(self) -> None:
        """Give the signal back, unless the program has taken it since."""
        if self._signal is None:
            return
        if signal.getsignal(self._signal) != self._ask:
            complain("warning: the program handles SIGUSR1 itself, which triggers no tools then")
        else:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(self._signal, signal.SIG_DFL)

    def begins(self, ended: int) -> bool:
        """Whether tools begin at the end of a step.

        Args:
            ended: the steps that have ended.
        """
        now = time.monotonic()
        # From the first step on: what comes before it is no measure of its rate.
        self._looked = self._looked or now
        if (passed := now - self._looked) >= _LOOK:
            self._rate = max(self._rate, (ended - self._seen) / passed)
            self._seen, self._looked = ended, now
            try:
                self._look(ended)
            except (AmandaError, OSError) as error:
                if self._is_asked or self.path.exists():
                    self._warn(str(error))
        if ended < self._begin:
            return False
        if ended > self._begin:
            complain(f"warning: the tools begin after step {ended}, not {self._begin}")
        self._last, self._begin = int(self._begin), math.inf
        return True

    def _look(self, ended: int) -> None:
        """Read the file, and write it if that is asked for.

        Raises:
            AmandaError, OSError: it is not there, or cannot be read or written.
        """
        text = read_text(self.path).strip() if self.path.exists() or not self._is_asked else ""
        number = int(text) if re.fullmatch(r"[0-9]{1,15}", text) else -1
        if not text or (self._is_asked and number <= ended):
            with replaced(self.path) as file:
                file.write(f"{ended + 2 + math.ceil(_AHEAD * self._rate)}\n")
        elif number < 0:
            self._warn(f"{self.path} does not have the number of a step: {text[:80]}")
        elif number == self._last:
            self.path.unlink()
        else:
            self._begin = number
        self._is_asked = False

    def _warn(self, text: str) -> None:
        if text != self._told:
            self._told = text
            complain(f"warning: {text}")


def is_first_of_stage(mesh: Mapping[str, int]) -> bool:
    """True for one of the ranks of each pipeline stage.

    Args:
        mesh: the place of this rank.

    Raises:
        AmandaError: there are no stages.
    """
    if "pp" not in mesh:
        raise AmandaError(
            "--ranks one-per-stage: no DeviceMesh of the program has had an axis pp at the end of "
            "the first step"
        )
    return not any(place for axis, place in mesh.items() if axis != "pp")


class Window(Tool):
    """Begins the scope of other tools at the end of a step, and ends it after some steps.

    Args:
        begins: asked at the end of a step, how many of which have ended; True to begin.
        steps: how many the tools run.
        close: called at the end of the run.

    Attributes:
        scope: of the tools.
        begun: called when they begin, with the steps that have ended.
        deliver: called when they have ended before the program.
        has_results: True from their begin until their results are delivered.
        seconds: that they have run.
    """

    only_watches = True

    def __init__(
        self, begins: Callable[[int], bool], steps: float, close: Callable[[], None]
    ) -> None:
        super().__init__()
        self.scope = self._closing = apply()
        self.begun: Callable[[int], None]
        self.deliver: Callable[[Statistics, float], None]
        self.has_results = False
        self.seconds = self._began = 0.0
        self._begins, self._steps, self._close = begins, steps, close
        self._is_open = False
        self.add_inst_for_iteration(self._end_step, end=True)

    def around(self, scope: apply, drivers: Sequence[str] | None) -> apply:
        """The scope of the run, for the scope of the tools."""
        # Told of the end of a step when the tools have been, whose scope begins before.
        closer = Tool()
        closer.only_watches = True
        closer.add_inst_for_iteration(self._end_last_step, end=True)
        self.scope, self._closing = scope, apply(closer, drivers=drivers)
        return apply(self, drivers=drivers)

    def _end_step(self, point: PointContext) -> None:
        ended = point.iteration + 1
        if not self._is_open and self._begins(ended):
            self.begun(ended)
            self._began = time.perf_counter()
            self.scope.__enter__()
            self._closing.__enter__()
            self._is_open = self.has_results = True

    def _end_last_step(self, point: PointContext) -> None:
        if point.iteration + 1 >= self._steps:
            self._end_tools()
            self.deliver(self.scope.statistics, self.seconds)

    def _end_tools(self) -> None:
        if self._is_open:
            self._is_open = False
            self.seconds = time.perf_counter() - self._began
            self._closing.__exit__(None, None, None)
            self.scope.__exit__(None, None, None)

    def exit_scope(self) -> None:
        """End the scope of the tools, if it is open."""
        self._close()
        self._end_tools()
