"""``flight``: the last operators of a process, in a file that is readable when it has died."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import platform
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda import OpContext
from amanda.driver import Driver
from amanda.engine.signals import is_unhandled
from amanda.errors import FileError
from amanda.inline import Mark, Ring, resident_bytes
from amanda.interface.points import PointContext
from amanda.results import Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import ReportingTool, plain_text
from amanda.tools.rings import recording_of, table_of
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._timelines.memory import device_bytes


@attrs.frozen(kw_only=True)
class FlightOptions:
    """The options of ``flight``.

    Attributes:
        last: executions that the file keeps.
        timeout: seconds without an operator after which the state is printed to stderr; 0 for
            never.
    """

    last: int = attrs.field(default=1000, validator=attrs.validators.ge(2))
    timeout: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))


class FlightTool(ReportingTool[FlightOptions]):
    """Keeps the last operators in a file that survives a crash.

    Example: ``amanda run -t flight:timeout=300 -o out -- train.py``, then ``amanda flight out``

    Attributes:
        ring: the last executions.
    """

    name = "flight"
    group = "find"
    Options = FlightOptions
    only_watches = True
    needs_folder = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ring = Ring(self.options.last, _bytes_in_use)
        self._path: Path | None = None
        self._ops: dict[str, tuple[OpDescription, Mark]] = {}
        self._watch: _Watch | None = None
        self.depends_on(MappingTool.standard())
        for is_backward in (False, True):
            self.add_inst_for_op(self._analyse, backward=is_backward)
        self.add_inst_for_iteration(self._note_step)

    def begin_files(self, folder: Path, stem: str) -> None:
        """Keep the operators in the file ``<stem>.ring``, before the tool is applied.

        The file of a run before is renamed to ``<stem>.ring.old``.

        Raises:
            FileError: it cannot be written.
        """
        path = self._path = folder / f"{stem}.ring"
        facts = {"host": platform.node(), "command": sys.argv, "started": time.time()}
        try:
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_suffix(".ring.old"))
            self.ring = Ring(self.options.last, _bytes_in_use, path, facts)
        except OSError as error:
            raise FileError(f"flight: {path} cannot be written: {error.strerror}") from error

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Begin to wait for SIGUSR2 and for the timeout."""
        super().enter_scope(drivers)
        if self._watch is None:
            self._watch = _Watch(self, self.options.timeout)

    def exit_scope(self) -> None:
        """End that."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        if op.id not in self._ops:
            inputs = [
                f"{one.dtype}{list(one.shape or ())}" for one in op.tensors.inputs or () if one
            ]
            about = {"id": op.id, "type": op.type, "phase": op.phase, "inputs": inputs}
            self._ops[op.id] = op, Mark(self.ring, self.ring.name(about))
        mark = self._ops[op.id][1]
        insert_before(context, mark.before)
        insert_after(context, mark.after)

    def _note_step(self, point: PointContext) -> None:
        self.ring.set_step(point.iteration)

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator that is among the last executions, with how many of them it has."""
        last = [each.op["id"] for each in recording_of(self.ring).executions]
        return [
            {**op.row(), "executions": last.count(op.id)}
            for op, _ in self._ops.values()
            if op.id in last
        ]

    def summary(self) -> dict[str, Any]:
        """``begun``, the executions of the run, and the ``last`` one."""
        recording = recording_of(self.ring)
        last = recording.last
        place = dict(zip(("step", "state", "operator"), last.place, strict=True)) if last else None
        return {"begun": recording.begun, "last": place}

    def tables(self) -> Iterable[Table]:
        """The last executions, the last one first."""
        yield table_of(recording_of(self.ring), "flight")

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Name the file, which has been there since the begin."""
        return [self._path] if self._path else []

    def print_state(self, why: str) -> None:
        """Print the last executions, and the stacks of all threads, to stderr."""
        # Not tables(), which would wait for a tool that hangs.
        text = plain_text(table_of(recording_of(self.ring), f"amanda: {why}: flight"))
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)


def _bytes_in_use() -> int:
    return device_bytes() or resident_bytes()


class _Watch:
    """A thread that prints the state of a tool at SIGUSR2, and when no operator begins for long.

    The signal is awaited only where it would end the process, and nobody else is told of signals:
    the main thread may hang in code that is not Python, where a handler would not run.

    Args:
        tool: the tool.
        timeout: in seconds; 0 for never.
    """

    def __init__(self, tool: FlightTool, timeout: float) -> None:
        self._tool, self._timeout = tool, timeout
        self._process, self._ends = os.getpid(), os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._has_signal = self._await_signal()
        self._thread = threading.Thread(target=self._run, name="amanda flight", daemon=True)
        if self._has_signal or timeout:
            self._thread.start()

    def _await_signal(self) -> bool:
        number = getattr(signal, "SIGUSR2", None)
        if number is None or not is_unhandled(number):
            return False
        try:
            before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        except ValueError:
            return False  # not in the main thread
        if before != -1:
            signal.set_wakeup_fd(before)
            return False
        signal.signal(number, self._wake)
        return True

    def _wake(self, number: int, _: Any) -> None:
        """The handler: for a program that has set another descriptor to be told of signals."""
        if os.getpid() != self._process:
            # A forked child ends, as without the tool.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        with contextlib.suppress(OSError):
            os.write(self._ends[1], bytes([number]))

    def _run(self) -> None:
        ring, limit = self._tool.ring, self._timeout
        begun, since = ring.begun, time.monotonic()
        while True:
            woken, _, _ = select.select(self._ends[:1], (), (), limit / 4 or None)
            if woken:
                time.sleep(0.1)  # the descriptor and the handler tell of one signal
                numbers = os.read(self._ends[0], 4096)
                if 0 in numbers:
                    return
                if signal.SIGUSR2 in numbers:
                    self._tool.print_state("SIGUSR2")
            elif begun != ring.begun:
                begun, since = ring.begun, time.monotonic()
            elif limit and begun and time.monotonic() - since >= limit:
                self._tool.print_state(f"no operator has begun for {limit:g} s")
                since = math.inf

    def close(self) -> None:
        """End the thread, and give the signal back unless the program has taken it since."""
        if self._has_signal and signal.getsignal(signal.SIGUSR2) == self._wake:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGUSR2, signal.SIG_DFL)
                if (now := signal.set_wakeup_fd(-1)) != self._ends[1]:
                    signal.set_wakeup_fd(now)
        if self._thread.is_alive():
            os.write(self._ends[1], b"\0")
            self._thread.join()
        for end in self._ends:
            os.close(end)
