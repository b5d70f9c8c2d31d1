"""The timeline of kernels: operators with their kernels, as a Chrome trace for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from amanda.tools.description import OpDescription
from amanda_tools._timelines.activities import Activity, OpSpan, ProfilerRecording
from amanda_tools._timelines.chrome import slice_event, track_name


def events(
    recording: ProfilerRecording, ops: Mapping[str, OpDescription]
) -> Iterator[dict[str, Any]]:
    """Yield operators and activities on the tracks of threads, and kernels on the tracks of
    devices.

    Viewers draw a slice below the one that contains it.
    """
    tracks: dict[str, int] = {}
    process = os.getpid()
    starts = [e.start for e in recording.executions] + [a.start for a in recording.activities]
    origin = min(starts, default=0.0)

    def event(name: str, category: str, item: OpSpan | Activity, arguments: Any) -> dict[str, Any]:
        track = tracks.setdefault(item.track, len(tracks) + 1)
        start = item.start - origin
        return slice_event(name, category, start, item.span, process, track, arguments)

    for execution in recording.executions:
        op = ops.get(execution.op)
        about = {"id": execution.op, "module": op.module if op else ""}
        yield event(op.type if op else execution.op, "operator", execution, about)
    for activity in recording.activities:
        kind = "kernel" if activity.is_kernel else "activity"
        yield event(activity.name, kind, activity, _arguments(activity))
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
