"""Operators with their kernels below them, as a Chrome trace for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from amanda.tools.description import OpDescription
from amanda_tools._timelines.chrome import track_name, write_events
from amanda_tools.kernels.recordings import Activity, ProfilerRecording


def write(recording: ProfilerRecording, ops: Mapping[str, OpDescription], path: Path) -> None:
    """Write a recording as a file.

    Args:
        recording: what to write.
        ops: the operators, by id.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
    """
    write_events(events(recording, ops), path)


def events(
    recording: ProfilerRecording, ops: Mapping[str, OpDescription]
) -> Iterator[dict[str, Any]]:
    """Operators and the activities within them on the tracks of threads, kernels on those of
    devices; a viewer puts what is within another slice below it."""
    tracks: dict[str, int] = {}
    process = os.getpid()
    starts = [e.start for e in recording.executions] + [a.start for a in recording.activities]
    origin = min(starts, default=0.0)

    def slice_of(name: str, kind: str, item: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": item.start - origin,
            "dur": item.span,
            "pid": process,
            "tid": tracks.setdefault(item.track, len(tracks) + 1),
            "args": arguments,
        }

    for execution in recording.executions:
        op = ops.get(execution.op)
        about = {"id": execution.op, "module": op.module if op else ""}
        yield slice_of(op.type if op else execution.op, "operator", execution, about)
    for activity in recording.activities:
        kind = "kernel" if activity.is_kernel else "activity"
        yield slice_of(activity.name, kind, activity, _arguments(activity))
    for track, number in tracks.items():
        yield track_name(process, number, track)


def _arguments(activity: Activity) -> dict[str, Any]:
    known = {
        "id": activity.op or None,
        "bytes": activity.bytes,
        "launch_us": activity.launch,
        "waited_us": activity.waited,
    }
    return {key: value for key, value in known.items() if value is not None}
