"""TensorFlow's profiler, which serves one user at a time, shared by the tools of a process.

::

    recording = Recording()
    recording.start()                   # True, unless the program itself uses the profiler
    ...
    for planes, began in recording.stop(): ...

Where a second tool begins or ends, the profiler is stopped and started again: each tool has the
segments of its own time, and a kernel that runs at that moment is in none of them.
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
from amanda_tools._timelines.xplane import planes_in

_DETAILS = 2
"""Level of the host tracer at which threads record each kernel."""

_LONGEST = 20.0
"""Seconds after which a segment is written, as the profiler keeps it in memory until then."""


@attrs.define(eq=False)
class Segment:
    """What the profiler has recorded without a break.

    Attributes:
        folder: where its files are, until it is released.
        began: ``time.perf_counter_ns()`` at its begin.
        holders: how many recordings have yet to read it.
    """

    folder: tempfile.TemporaryDirectory[str]
    began: int
    holders: int = 0

    def planes(self) -> Iterator[Any]:
        """The planes that the profiler has written."""
        files = sorted(Path(self.folder.name).rglob("*.xplane.pb"))
        return planes_in(file.read_bytes() for file in files)

    def release(self) -> None:
        """Remove its files, if no other recording has yet to read it."""
        self.holders -= 1
        if self.holders <= 0:
            self.folder.cleanup()


class Recording:
    """One tool's use of the profiler.

    Attributes:
        problem: what went wrong; "" if nothing did.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._segments: list[Segment] = []

    def start(self) -> bool:
        """Begin to record. Returns False if the program itself uses the profiler."""
        return _SHARED.add(self)

    def stop(self) -> Iterator[tuple[Iterator[Any], int]]:
        """End, and yield the planes and the begin of each segment."""
        _SHARED.remove(self)
        segments, self._segments = self._segments, []
        for segment in segments:
            yield segment.planes(), segment.began
            segment.release()

    def take(self, segment: Segment) -> None:
        """Keep a segment that has ended."""
        self._segments.append(segment)


class _SharedProfiler:
    """Runs the profiler as long as there are recordings."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._recordings: list[Recording] = []
        self._segment: Segment | None = None
        self._timer: threading.Timer | None = None

    def add(self, recording: Recording) -> bool:
        """Begin a segment for one more recording; False if the program uses the profiler."""
        return self._lock.hold(self._add, recording)

    def _add(self, recording: Recording) -> bool:
        self._end()
        self._recordings.append(recording)
        if self._begin():
            return True
        self._recordings.remove(recording)
        return not recording.problem.startswith(_IN_USE)

    def remove(self, recording: Recording) -> None:
        """End the segment; begin another one for the recordings that are left."""
        self._lock.hold(self._remove, recording)

    def _remove(self, recording: Recording) -> None:
        if recording in self._recordings:
            self._end()
            self._recordings.remove(recording)
            self._begin()

    def _renew(self) -> None:
        """Called by the timer."""
        self._lock.hold(self._next_segment)

    def _next_segment(self) -> None:
        if self._segment is not None:
            self._end()
            self._begin()

    def _begin(self) -> bool:
        if not self._recordings:
            return True
        try:
            folder = tempfile.TemporaryDirectory(prefix="amanda-kernels-")
        except OSError as error:
            # The program runs all the same.
            return self._failed(f"there is no place for its temporary files: {error}")
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_DETAILS)
        began = time.perf_counter_ns()
        try:
            tf.profiler.experimental.start(folder.name, options)
        except tf.errors.AlreadyExistsError:
            folder.cleanup()
            return self._failed(_IN_USE)
        self._segment = Segment(folder, began)
        self._timer = threading.Timer(_LONGEST, self._renew)
        self._timer.daemon = True
        self._timer.start()
        return True

    def _end(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            tf.profiler.experimental.stop()
        except tf.errors.UnavailableError:
            self._failed("the program has stopped the profiler")
            segment.release()
            return
        segment.holders = len(self._recordings)
        for recording in self._recordings:
            recording.take(segment)

    def _failed(self, problem: str) -> bool:
        for recording in self._recordings:
            recording.problem = problem
        return False


_IN_USE = "TensorFlow's profiler serves one user at a time and is in use by the program"
_SHARED = _SharedProfiler()
