"""The interface of a profiler's recorder, and the module of each framework with one.

``start()`` begins to record, ``watch(context, op)`` marks the executions of an operator, and
``stop()`` returns the activities and executions as a ``ProfilerRecording``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._timelines.activities import ProfilerRecording


class ProfilerRecorder(abc.ABC):
    """Runs the profiler of a framework, and marks operators in what it records.

    Args:
        shapes: note shapes of tensors, for bytes.
        limit: executions of eager operators to record.

    Attributes:
        executions: executions so far, beyond the limit as well.
        not_recorded: executions beyond the limit.
        problem: text about a failure while recording; "" without one.
    """

    def __init__(self, shapes: bool, limit: int) -> None:
        self.shapes = shapes
        self.limit = limit
        self.executions = 0
        self.not_recorded = 0
        self.problem = ""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the profiler; where the program uses it, :attr:`problem` says so."""

    @abc.abstractmethod
    def stop(self) -> ProfilerRecording:
        """Stop the profiler and return its recording; an empty one if it does not run."""

    @abc.abstractmethod
    def watch(self, context: OpContext, op: OpDescription) -> None:
        """Mark the executions of an operator, in an analysis before it."""

    def is_within_limit(self) -> bool:
        """Count an execution; return True if it is to be recorded, else call :meth:`at_limit`."""
        self.executions += 1
        if self.executions <= self.limit:
            return True
        self.not_recorded += 1
        self.at_limit()
        return False

    def at_limit(self) -> None:
        """Called when eager operators are no longer annotated."""

    def watch_outputs(self, context: OpContext, op: OpDescription) -> None:
        """Note names of an operator's nodes, in an analysis after it."""


MODULES: Mapping[str, str] = {
    "pytorch": "amanda_tools.kernels.pytorch",
    "tensorflow": "amanda_tools.kernels.tensorflow",
}
"""Framework, as the first tag of namespaces, to the module with its ``RECORDER``."""
