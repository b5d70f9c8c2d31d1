"""Recording with TensorFlow's profiler: kernels of graphs by name, eager ones by annotation."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._timelines.activities import ProfilerRecording, mark_of
from amanda_tools._timelines.tensorflow_profiler import ProfilerUse
from amanda_tools._timelines.xplane import Names
from amanda_tools.kernels.annotations import annotate
from amanda_tools.kernels.recordings import ProfilerRecorder


class TensorFlowRecorder(ProfilerRecorder):
    """Uses names of graph nodes, which kernels of graphs carry; annotates eager operators."""

    def __init__(self, shapes: bool, limit: int) -> None:
        super().__init__(shapes, limit)
        self._recording = ProfilerUse()
        self._names = Names()

    def start(self) -> None:
        self._recording.watch()
        self._recording.start()

    def stop(self) -> ProfilerRecording:
        found = self._recording.stop(self._names)
        self.problem = self._recording.problem
        return found

    def watch(self, context: OpContext, op: OpDescription) -> None:
        if context.runs_at_once:
            runs = context.get_op() if context.is_forward() else context.get_backward_op()
            self._names.add_eager(op.id, runs.type)
            annotate(context, lambda: self._mark(op.id))

    def _mark(self, op_id: str) -> Any:
        if not self._recording.runs or not self.is_within_limit():
            # Recordings of the program itself have no marks of this tool.
            return None
        return tf.profiler.experimental.Trace(mark_of(op_id))

    def watch_outputs(self, context: OpContext, op: OpDescription) -> None:
        if not context.runs_at_once:
            self._names.note(context, op)


RECORDER = TensorFlowRecorder
