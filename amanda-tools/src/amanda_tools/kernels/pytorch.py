"""Recording with ``torch.profiler``: kernels on a GPU (CUPTI), activities of the CPU."""

from __future__ import annotations

import inspect
import json
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from amanda import OpContext
from amanda.errors import CapabilityError
from amanda.tools.description import OpDescription
from amanda_tools._internals import is_profiling
from amanda_tools._timelines.activities import MARK, ProfilerRecording
from amanda_tools.kernels.annotations import annotate
from amanda_tools.kernels.kineto import recording_of
from amanda_tools.kernels.recordings import ProfilerRecorder, Settings

_BACKWARD = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
"""Code objects of the functions that start a backward pass."""


class TorchRecorder(ProfilerRecorder):
    """Annotates each execution: activities within an annotation on its thread are the operator's.

    PyTorch's profiler records the thread that starts it, and those that autograd uses for it.
    """

    framework = "pytorch"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._profiler: Any = None
        self._thread = 0
        self._clock = 0.0
        self._recording = ProfilerRecording()

    def start(self) -> None:
        if is_profiling():
            # PyTorch would silently let this profiler take over.
            raise CapabilityError(
                "tool kernels needs PyTorch's profiler, which serves one user at a time and is "
                "in use; take the other one out of the program"
            )
        # Asking for a GPU's activities without a GPU gives a warning.
        wanted = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            wanted.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=wanted, record_shapes=self.settings.shapes)
        self._profiler.start()
        self._clock = time.time() - time.perf_counter()
        self._thread = threading.get_ident()

    def stop(self) -> ProfilerRecording:
        self._finish()
        recording, self._recording = self._recording, ProfilerRecording()
        return recording

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if not is_profiling():
            self.problem = "the program started a profiler of its own, which ended ours"
            return
        profiler.stop()
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
        name = MARK + op.id
        annotate(context, lambda: record_function(name) if self.is_within_limit() else None)

    def at_limit(self) -> None:
        # It can only be stopped in the thread that started it, and not within a backward pass:
        # autograd would switch it on again.
        if (
            self._profiler is not None
            and threading.get_ident() == self._thread
            and not is_in_backward()
        ):
            self._finish()


def is_in_backward() -> bool:
    """True if this thread is within a backward pass that it has started."""
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _BACKWARD:
            return True
        frame = frame.f_back
    return False


RECORDER = TorchRecorder
