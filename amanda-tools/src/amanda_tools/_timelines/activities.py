"""The records of profilers, in one form: activities and executions of operators."""

from __future__ import annotations

from urllib.parse import quote, unquote

import attrs

MARK = "amanda/op:"
"""Prefix of the annotation around an operator; the operator's id follows."""

_PLAIN = "/.:@-_ ()[]<>,+*="
"""Characters of ids, besides letters and digits, that annotations hold as they are."""


def mark_of(op_id: str) -> str:
    """Return the name of the annotation around an operator, from which the id can be read.

    A module's name, and with it an id, may hold anything. PyTorch's profiler refuses lone
    surrogates, and writes quotation marks, backslashes and line breaks into its JSON as they are
    (2.13).
    """
    return MARK + quote(op_id, _PLAIN, errors="surrogatepass")


def marked_op(name: str) -> str | None:
    """Return the operator's id in the name of an annotation; None for annotations of others."""
    if not name.startswith(MARK):
        return None
    return unquote(name.removeprefix(MARK), errors="surrogatepass")


@attrs.frozen
class Activity:
    """A kernel on a device, or an activity of the CPU.

    Attributes:
        op: id of the operator; "" if it belongs to none.
        name: name that the profiler gives.
        device: ``cpu``, ``cuda:0``.
        start: microseconds of ``time.perf_counter()`` in what a recorder returns, else of the
            profiler's clock.
        duration: microseconds; of a CPU activity without the activities within it, so that sums
            count nothing twice.
        span: microseconds from begin to end.
        track: the thread, or the stream of the device.
        launch: microseconds of the call that launched it; None on the CPU.
        waited: microseconds from the begin of that call to the kernel's own; None on the CPU.
        bytes: bytes moved by a copy or fill, else of the tensors that the activity was given; None
            if unknown.
        thread: native id of the thread, or the number of the stream; 0 if unknown.
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
    thread: int = 0

    @property
    def begin(self) -> float:
        """Time at which the program requested it: its start, or that of the launching call."""
        return self.start - (self.waited or 0.0)

    @property
    def is_kernel(self) -> bool:
        """True if it ran on a device other than the CPU."""
        return self.device != "cpu"


@attrs.frozen
class OpSpan:
    """One execution of an operator, as the profiler's annotation around it shows it.

    Attributes:
        op: id of the operator.
        start, span: microseconds.
        track: the thread.
    """

    op: str
    start: float
    span: float
    track: str


@attrs.define
class ProfilerRecording:
    """The record of a profiler.

    Attributes:
        activities: in no particular order.
        executions: executions of annotated operators; empty if kernels carry names of operators.
        ambiguous: number of activities whose name belongs to several operators; the first one gets
            them.
    """

    activities: list[Activity] = attrs.field(factory=list)
    executions: list[OpSpan] = attrs.field(factory=list)
    ambiguous: int = 0

    def extend(self, other: ProfilerRecording) -> None:
        """Add another recording to this one."""
        self.activities += other.activities
        self.executions += other.executions
        self.ambiguous += other.ambiguous
