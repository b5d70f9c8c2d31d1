"""When the operators of TensorFlow's graphs ran: its profiler records the runtime's threads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from amanda import OpContext
from amanda.errors import CoverageWarning
from amanda_tools._timelines.xplane import Names

if TYPE_CHECKING:
    from amanda_tools._timelines.tensorflow_profiler import ProfilerUse


class GraphTimes:
    """The executions of operators of graphs in one scope.

    Attributes:
        names: maps nodes of the graphs to operators.
    """

    def __init__(self) -> None:
        self.names = Names()
        self._recording: ProfilerUse | None = None

    def watch(self) -> None:
        """Start watching the program's own use of the profiler; a second call does nothing."""
        if self._recording is not None:
            return
        # Imported here: it imports TensorFlow, which may not be installed.
        from amanda_tools._timelines.tensorflow_profiler import ProfilerUse

        self._recording = ProfilerUse()
        self._recording.watch()

    def measures(self, context: OpContext) -> bool:
        """Return True if the profiler of TensorFlow's runtime measures an operator.

        Other operators are timed by routines around them; in a graph of TensorFlow further
        operators may run between the two routines.
        """
        return not context.runs_at_once and context.namespace.matches("tensorflow")

    def begin(self) -> None:
        """Start the profiler if it does not run; to be called before a graph runs."""
        if self._recording is not None:
            self._recording.start()

    def end(self) -> Iterator[tuple[str, int, int, int]]:
        """Stop the profiler, and yield the executions.

        Yields:
            The operator's id; begin (``time.perf_counter_ns()``) and duration in nanoseconds,
            without other operators within it; the native id of the thread.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        for activity in recording.stop(self.names).activities:
            if activity.op and not activity.is_kernel:
                times = (round(activity.start * 1e3), round(activity.duration * 1e3))
                yield activity.op, *times, activity.thread
        if recording.problem:
            warnings.warn(
                f"times of operators of graphs are missing: {recording.problem}",
                CoverageWarning,
                stacklevel=2,
            )
