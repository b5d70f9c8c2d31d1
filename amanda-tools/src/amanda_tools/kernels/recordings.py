"""Recordings of profilers in one form, and the interface of a profiler's recorder."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from amanda import Driver, OpContext
from amanda.errors import CapabilityError
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

    framework: ClassVar[str]

    def __init__(self, shapes: bool, limit: int) -> None:
        self.shapes = shapes
        self.limit = limit
        self.executions = 0
        self.not_recorded = 0
        self.problem = ""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the profiler.

        Raises:
            CapabilityError: the profiler runs already.
        """

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


_MODULES: Mapping[str, str] = {
    "pytorch": "amanda_tools.kernels.pytorch",
    "tensorflow": "amanda_tools.kernels.tensorflow",
}
"""Framework to the module with its ``RECORDER``."""


def has_profiler(namespace: str) -> bool:
    """True if there is a profiler that records operators of a namespace."""
    return namespace.partition("/")[0] in _MODULES


def framework_of(driver: Driver) -> str:
    """Return the framework whose profiler records for a driver; "" if there is none."""
    return driver.namespace.tags[0] if has_profiler(driver.namespace) else ""


def check_drivers(drivers: Sequence[Driver], *, is_late: bool) -> None:
    """Check that the drivers of a scope can be recorded.

    Args:
        drivers: drivers that the scope begins to use.
        is_late: their framework was imported while the program ran; then one without a profiler
            must not end the program.

    Raises:
        CapabilityError: none of them has a profiler.
    """
    if drivers and not is_late and not any(map(framework_of, drivers)):
        names = ", ".join(driver.name for driver in drivers)
        raise CapabilityError(
            f"tool kernels knows no profiler for the driver {names}: it records PyTorch and "
            "TensorFlow; leave it out, the tool profile measures the time of any operator"
        )


def recorder_for(framework: str, shapes: bool, limit: int) -> ProfilerRecorder:
    """Make the recorder of a framework that has one."""
    recorder: type[ProfilerRecorder] = importlib.import_module(_MODULES[framework]).RECORDER
    return recorder(shapes, limit)
