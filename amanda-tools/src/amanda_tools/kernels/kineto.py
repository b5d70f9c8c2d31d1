"""Assigns kernels to operators in the trace that PyTorch's profiler (Kineto) exports.

The trace has the Chrome trace-event format: ``cpu_op`` and ``user_annotation`` on threads,
``cuda_runtime`` and ``cuda_driver`` for calls that launch, ``kernel``, ``gpu_memcpy`` and
``gpu_memset`` on streams. A launch and the kernel it launches have the same ``correlation``;
``External id`` leads to the activity that was running.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda_tools._timelines.activities import Activity, OpSpan, ProfilerRecording, marked_op

_LAUNCHES = frozenset(
    {"cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime"}
)
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})

_ENGINE = "autograd::engine::evaluate_function"
"""Surrounds each node in the backward pass: its own time is the engine's and that of our hooks."""

_ITEM_SIZES = {
    "bool": 1, "unsigned char": 1, "signed char": 1, "short": 2, "short int": 2, "int": 4,
    "long": 8, "long int": 8, "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2,
    "c10::complex<float>": 8, "c10::complex<double>": 16, "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element by Kineto's name of its type."""


@attrs.define(eq=False)
class Host:
    """An event on a thread: an activity, an annotation or a launch.

    Attributes:
        event: the event of the trace.
        op: id of its operator; "" without one.
        activity: the innermost activity around the event, or the event itself.
        inner: microseconds of the activities directly within it.
    """

    event: Mapping[str, Any]
    op: str
    activity: Host | None
    inner: float = 0.0

    @property
    def end(self) -> float:
        """End in microseconds."""
        return float(self.event["ts"] + self.event.get("dur", 0.0))


class Threads:
    """Activities, annotations and launches on threads, and the operators they belong to.

    Attributes:
        activities: all activities.
        executions: annotations of operators.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.activities: list[Host] = []
        self.executions: list[Host] = []
        self._launches: dict[int, Host] = {}
        self._by_external_id: dict[int, Host] = {}
        threads: dict[Any, list[Mapping[str, Any]]] = collections.defaultdict(list)
        for event in events:
            if event.get("ph") == "X" and event.get("cat") in _HOST | _LAUNCHES:
                threads[event["pid"], event["tid"]].append(event)
        for part in threads.values():
            # Of two that begin together the longer one contains the other.
            part.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
            self._nest(part)

    def _nest(self, events: Sequence[Mapping[str, Any]]) -> None:
        stack: list[Host] = []
        for event in events:
            while stack and stack[-1].end <= event["ts"]:
                stack.pop()
            outer = stack[-1] if stack else None
            host = Host(event, outer.op if outer else "", outer.activity if outer else None)
            if event["cat"] in _LAUNCHES:
                if (number := _argument(event, "correlation")) is not None:
                    self._launches[number] = host
                continue
            if outer is not None:
                outer.inner += event.get("dur", 0.0)
            self._note(host)
            stack.append(host)

    def _note(self, host: Host) -> None:
        name = host.event["name"]
        if name.startswith(_ENGINE):
            return
        if host.event["cat"] == "cpu_op":
            host.activity = host
            self.activities.append(host)
            if (number := _argument(host.event, "External id")) is not None:
                self._by_external_id[number] = host
        elif (op_id := marked_op(name)) is not None:
            host.op = op_id
            self.executions.append(host)

    def launch_of(self, kernel: Mapping[str, Any]) -> tuple[Host | None, Host | None]:
        """Return the launch of a kernel, if it was recorded, and the activity that launched it."""
        launch = self._launches.get(_argument(kernel, "correlation") or 0)
        if launch is not None:
            return launch, launch.activity
        return None, self._by_external_id.get(_argument(kernel, "External id") or 0)


def recording_of(events: Sequence[Mapping[str, Any]], origin: float = 0.0) -> ProfilerRecording:
    """Read a trace in which executions of operators are annotated with :data:`MARK`.

    Args:
        events: the events.
        origin: microseconds of the trace's zero, on the clock of the recording.
    """
    threads = Threads(events)
    recording = ProfilerRecording()
    for host in threads.executions:
        event = host.event
        recording.executions.append(
            OpSpan(host.op, origin + event["ts"], event.get("dur", 0.0), _thread(event))
        )
    for host in threads.activities:
        event = host.event
        span = event.get("dur", 0.0)
        recording.activities.append(
            Activity(
                op=host.op,
                name=event["name"],
                device="cpu",
                start=origin + event["ts"],
                # Rounding of the trace can make the inner activities longer than the outer one.
                duration=max(span - host.inner, 0.0),
                span=span,
                track=_thread(event),
                bytes=given_bytes(event),
            )
        )
    kernels = (e for e in events if e.get("ph") == "X" and e.get("cat") in _KERNELS)
    recording.activities += [_kernel(e, origin, *threads.launch_of(e)) for e in kernels]
    return recording


def _kernel(
    event: Mapping[str, Any], origin: float, launch: Host | None, activity: Host | None
) -> Activity:
    arguments = event.get("args", {})
    span = event.get("dur", 0.0)
    # Copies and fills have the number of bytes; kernels do not.
    moved = arguments.get("bytes")
    if moved is None and activity is not None:
        moved = given_bytes(activity.event)
    source = launch or activity
    device = arguments.get("device", arguments.get("Device Id", 0))
    return Activity(
        op=source.op if source is not None else "",
        name=event["name"],
        device=f"cuda:{device}",
        start=origin + event["ts"],
        duration=span,
        span=span,
        track=f"cuda:{device} stream {arguments.get('stream', event.get('tid'))}",
        launch=launch.event.get("dur", 0.0) if launch is not None else None,
        waited=max(event["ts"] - launch.event["ts"], 0.0) if launch is not None else None,
        bytes=moved,
    )


def _thread(event: Mapping[str, Any]) -> str:
    return f"thread {event['tid']}"


def _argument(event: Mapping[str, Any], name: str) -> int | None:
    value = event.get("args", {}).get(name)
    return int(value) if value is not None else None


def given_bytes(event: Mapping[str, Any]) -> int | None:
    """Return the bytes of the tensors that an activity was given, from their shapes and types.

    None if shapes were not recorded, or for lists of tensors, whose types the trace does not have.
    """
    arguments = event.get("args", {})
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if shapes is None or types is None or "TensorList" in types or "GenericList" in types:
        return None
    sizes: list[int] = [
        math.prod(shape) * _ITEM_SIZES[kind]
        for shape, kind in zip(shapes, types, strict=False)
        if kind in _ITEM_SIZES
    ]
    return sum(sizes)
