"""Recording with ``torch.profiler``: kernels on a GPU (CUPTI), activities of the CPU."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from amanda import OpContext
from amanda.python.patching import PatchSet
from amanda.tools.description import OpDescription
from amanda_tools._internals import is_in_backward, is_profiling, prepare_profiler, watch_profilers
from amanda_tools._timelines.activities import ProfilerRecording, mark_of
from amanda_tools.kernels.annotations import annotate
from amanda_tools.kernels.kineto import recording_of
from amanda_tools.kernels.recordings import ProfilerRecorder

_IN_USE = "PyTorch's profiler serves one user at a time, and"


class TorchRecorder(ProfilerRecorder):
    """Annotates each execution: activities within an annotation belong to its operator.

    PyTorch's profiler records the thread that starts it, and the threads that autograd uses for it.
    It ends where the program starts a profiler of its own.
    """

    running: ClassVar[TorchRecorder | None] = None
    """The recorder that uses the profiler, until its scope ends."""

    def __init__(self, shapes: bool, limit: int) -> None:
        super().__init__(shapes, limit)
        self._profiler: Any = None
        self._thread = 0
        self._clock = 0.0
        self._recording = ProfilerRecording()
        self._patches = PatchSet()
        self._is_changing = False
        self._is_taken = False
        self._missed = 0

    def start(self) -> None:
        if TorchRecorder.running is not None:
            self.problem = f"{_IN_USE} another tool kernels records already"
            self._is_taken = True
            return
        TorchRecorder.running = self
        self._thread = threading.get_ident()
        self._clock = time.time() - time.perf_counter()
        watch_profilers(self._patches, self._give_up)
        self._is_taken = is_profiling()
        if not self._is_taken:
            self._begin()

    def stop(self) -> ProfilerRecording:
        if TorchRecorder.running is self:
            self._patches.undo()
            TorchRecorder.running = None
            self._finish()
        if self._missed and not self.problem:
            self.problem = f"{_IN_USE} {self._missed} executions ran after the program had used it"
        recording, self._recording = self._recording, ProfilerRecording()
        return recording

    def _begin(self) -> None:
        # Asking for a GPU's activities without a GPU gives a warning.
        wanted = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            wanted.append(ProfilerActivity.CUDA)
        profiler = profile(activities=wanted, record_shapes=self.shapes)
        self._change(profiler.start)
        self._profiler = profiler

    def _change(self, function: Callable[[], None]) -> None:
        """Start or stop our profiler, without taking it for a profiler of the program."""
        self._is_changing = True
        try:
            function()
        finally:
            self._is_changing = False

    # -- the program's own profilers --------------------------------------

    def _give_up(self) -> None:
        """Leave the profiler to the program, which starts it."""
        if self._is_changing:
            return
        if self._can_change():
            self._finish()
        self._is_taken = True

    def _can_change(self) -> bool:
        # It can only be stopped in the thread that started it, and not within a backward pass:
        # autograd would switch it on again.
        return threading.get_ident() == self._thread and not is_in_backward()

    # -- recording --------------------------------------------------------

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._is_taken or not is_profiling():
            self.problem = (
                "the program started a profiler of its own in a backward pass or in another "
                "thread, which ended ours"
            )
            if is_profiling():
                # With nothing to stop, stop() is a segmentation fault (2.13).
                self._change(lambda: prepare_profiler(profiler))
                self._change(profiler.stop)
            return
        self._change(profiler.stop)
        try:
            with tempfile.TemporaryDirectory(prefix="amanda-kernels-") as folder:
                path = Path(folder, "trace.json")
                profiler.export_chrome_trace(str(path))
                with path.open(encoding="utf-8") as file:
                    trace = json.load(file)
                # Times are microseconds since `baseTimeNanoseconds`, which is a time of day.
                began = trace.get("baseTimeNanoseconds", 0) / 1e9 - self._clock
                self._recording.extend(recording_of(trace["traceEvents"], began * 1e6))
        except (OSError, ValueError) as error:
            # ValueError: on a full disk the profiler leaves a part of the file, without an error.
            self.problem = (
                f"the recording is lost, as its temporary file cannot be written: {error}"
            )

    def watch(self, context: OpContext, op: OpDescription) -> None:
        name = mark_of(op.id)
        annotate(context, lambda: record_function(name) if self._records() else None)

    def _records(self) -> bool:
        """Count an execution; return True to mark it."""
        is_within = self.is_within_limit()
        self._missed += is_within and self._is_taken
        return is_within and not self._is_taken

    def at_limit(self) -> None:
        if self._profiler is not None and self._can_change():
            self._finish()


RECORDER = TorchRecorder
