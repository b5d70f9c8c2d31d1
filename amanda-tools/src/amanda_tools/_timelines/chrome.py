"""Timelines as files in the Chrome trace-event format, for Perfetto and ``chrome://tracing``.

``write_events(events(timeline, sources), path)`` writes a :class:`Timeline`. The format is the
"Trace Event Format", a public document of the Chromium project: complete events (``X``) are
operators and modules, metadata (``M``) names the tracks, flows (``s``
and ``f``) lead from forward operators to their backward ones.
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
from amanda_tools._timelines.timeline import Timeline, TimelineSpan

_MODULES = 1 << 31
"""Added to a thread's id for the id of the track with its modules."""


def write_events(found: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write events one by one; the file is either complete or not there.

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
    """Yield operators in the order in which they ended, modules as they end, track
    names last."""
    process = os.getpid()
    tracks: dict[int, ModuleTrack] = {}
    flows = Flows(process)
    for record in timeline.records():
        track = tracks.setdefault(record.thread, ModuleTrack(process, record.thread))
        yield from track.follow(record)
        yield _operator(record, sources, process)
        yield from flows.follow(record)
    for thread, track in tracks.items():
        yield from track.close(0)
        yield track_name(process, thread, f"operators of thread {thread}")
        yield track_name(process, thread + _MODULES, f"modules of thread {thread}")


@attrs.define
class Flows:
    """Arrows from the last execution of a forward operator to those of its backward operators.

    Attributes:
        process: id of the process.
    """

    process: int
    _last: dict[str, tuple[float, int]] = attrs.field(factory=dict)
    _count: int = 0

    def follow(self, span: TimelineSpan) -> Iterator[dict[str, Any]]:
        """Yield the two ends of the arrow to a backward operator; note a forward one."""
        middle = (span.start + span.duration / 2) / 1000
        if not span.op.forward:
            self._last[span.op.id] = (middle, span.thread)
        elif begin := self._last.get(span.op.forward):
            self._count += 1
            name = {"name": "backward", "cat": "backward", "id": self._count, "pid": self.process}
            yield {**name, "ph": "s", "ts": begin[0], "tid": begin[1]}
            # "e": the arrow ends at the slice around this time, not at the next one.
            yield {**name, "ph": "f", "bp": "e", "ts": middle, "tid": span.thread}


def _operator(span: TimelineSpan, sources: Mapping[str, str], process: int) -> dict[str, Any]:
    arguments = {"id": span.op.id, "module": span.op.module}
    if source := sources.get(span.op.forward or span.op.id):
        arguments["source"] = source
    times = (span.start / 1000, span.duration / 1000)
    return slice_event(span.op.type, span.op.direction, *times, process, span.thread, arguments)


def slice_event(
    name: str,
    category: str,
    start: float,
    duration: float,
    process: int,
    track: int,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a complete event; `start` and `duration` in microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": process,
        "tid": track,
        "args": arguments,
    }


def track_name(process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a track."""
    return {
        "name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}
    }  # fmt: skip


def module_path(op: OpDescription) -> tuple[str, ...]:
    """Return the modules that run an operator, outermost first: its class, then names; ()
    outside."""
    head = op.id.partition("/")[0]
    path = [part.partition("#")[0] for part in head.split(".") if part]
    suffix = () if op.direction == "forward" else (" (backward)",)
    if not path:
        return ()
    # PyTorch's ids begin with the whole path; TensorFlow's hold it between slashes.
    names = op.module.split("/") if op.module and op.namespace.startswith("tensorflow/") else []
    inner = names[1:] if names[:1] == [path[0].partition("@")[0]] else names
    return (path[0] + "".join(suffix), *path[1:], *inner)


@attrs.define
class ModuleTrack:
    """Slices of modules above the operators of one thread.

    A module's slice reaches from its first to its last operator in a row.

    Attributes:
        process, thread: ids of the process, and of the thread of the operators.
    """

    process: int
    thread: int
    _open: list[list[Any]] = attrs.field(factory=list)

    def follow(self, span: TimelineSpan) -> Iterator[dict[str, Any]]:
        """Yield the slices that end before this operator; open those that begin with it."""
        path = module_path(span.op)
        shared = 0
        # Modules that the previous operator was in as well stay open.
        while shared < min(len(path), len(self._open)) and self._open[shared][0] == path[shared]:
            shared += 1
        yield from self.close(shared)
        for name in path[shared:]:
            self._open.append([name, span.start, span.end])
        for entry in self._open:
            entry[1] = min(entry[1], span.start)
            entry[2] = max(entry[2], span.end)

    def close(self, depth: int) -> Iterator[dict[str, Any]]:
        """Yield the open slices deeper than `depth`, which end."""
        while len(self._open) > depth:
            path = ".".join(entry[0] for entry in self._open)
            name, start, end = self._open.pop()
            times = (start / 1000, (end - start) / 1000)
            track = (self.process, self.thread + _MODULES)
            yield slice_event(name, "module", *times, *track, {"module": path})
