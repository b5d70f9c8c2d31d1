"""A timeline in the Chrome trace-event format, for Perfetto and ``chrome://tracing``.

The format: "Trace Event Format", a public document of the Chromium project. Complete
events (``X``) are operators and modules, counters (``C``) are memory, and metadata
(``M``) names the tracks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from amanda.files import replaced
from amanda.tools.description import OpDescription
from amanda_tools._timelines.timeline import MemorySample, Span, Timeline

_MODULES = 1 << 31
"""Added to a thread's number for the track of its modules."""


def write(timeline: Timeline, sources: Mapping[str, str], path: Path) -> None:
    """Write a timeline as a file.

    Args:
        timeline: what to write.
        sources: id of a forward operator to the user's line.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
    """
    write_events(events(timeline, sources), path)


def write_events(found: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write events, one at a time, so that the file is either complete or not there.

    Raises:
        OSError: the file cannot be written.
    """
    with replaced(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for event in found:
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


def events(timeline: Timeline, sources: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The events: operators and memory as they ended, modules when they end, tracks at last."""
    process = os.getpid()
    tracks: dict[int, ModuleTrack] = {}
    for record in timeline.records():
        if isinstance(record, MemorySample):
            yield from _counters(record, process)
            continue
        track = tracks.setdefault(record.thread, ModuleTrack(process, record.thread))
        yield from track.follow(record)
        yield _operator(record, sources, process)
    for thread, track in tracks.items():
        yield from track.close(0)
        yield track_name(process, thread, f"operators of thread {thread}")
        yield track_name(process, thread + _MODULES, f"modules of thread {thread}")


def _operator(span: Span, sources: Mapping[str, str], process: int) -> dict[str, Any]:
    arguments = {"id": span.op.id, "module": span.op.module}
    if source := sources.get(span.op.forward or span.op.id):
        arguments["source"] = source
    return {
        "name": span.op.type,
        "cat": span.op.direction,
        "ph": "X",
        "ts": span.start / 1000,
        "dur": span.duration / 1000,
        "pid": process,
        "tid": span.thread,
        "args": arguments,
    }


def _counters(sample: MemorySample, process: int) -> Iterator[dict[str, Any]]:
    for name, amount in (("resident memory", sample.resident), ("CUDA memory", sample.device)):
        if amount:
            counted = {"bytes": amount}
            yield {
                "name": name, "ph": "C", "ts": sample.time / 1000, "pid": process, "args": counted
            }  # fmt: skip


def track_name(process: int, thread: int, name: str) -> dict[str, Any]:
    """The event that names a track."""
    return {
        "name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}
    }  # fmt: skip


def module_path(op: OpDescription) -> tuple[str, ...]:
    """The modules that run an operator, outermost first: class, then path; () outside of any."""
    head = op.id.partition("/")[0]
    path = [part.partition("#")[0] for part in head.split(".") if part]
    suffix = () if op.direction == "forward" else (" (backward)",)
    return (path[0] + "".join(suffix), *path[1:]) if path else ()


@attrs.define
class ModuleTrack:
    """The slices of modules above the operators of one thread.

    A module's slice goes from its first to its last operator in a row.

    Attributes:
        process, thread: whose they are.
    """

    process: int
    thread: int
    _open: list[list[Any]] = attrs.field(factory=list)

    def follow(self, span: Span) -> Iterator[dict[str, Any]]:
        """The slices that end before this operator; those around it are opened."""
        path = module_path(span.op)
        shared = 0
        while shared < min(len(path), len(self._open)) and self._open[shared][0] == path[shared]:
            shared += 1
        yield from self.close(shared)
        for name in path[shared:]:
            self._open.append([name, span.start, span.end])
        for entry in self._open:
            entry[1] = min(entry[1], span.start)
            entry[2] = max(entry[2], span.end)

    def close(self, depth: int) -> Iterator[dict[str, Any]]:
        """The slices that are deeper than so many, which end."""
        while len(self._open) > depth:
            path = ".".join(entry[0] for entry in self._open)
            name, start, end = self._open.pop()
            yield {
                "name": name,
                "cat": "module",
                "ph": "X",
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "pid": self.process,
                "tid": self.thread + _MODULES,
                "args": {"module": path},
            }
