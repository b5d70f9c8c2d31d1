"""TensorFlow's profiler, which serves one user at a time, shared by the tools of a process.

::

    recording = ProfilerUse()
    recording.watch()
    recording.start()
    ...
    found = recording.stop(names)

When a second tool begins or ends, the profiler is restarted: each tool gets the segments of its own
time, and a kernel that runs at the restart is in none of them. Where the program itself begins to
use the profiler, our session ends, and ``recording.problem`` says so.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import tensorflow as tf

from amanda.files import TemporaryFolder
from amanda.state import Lock
from amanda_tools._internals.tensorflow import ProfilerSession, ProfilerUses
from amanda_tools._timelines.activities import ProfilerRecording
from amanda_tools._timelines.xplane import Names, began_at, planes_in, recording_of

_DETAILS = 2
"""Level of the host tracer at which threads record each kernel."""

_LONGEST = 20.0
"""Seconds after which a segment is written, as the profiler keeps it in memory until then."""


@attrs.define(eq=False)
class ProfilerSegment:
    """An uninterrupted recording of the profiler.

    Attributes:
        folder: folder of its files, removed by the last :meth:`release`.
        clock: ``time.perf_counter_ns()`` less ``time.time_ns()``.
        began: ``time.perf_counter_ns()`` at its begin, for profiles that do not tell it.
        holders: number of recordings that have not read it yet.
    """

    folder: TemporaryFolder
    clock: int
    began: int
    holders: int = 0

    def recording(self, names: Names) -> ProfilerRecording:
        """Read what the profiler has written."""
        files = sorted(self.folder.path.rglob("*.xplane.pb"))
        planes = list(planes_in(file.read_bytes() for file in files))
        # A profile begins up to seconds after it was asked for, when the machine is busy.
        began = began_at(planes)
        origin = self.began if began is None else began + self.clock
        return recording_of(planes, names, origin / 1e3)

    def release(self) -> None:
        """Drop one holder; remove the files after the last one."""
        self.holders -= 1
        if self.holders <= 0:
            self.folder.remove()


class ProfilerUse:
    """One tool's use of the profiler.

    Attributes:
        problem: reason why a part of the run was not recorded; "" if all of it was.
        segments: segments that have ended and are not read yet.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.segments: list[ProfilerSegment] = []

    @property
    def runs(self) -> bool:
        """True while the profiler records for tools."""
        return _SHARED.segment is not None

    def watch(self) -> None:
        """Start watching the program's own use of the profiler; to be called before
        :meth:`start`."""
        _SHARED.watch(self)

    def start(self) -> None:
        """Begin to record, unless the program has used the profiler. A second call does
        nothing."""
        if self not in _SHARED.uses:
            _SHARED.add(self)

    def stop(self, names: Names) -> ProfilerRecording:
        """Stop recording; return what was recorded since :meth:`start`, on the clock of
        ``time.perf_counter()``."""
        _SHARED.remove(self)
        segments, self.segments = self.segments, []
        found = ProfilerRecording()
        for segment in segments:
            found.extend(segment.recording(names))
            segment.release()
        return found


def _locked(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method of the shared profiler run while its lock is held."""

    @functools.wraps(method)
    def held(profiler: _SharedProfiler, *args: ProfilerUse) -> None:
        profiler.lock.hold(method, profiler, *args)

    return held


class _SharedProfiler:
    """Runs the profiler as long as tools use it.

    Attributes:
        lock: held while the profiler starts or stops.
        uses: the uses by tools.
        segment: the segment that is recorded; None if none is.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.uses: list[ProfilerUse] = []
        self.segment: ProfilerSegment | None = None
        self._watching: list[ProfilerUse] = []
        self._session: Any = None
        self._timer: threading.Timer | None = None
        self._patches = ProfilerUses(self._give_up)
        # True if the program has used the profiler while tools watch.
        self._is_taken = False

    @_locked
    def watch(self, use: ProfilerUse) -> None:
        """Watch the program's own use for one more tool."""
        self._watching.append(use)
        self._patches.watch()

    @_locked
    def add(self, use: ProfilerUse) -> None:
        """Begin a segment for one more tool."""
        self._end()
        self.uses.append(use)
        self._begin()

    @_locked
    def remove(self, use: ProfilerUse) -> None:
        """End the segment; begin another one for the tools that are left."""
        if use in self.uses:
            self._end()
            self.uses.remove(use)
            self._begin()
        if use in self._watching:
            self._watching.remove(use)
        if not self._watching:
            self._patches.undo()
            self._is_taken = False

    @_locked
    def _give_up(self) -> None:
        """Called before the program uses the profiler."""
        self._is_taken = True
        self._end()
        self._failed(_IN_USE)

    @_locked
    def _renew(self) -> None:
        """Begin the next segment; called by the timer."""
        if self.segment is not None:
            self._end()
            self._begin()

    def _begin(self) -> None:
        if not self.uses:
            return
        if self._is_taken:
            self._failed(_IN_USE)
            return
        try:
            folder = TemporaryFolder("kernels")
        except OSError as error:
            # The program runs all the same.
            self._failed(f"there is no place for its temporary files: {error}")
            return
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_DETAILS)
        clock = time.perf_counter_ns() - time.time_ns()
        # Not by the public functions, in whose variable the program's own use is.
        self._session = ProfilerSession()
        try:
            self._session.start(str(folder.path), options._asdict())
        except tf.errors.AlreadyExistsError:
            # In use since before the tools began.
            self._session = None
            folder.remove()
            self._failed(_IN_USE)
            return
        self.segment = ProfilerSegment(folder, clock, time.perf_counter_ns())
        self._timer = threading.Timer(_LONGEST, self._renew)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        segment, self.segment = self.segment, None
        if segment is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        session, self._session = self._session, None
        session.export_to_tb()
        segment.holders = len(self.uses)
        for use in self.uses:
            use.segments.append(segment)

    def _failed(self, problem: str) -> None:
        for use in self.uses:
            use.problem = problem


_IN_USE = (
    "TensorFlow's profiler serves one user at a time, and nothing ran for the tools after the "
    "program had begun to use it"
)
_SHARED = _SharedProfiler()
