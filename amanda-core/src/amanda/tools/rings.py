"""What the rings of ``flight`` say: where each thread of each process was.

::

    recording = read_ring(Path("out/flight-rank1.ring"))
    recording.last.op["id"]  # the operator that began last
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from amanda.errors import FileError
from amanda.files import opened
from amanda.inline.ring import HEADER, MAGIC, RECORD, Ring
from amanda.results import MAX_ROWS, Table, plural

_UNKNOWN: Mapping[str, Any] = {"id": "(name lost)"}
"""Stands for an operator whose line is not in the file, as on a full disk, or is damaged."""


@attrs.frozen(kw_only=True)
class Execution:
    """One record of a ring.

    Attributes:
        index: how many executions had begun with it.
        op: what the ring knows about the operator: ``id``, ``type``, ``phase``, ``inputs``.
        step: number of the iteration, -1 before the first.
        memory: bytes in use when it began, at most a millisecond before; 0 if unknown.
        begin, end: in nanoseconds of ``time.perf_counter_ns()`` of the process; 0 without an end.
        thread: native id of the thread.
    """

    index: int
    op: Mapping[str, Any]
    step: int
    memory: int
    begin: int
    end: int
    thread: int

    @property
    def state(self) -> str:
        """``"in"`` if it has not ended, else ``"after"``."""
        return "after" if self.end else "in"

    @property
    def place(self) -> tuple[int, str, str]:
        """Step, state and operator."""
        return self.step, self.state, str(self.op["id"])


@attrs.frozen(kw_only=True)
class Recording:
    """The contents of a ring.

    Attributes:
        facts: what it says about the process.
        begun: the executions that have begun.
        executions: the last ones, in order.
        epoch: nanoseconds of ``time.time_ns()`` at the zero of the clock of the process.
        process: its id.
    """

    facts: Mapping[str, Any]
    begun: int
    executions: Sequence[Execution]
    epoch: int
    process: int

    @property
    def last(self) -> Execution | None:
        """The execution that began last: one that has not ended comes before those that have, of
        the last ones of all threads."""
        lasts = {each.thread: each for each in self.executions}.values()
        return max(lasts, key=lambda each: (not each.end, each.index), default=None)

    def clock_text(self, moment: int) -> str:
        """The local time at a moment of the clock of the process, with milliseconds."""
        seconds, rest = divmod(self.epoch + moment, 1_000_000_000)
        return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest // 1_000_000:03}"


def recording_of(ring: Ring) -> Recording:
    """The contents of a ring of this process."""
    return _recording(ring.numbers.tolist(), {}, ring.names.__getitem__)


def read_ring(path: Path) -> Recording:
    """Read the file of a ring, of a process that runs or has ended.

    Raises:
        FileError: it cannot be read, or is no ring of this version, or is cut off.
    """
    with opened(path) as file:
        data = file.read()
    whole = len(data) // 8 * 8
    numbers = memoryview(data)[:whole].cast("q")
    if len(numbers) < len(HEADER) or numbers[0] != MAGIC:
        raise FileError(f"{path} is no ring of flight, or of another version of it")
    size = numbers[HEADER.index("size")]
    length = len(HEADER) + len(RECORD) * size
    if not 0 < size <= len(numbers) or len(numbers) < length:
        raise FileError(f"{path} is cut off or damaged: {len(data)} bytes for {size} records")
    facts, *names = [*map(_parsed, data[8 * length :].split(b"\n")[:-1])] or [{}]
    return _recording(
        numbers[:length].tolist(),
        facts,
        lambda number: names[number] if 0 <= number < len(names) else _UNKNOWN,
    )


def _parsed(line: bytes) -> Mapping[str, Any]:
    """A line of the file; one that is damaged has no name."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return _UNKNOWN
    return found if isinstance(found, dict) else _UNKNOWN


def _recording(
    numbers: Sequence[int], facts: Mapping[str, Any], op_of: Callable[[int], Mapping[str, Any]]
) -> Recording:
    header = dict(zip(HEADER, numbers, strict=False))
    size, begun = header["size"], header["begun"]
    rows = []
    # The oldest one may be half overwritten, if the process ended within a record.
    for index in range(max(1, begun - size + 2), begun + 1):
        at = len(HEADER) + len(RECORD) * (index % size)
        row = dict(zip(RECORD, numbers[at : at + len(RECORD)], strict=True))
        if row["index"] == index:
            rows.append(Execution(op={**_UNKNOWN, **op_of(row.pop("number"))}, **row))
    return Recording(
        facts=facts, begun=begun, executions=rows, epoch=header["epoch"], process=header["process"]
    )


_COLUMNS = ("step", "state", "operator", "inputs", "began", "ms", "memory")


def table_of(recording: Recording, title: str, limit: int | None = MAX_ROWS) -> Table:
    """A table of the last executions, the last one first."""
    lines = [cells_of(recording, each) for each in reversed(recording.executions)]
    about = f"{title}: the last of {plural(recording.begun, 'operator')} that began"
    return Table(about, _COLUMNS, lines, limit=limit)


def cells_of(recording: Recording, each: Execution) -> tuple[Any, ...]:
    """Step, state, operator, shapes, begin, milliseconds and memory of an execution, as text."""
    return (
        each.step if each.step >= 0 else "-",
        each.state,
        each.op["id"],
        ", ".join(map(str, each.op.get("inputs", ()))),
        recording.clock_text(each.begin),
        f"{(each.end - each.begin) / 1e6:.3f}" if each.end else "-",
        f"{each.memory / 1e6:.1f} MB" if each.memory else "-",
    )
