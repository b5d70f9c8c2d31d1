"""TensorFlow's profiler, which serves one user at a time, shared by the tools of a process.

::

    recording = ProfilerUse()
    recording.watch()
    recording.start()
    ...
    for planes, began in recording.stop(): ...

When a second tool begins or ends, the profiler is restarted: each tool gets the segments of its own
time, and a kernel that runs at the restart is in none of them. While the program itself uses the
profiler, our session is stopped, and ``recording.problem`` says so.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import tensorflow as tf

from amanda.state import Lock
from amanda_tools._internals.tensorflow import ProfilerSession, ProfilerUses
from amanda_tools._timelines.xplane import planes_in

_DETAILS = 2
"""Level of the host tracer at which threads record each kernel."""

_LONGEST = 20.0
"""Seconds after which a segment is written, as the profiler keeps it in memory until then."""


@attrs.define(eq=False)
class ProfilerSegment:
    """An uninterrupted recording of the profiler.

    Attributes:
        folder: folder of its files, removed by the last :meth:`release`.
        began: ``time.perf_counter_ns()`` at its begin.
        holders: number of recordings that have not read it yet.
    """

    folder: tempfile.TemporaryDirectory[str]
    began: int
    holders: int = 0

    def planes(self) -> Iterator[Any]:
        """Read the planes that the profiler has written."""
        files = sorted(Path(self.folder.name).rglob("*.xplane.pb"))
        return planes_in(file.read_bytes() for file in files)

    def release(self) -> None:
        """Drop one holder; remove the files after the last one."""
        self.holders -= 1
        if self.holders <= 0:
            self.folder.cleanup()


class ProfilerUse:
    """One tool's use of the profiler.

    Attributes:
        problem: reason why a part of the run was not recorded; "" if all of it was.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._segments: list[ProfilerSegment] = []

    @property
    def runs(self) -> bool:
        """True while the profiler records for tools."""
        return _SHARED.runs

    def watch(self) -> None:
        """Start watching the program's own use of the profiler; to be called before
        :meth:`start`."""
        _SHARED.watch(self)

    def start(self) -> None:
        """Begin to record, or if the program uses the profiler, as soon as it has finished. A
        second call does nothing."""
        _SHARED.add(self)

    def stop(self) -> Iterator[tuple[Iterator[Any], int]]:
        """Stop recording; yield the planes and the begin of each segment."""
        _SHARED.remove(self)
        segments, self._segments = self._segments, []
        for segment in segments:
            yield segment.planes(), segment.began
            segment.release()

    def take(self, segment: ProfilerSegment) -> None:
        """Keep a segment that has ended."""
        self._segments.append(segment)


class _SharedProfiler:
    """Runs the profiler as long as there are recordings."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._watching: list[ProfilerUse] = []
        self._recordings: list[ProfilerUse] = []
        self._segment: ProfilerSegment | None = None
        self._session: Any = None
        self._timer: threading.Timer | None = None
        self._uses = ProfilerUses(self._program_starts, self._program_has_stopped)
        # Number of the program's current uses of the profiler.
        self._programs = 0

    @property
    def runs(self) -> bool:
        """True while a segment is recorded."""
        return self._segment is not None

    def watch(self, recording: ProfilerUse) -> None:
        """Watch the program's own use for one more recording."""
        self._lock.hold(self._watch, recording)

    def _watch(self, recording: ProfilerUse) -> None:
        self._watching.append(recording)
        self._uses.watch()

    def add(self, recording: ProfilerUse) -> None:
        """Begin a segment for one more recording."""
        if recording not in self._recordings:
            self._lock.hold(self._add, recording)

    def _add(self, recording: ProfilerUse) -> None:
        self._end()
        self._recordings.append(recording)
        self._begin()

    def remove(self, recording: ProfilerUse) -> None:
        """End the segment; begin another one for the recordings that are left."""
        self._lock.hold(self._remove, recording)

    def _remove(self, recording: ProfilerUse) -> None:
        if recording in self._recordings:
            self._end()
            self._recordings.remove(recording)
            self._begin()
        if recording in self._watching:
            self._watching.remove(recording)
        if not self._watching:
            self._uses.undo()

    def _program_starts(self) -> None:
        """Called before the program uses the profiler."""
        self._lock.hold(self._pause)

    def _pause(self) -> None:
        self._programs += 1
        self._end()
        self._failed(_IN_USE)

    def _program_has_stopped(self) -> None:
        """Called after the program has used the profiler."""
        self._lock.hold(self._resume)

    def _resume(self) -> None:
        self._programs -= 1
        if self._segment is None:
            self._begin()

    def _renew(self) -> None:
        """Called by the timer."""
        self._lock.hold(self._next_segment)

    def _next_segment(self) -> None:
        if self._segment is not None:
            self._end()
            self._begin()

    def _begin(self) -> None:
        if not self._recordings:
            return
        if self._programs:
            self._failed(_IN_USE)
            return
        try:
            folder = tempfile.TemporaryDirectory(prefix="amanda-kernels-")
        except OSError as error:
            # The program runs all the same.
            self._failed(f"there is no place for its temporary files: {error}")
            return
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_DETAILS)
        began = time.perf_counter_ns()
        # Not by the public functions, in whose variable the program's own use is.
        self._session = ProfilerSession()
        try:
            self._session.start(folder.name, options._asdict())
        except tf.errors.AlreadyExistsError:
            # In use since before the recordings began; the end of that use cannot be noticed.
            self._session = None
            folder.cleanup()
            self._failed(_IN_USE)
            return
        self._segment = ProfilerSegment(folder, began)
        self._timer = threading.Timer(_LONGEST, self._renew)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        session, self._session = self._session, None
        session.export_to_tb()
        segment.holders = len(self._recordings)
        for recording in self._recordings:
            recording.take(segment)

    def _failed(self, problem: str) -> None:
        for recording in self._recordings:
            recording.problem = problem


_IN_USE = (
    "TensorFlow's profiler serves one user at a time, and the program used it for a part of the run"
)
_SHARED = _SharedProfiler()
