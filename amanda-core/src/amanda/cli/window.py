"""Runs the tools of ``amanda run`` in a part of the run: ``--trigger``, ``--ranks one-per-stage``.

Before, the run has one routine at the ends of steps, and no operator is analysed.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from amanda.cli.messages import complain
from amanda.errors import AmandaError
from amanda.files import read_text, replaced
from amanda.interface.points import PointContext
from amanda.interface.tool import Tool
from amanda.scope.apply import apply

_LOOK = 1.0
"""Seconds between two looks at the file."""

_AHEAD = 10
"""Looks until the tools begin: all ranks have seen the number of the step by then."""


class Trigger:
    """A file that has the number of the step at whose end tools begin, for all ranks.

    It is empty at first, or a signal empties it; a rank that sees this writes the number. Of
    several numbers the last one holds. A thread reads the file: no step waits for a file system.

    Args:
        path: the file.
        is_signalled: whether SIGUSR2 empties the file.

    Attributes:
        begin: the number; None before there is one.
        ended: the steps that have ended, which is set from outside.
    """

    def __init__(self, path: Path, *, is_signalled: bool) -> None:
        self.path = path
        self.begin: int | None = None
        self.ended = 0
        self._seen = 0
        self._told = ""
        self._is_asked = False
        if is_signalled:
            signal.signal(signal.SIGUSR2, self._ask)

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def watch(self) -> None:
        """Start to read the file."""
        threading.Thread(target=self._watch, name="amanda-trigger", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK)
            # Of a file that is not there, or not readable now.
            with contextlib.suppress(OSError, AmandaError):
                self.look()

    def look(self) -> None:
        """Read the file, and write it where it is empty.

        Raises:
            OSError, AmandaError: it cannot be read or written.
        """
        speed, self._seen = self.ended - self._seen, self.ended
        is_asked, self._is_asked = self._is_asked, False
        text = "" if is_asked else read_text(self.path).strip()
        if text.isdecimal():
            self.begin = int(text)
        elif not text:
            self.begin = self.ended + 2 + _AHEAD * speed
            with replaced(self.path) as file:
                file.write(f"{self.begin}\n")
        elif text != self._told:
            self._told = text
            complain(f"warning: {self.path} does not have the number of a step: {text[:80]}")


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
        is_chosen: asked at the end of the first step, whether tools are to run at all.
        trigger: says when; None for the end of the first step.
        steps: how many they run.

    Attributes:
        scope: of the tools.
        deliver: called when they have ended before the program.
        has_results: True from their begin until `deliver` is called.
        seconds: that they have run.
    """

    only_watches = True

    def __init__(
        self, is_chosen: Callable[[], bool], trigger: Trigger | None, steps: float = math.inf
    ) -> None:
        super().__init__()
        self.scope = apply()
        self.deliver: Callable[[], None] = lambda: None
        self.has_results = False
        self.seconds = 0.0
        self._is_chosen = is_chosen
        self._trigger = trigger
        self._steps = steps
        self._ended = 0
        self._last: int | None = None
        self._is_open = False
        self._end = math.inf
        self._began = 0.0
        self.add_inst_for_iteration(self._end_step, end=True)
        # Told of the end of a step after the tools, whose scope begins before.
        closer = Tool()
        closer.only_watches = True
        closer.add_inst_for_iteration(self._end_last_step, end=True)
        self._closing = apply(closer)

    def _end_step(self, point: PointContext) -> None:
        self._ended = point.iteration + 1
        begin: int | None = 1
        if self._trigger is not None:
            self._trigger.ended = self._ended
            begin = self._trigger.begin
        if self._is_open or begin is None or begin == self._last or self._ended < begin:
            return
        self._last = begin
        if self._is_chosen():
            if self._ended > begin:
                complain(f"warning: the tools begin after step {self._ended}, not {begin}")
            self._end, self._began = self._ended + self._steps, time.perf_counter()
            self.scope.__enter__()
            self._closing.__enter__()
            self._is_open = self.has_results = True

    def _end_last_step(self, point: PointContext) -> None:
        if self._ended >= self._end:
            self.exit_scope()
            self.deliver()

    def exit_scope(self) -> None:
        """End the scope of the tools, if it is open."""
        if self._is_open:
            self._is_open = False
            self.seconds = time.perf_counter() - self._began
            self._closing.__exit__(None, None, None)
            self.scope.__exit__(None, None, None)
