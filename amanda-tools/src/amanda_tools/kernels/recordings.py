"""What a profiler recorded, operator by operator, whichever profiler it was."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import attrs

from amanda import Driver, OpContext
from amanda.errors import CapabilityError
from amanda.tools.description import OpDescription

MARK = "amanda/op:"
"""What the name of an annotation around an operator begins with; its id follows."""


@attrs.frozen
class Activity:
    """A kernel on a device, or what the CPU did for an operator.

    Attributes:
        op: id of the operator; "" if it belongs to none.
        name: as the profiler gives it.
        device: ``cpu``, ``cuda:0``.
        start: microseconds on the profiler's clock.
        duration: microseconds; of a CPU activity without the activities within it, so that
            sums count nothing twice.
        span: microseconds from its begin to its end.
        track: where it ran: a thread, or a stream of the device.
        launch: microseconds that the call took which launched it; None on the CPU.
        waited: microseconds from the begin of that call to the kernel's own; None on the CPU.
        bytes: moved by a copy or a fill, else the size of the tensors that the activity was
            given; None if the profiler does not tell.
    """

    op: str
    name: str
    device: str
    start: float
    duration: float
    span: float
    track: str
    launch: float | None = None
    waited: float | None = None
    bytes: int | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether it ran on a device of its own."""
        return self.device != "cpu"


@attrs.frozen
class OpSpan:
    """An operator that ran, as the profiler saw it.

    Attributes:
        op: its id.
        start, span: microseconds.
        track: its thread.
    """

    op: str
    start: float
    span: float
    track: str


@attrs.define
class ProfilerRecording:
    """What a profiler recorded.

    Attributes:
        activities: in no particular order.
        executions: of operators that are annotated; empty where kernels name their operators.
        ambiguous: activities whose name several operators bear; the first one has them.
    """

    activities: list[Activity] = attrs.field(factory=list)
    executions: list[OpSpan] = attrs.field(factory=list)
    ambiguous: int = 0

    def extend(self, other: ProfilerRecording) -> None:
        """Add another recording to this one."""
        self.activities += other.activities
        self.executions += other.executions
        self.ambiguous += other.ambiguous


@attrs.frozen
class Settings:
    """How to record.

    Attributes:
        shapes: note the shapes of tensors, for bytes.
        limit: executions to record; eager operators only.
    """

    shapes: bool
    limit: int


class ProfilerRecorder(abc.ABC):
    """Runs the profiler of a framework, and tells operators apart in what it records.

    Attributes:
        executions: that were annotated, or would have been but for the limit.
        not_recorded: those that came after the limit.
        problem: what went wrong while it recorded, "" if nothing did.
    """

    framework: ClassVar[str]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.executions = 0
        self.not_recorded = 0
        self.problem = ""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the profiler.

        Raises:
            CapabilityError: it runs already.
        """

    @abc.abstractmethod
    def stop(self) -> ProfilerRecording:
        """Stop the profiler; what it recorded. Harmless when it does not run."""

    @abc.abstractmethod
    def watch(self, context: OpContext, op: OpDescription) -> None:
        """Mark the executions of an operator, in an analysis before it."""

    def is_within_limit(self) -> bool:
        """Count one more execution; whether it is to be recorded. At the limit
        :meth:`at_limit` is called."""
        self.executions += 1
        if self.executions <= self.settings.limit:
            return True
        self.not_recorded += 1
        self.at_limit()
        return False

    def at_limit(self) -> None:
        """No eager operator is annotated any more."""

    def watch_outputs(self, context: OpContext, op: OpDescription) -> None:
        """Look at an operator in an analysis after it."""


_MODULES: Mapping[str, str] = {
    "pytorch": "amanda_tools.kernels.pytorch",
    "tensorflow": "amanda_tools.kernels.tensorflow",
}
_REFUSED: Mapping[str, str] = {
    "torch-graph": "what torch.compile makes of a graph are kernels of many operators at once; "
    "use torch-eager, which is the default",
}


def has_profiler(namespace: str) -> bool:
    """Whether there is a profiler that records operators of a namespace."""
    return namespace.partition("/")[0] in _MODULES


def framework_of(driver: Driver) -> str:
    """The framework whose profiler records for a driver; "" if none does."""
    return driver.namespace.tags[0] if has_profiler(driver.namespace) else ""


def check_drivers(drivers: Sequence[Driver], *, is_late: bool) -> None:
    """See that there is a profiler for the drivers of a scope.

    Args:
        drivers: that the scope has begun to use.
        is_late: whether their framework was imported while the program ran, which a
            framework without a profiler must not end.

    Raises:
        CapabilityError: there is none for any of them, or one cannot be served.
    """
    for driver in drivers:
        if driver.name in _REFUSED:
            raise CapabilityError(
                f"tool kernels cannot tell the kernels of the driver {driver.name} apart: "
                f"{_REFUSED[driver.name]}"
            )
    if drivers and not is_late and not any(map(framework_of, drivers)):
        names = ", ".join(driver.name for driver in drivers)
        raise CapabilityError(
            f"tool kernels knows no profiler for the driver {names}: it records PyTorch and "
            "TensorFlow; leave it out, the tool profile measures the time of any operator"
        )


def recorder_for(framework: str, settings: Settings) -> ProfilerRecorder:
    """A recorder for a framework that has one."""
    make: Callable[[Settings], ProfilerRecorder] = importlib.import_module(
        _MODULES[framework]
    ).RECORDER
    return make(settings)
