"""When the operators of TensorFlow's graphs ran: its profiler records the runtime's threads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from amanda import OpContext
from amanda.errors import CoverageWarning
from amanda_tools._timelines.xplane import Names, recording_of

if TYPE_CHECKING:
    from amanda_tools._timelines.tensorflow_profiler import Recording


class GraphTimes:
    """The executions of operators of graphs in one scope.

    Attributes:
        names: the names of their nodes.
    """

    def __init__(self) -> None:
        self.names = Names()
        self._recording: Recording | None = None

    def watch(self) -> None:
        """Note from now on when the program uses the profiler; harmless when called twice."""
        if self._recording is not None:
            return
        # Here, as it imports TensorFlow, which a program without it need not have.
        from amanda_tools._timelines.tensorflow_profiler import Recording

        self._recording = Recording()
        self._recording.watch()

    def measures(self, context: OpContext) -> bool:
        """Return True if the profiler of TensorFlow's runtime measures an operator.

        Elsewhere routines around it do. In a graph of TensorFlow others run between them.
        """
        return not context.runs_at_once and context.namespace.matches("tensorflow")

    def begin(self) -> None:
        """Let the profiler run, if it does not; to be called before a graph runs."""
        if self._recording is not None:
            self._recording.start()

    def _warn(self, problem: str) -> None:
        if problem:
            warnings.warn(
                f"times of operators of graphs are missing: {problem}",
                CoverageWarning,
                stacklevel=3,
            )

    def end(self) -> Iterator[tuple[str, int, int, int]]:
        """End, and yield the executions.

        Yields:
            The operator's id; begin (``time.perf_counter_ns()``) and duration in nanoseconds,
            without other operators within it; the native id of the thread.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        for planes, began in recording.stop():
            for activity in recording_of(planes, self.names).activities:
                if activity.op and not activity.is_kernel:
                    begin = began + round(activity.start * 1e3)
                    yield activity.op, begin, round(activity.duration * 1e3), activity.thread
        self._warn(recording.problem)
