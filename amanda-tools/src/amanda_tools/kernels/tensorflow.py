"""Recording with TensorFlow's profiler: kernels of graphs by name, eager ones by annotation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from amanda import OpContext
from amanda.errors import CapabilityError
from amanda.tools.description import OpDescription
from amanda_tools.kernels.annotations import annotate
from amanda_tools.kernels.recordings import MARK, ProfilerRecorder, ProfilerRecording, Settings
from amanda_tools.kernels.xplane import Names, planes_in, recording_of, vanilla_name

_DETAILS = 2
"""Level of the host tracer at which threads record each kernel."""


class TensorFlowRecorder(ProfilerRecorder):
    """Uses names of graph nodes, which kernels of graphs carry; annotates eager operators."""

    framework = "tensorflow"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._names = Names()

    def start(self) -> None:
        try:
            folder = tempfile.TemporaryDirectory(prefix="amanda-kernels-")
        except OSError as error:
            # The program runs all the same.
            self.problem = f"there is no place for its temporary files: {error}"
            return
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_DETAILS)
        try:
            tf.profiler.experimental.start(folder.name, options)
        except tf.errors.AlreadyExistsError as error:
            folder.cleanup()
            raise CapabilityError(
                "tool kernels needs TensorFlow's profiler, which serves one user at a time and "
                "is in use; take the other one out of the program"
            ) from error
        self._folder = folder

    def stop(self) -> ProfilerRecording:
        folder, self._folder = self._folder, None
        if folder is None:
            return ProfilerRecording()
        with folder:
            try:
                tf.profiler.experimental.stop()
            except tf.errors.UnavailableError:
                self.problem = "the program has stopped the profiler"
                return ProfilerRecording()
            files = sorted(Path(folder.name).rglob("*.xplane.pb"))
            return recording_of(planes_in(file.read_bytes() for file in files), self._names)

    def watch(self, context: OpContext, op: OpDescription) -> None:
        if context.namespace.tags[-1] == "eager":
            annotate(context, lambda: self._mark(op.id))

    def _mark(self, op_id: str) -> Any:
        mark = tf.profiler.experimental.Trace
        return mark(MARK + op_id) if self.is_within_limit() else None

    def watch_outputs(self, context: OpContext, op: OpDescription) -> None:
        if context.namespace.tags[-1] == "eager":
            return
        tensors = context.get_outputs() if context.is_forward() else context.get_grad_inputs()
        nodes = {tensor.op.name for tensor in tensors or () if tensor is not None}
        if context.is_forward():
            # In loops, and without outputs, the id has the node's path, with the type appended
            # where the name lacks it.
            path = op.id.partition("/")[2]
            ends = {vanilla_name(node) for node in nodes} or {path.rpartition("/")[2]}
            paths = (path, path.removesuffix(f"/{op.name}"))
            nodes |= {p for p in paths if any(f"/{p}".endswith(f"/{end}") for end in ends)}
        for node in nodes:
            self._names.add(node, op.id)


RECORDER = TensorFlowRecorder
