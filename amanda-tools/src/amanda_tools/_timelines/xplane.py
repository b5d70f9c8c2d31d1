"""Assigns kernels to operators in the planes that TensorFlow's profiler writes (XSpace).

A plane is the host or a device, a line a thread or a stream. A kernel of a graph carries the name
of its node, ``node:Type``; steps link the threads that run a graph to the call that started it. An
eager operator lies within our annotation on its thread. The time of an activity of the host is
without that of the activities within it, so that the sum for a thread never exceeds its wall time.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._timelines.activities import Activity, OpSpan, ProfilerRecording, marked_op

_HOST = "/host:CPU"
_DEVICE = "/device:"
_LOCAL = "EagerLocalExecute: "
_KERNEL = "EagerKernelExecute"
_STEP = "ExecutorState::Process"
_RUN = "FunctionRun"
_SESSION = "SessionRun"
_FUNCTION = re.compile(r"__(inference|forward|backward)_(.+?)_\d+")
_OWN = "amanda/variables"
"""Annotation of the driver of sessions around its runs that copy variables: operators of the user's
graph run there, but not for the program."""
_FOLDING = -1
"""The step in which TensorFlow runs kernels to fold constants, once per graph and not per run
(observed in 2.21)."""
_FRAME = re.compile(r"/_\d+/")
"""Inserted by TensorFlow between the name of a lowered loop or branch and those of its nodes."""
_CALL = re.compile(r"^amanda/run(_\d+)?/")
"""Put by TensorFlow before the names of nodes where it replaces the call of a function by them: the
function is the instrumented copy of a session run that needs queues, tables or iterators."""


class Names:
    """Maps names of graph nodes to operators."""

    def __init__(self) -> None:
        # Node name -> operator -> label of its graph (``step@1``).
        self._ops: dict[str, dict[str, str]] = collections.defaultdict(dict)
        self._labels: dict[str, list[str]] = collections.defaultdict(list)
        self._eager: dict[str, str] = {}
        # Node name -> its type, and the names of the nodes that it reads.
        self._reads: dict[str, tuple[str, list[str]]] = {}

    def add_eager(self, op_id: str, kind: str) -> None:
        """Note the registered type of an eager operator."""
        self._eager[op_id] = kind

    def may_run(self, op_id: str, kind: str) -> bool:
        """True if an eager operator runs kernels of a type; routines around it may run others."""
        return self._eager.get(op_id, kind) == kind

    def add(self, node: str, op_id: str, path: str = "") -> None:
        """Note the name of an operator's node, in its graph or in the instrumented copy.

        Args:
            node: the name; followed by ``:`` and a type if only kernels of that type belong to it.
            path: the operator's name with its function or graph, as ``get_node_name()`` gives it.
        """
        label = (path or op_id).partition("/")[0]
        self._ops[node].setdefault(op_id, label)
        labels = self._labels[label.partition("@")[0]]
        if label not in labels:
            labels.append(label)

    def note(self, context: OpContext, op: OpDescription) -> None:
        """Note the nodes of an operator of a graph, in an analysis after it."""
        tensors = context.get_outputs() if context.is_forward() else context.get_grad_inputs()
        made = {tensor.op.name: tensor.op for tensor in tensors or () if tensor is not None}
        self._reads |= {n: (o.type, [t.op.name for t in o.inputs]) for n, o in made.items()}
        nodes = set(made)
        if context.is_forward():
            # In loops, and without outputs, its name in the graph has the node's path, with the
            # type appended where the node's name lacks it.
            path = context.get_node_name().partition("/")[2]
            short = path.removesuffix(f"/{op.name}")
            if nodes:
                ends = [f"/{node}" for node in nodes]
                nodes |= {p for p in (path, short) if any(f"/{p}".endswith(end) for end in ends)}
            else:
                # `short` may be another operator's node, the scope of this one; of another type
                # then.
                nodes = {path, f"{short}:{op.name}"}
        for node in nodes:
            self.add(node, op.id, context.get_node_name())

    def find(self, node: str, kind: str, function: Function | None) -> list[str]:
        """Return the ids of the operators with a node of this name; of the function if it has any.

        Args:
            node: name that a kernel carries.
            kind: the kernel's type.
            function: the function that runs, if known.
        """
        node = _CALL.sub("", node)
        fused, frames = kind.partition("_Fused")[2], _FRAME.split(node)
        names = [self._product(n, fused) for n in (node, _FRAME.sub("/", node), frames[-1])]
        keys = (key for name in names for key in (name, f"{name}:{kind}"))
        found = next((self._ops[key] for key in keys if key in self._ops), {})
        if len(found) < 2 or function is None:
            return list(found)
        of_name = [i for i, label in found.items() if label.partition("@")[0] == function.name]
        labels = self._labels.get(function.name, [])
        # Functions of one name are distinguished by their order, if all of them have run.
        if len(labels) != function.count:
            return of_name or list(found)
        number = f"@{function.number}" if function.number else ""
        of_label = [i for i, label in found.items() if label == function.name + number]
        return of_label or of_name or list(found)

    def _product(self, node: str, kind: str) -> str:
        """The nearest node of a type that a node computes with, or the node itself.

        The kernel of a product with a bias and an activation, ``_FusedMatMul``, carries the name of
        the last of them.
        """
        waiting, seen = collections.deque([node] if kind else []), {node}
        while waiting:
            name = waiting.popleft()
            found, inputs = self._reads.get(name, ("", []))
            if found == kind:
                return name
            # What is added behind a bias is another tensor, perhaps also of a product.
            biased = [n for n in inputs if self._reads.get(n, ("",))[0] == "BiasAdd"]
            waiting += (new for new in biased or inputs if new not in seen)
            seen.update(inputs)
        return node


@attrs.frozen
class Function:
    """A function that a thread has run.

    Attributes:
        name: its name in Python, or ``graph`` of a session.
        number: number of functions of that name that were run before it.
        count: number of functions of that name that were run.
    """

    name: str
    number: int = 0
    count: int = 1


@attrs.define(eq=False)
class LineEvent:
    """An event of a line, and the event around it.

    Attributes:
        name: name of the event; ``node:Type`` of a kernel.
        kind: type of a kernel's operator, else "".
        start, span: microseconds.
        stats: further facts by name.
        outer: the event around it.
        thread: native id of the thread, or number of the stream.
        inside: microseconds of the activities directly within it, if it is one.
    """

    name: str
    kind: str
    start: float
    span: float
    stats: Mapping[str, Any]
    outer: LineEvent | None = None
    thread: int = 0
    inside: float = 0.0

    @property
    def node(self) -> str:
        """The name of the graph's node whose kernel it is; "" for other events."""
        ending = f":{self.kind}"
        is_kernel = bool(self.kind) and self.name.endswith(ending)
        return self.name.removesuffix(ending) if is_kernel else ""

    @property
    def is_activity(self) -> bool:
        """True for kernels of a graph or of an eager operator."""
        return self.name == _KERNEL or bool(self.node)

    def around(self) -> Iterator[LineEvent]:
        """Yield the events around it, innermost first."""
        event = self.outer
        while event is not None:
            yield event
            event = event.outer


def recording_of(planes: Iterable[Any], names: Names, origin: float = 0.0) -> ProfilerRecording:
    """Read planes.

    Args:
        planes: planes of an ``XSpace``.
        names: node names of the operators in graphs.
        origin: microseconds of the begin of the profile, on the clock of the recording.
    """
    recording = ProfilerRecording()
    lines = [
        (plane.name, line, nest_events(plane, line, origin))
        for plane in planes
        for line in plane.lines
        if plane.name.startswith((_HOST, _DEVICE))
    ]
    functions = _steps(e for name, _, events in lines if name == _HOST for e in events)
    reader = _Reader(recording, names, functions)
    for name, line, events in lines:
        device = name.removeprefix(_DEVICE).lower()
        for event in events:
            if name == _HOST:
                reader.read_host(event, f"{line.name or 'thread'} {line.id}")
            else:
                reader.read_device(event, device, f"{device} {line.name}")
    return recording


def nest_events(plane: Any, line: Any, origin: float = 0.0) -> list[LineEvent]:
    """Return the events of a line in the order of their begin, each with the event around it."""
    found: list[LineEvent] = []
    stack: list[LineEvent] = []
    for item in sorted(line.events, key=lambda item: (item.offset_ps, -item.duration_ps)):
        metadata = plane.event_metadata[item.metadata_id]
        start = origin + line.timestamp_ns / 1e3 + item.offset_ps / 1e6
        event = LineEvent(
            metadata.name,
            metadata.display_name,
            start,
            item.duration_ps / 1e6,
            {plane.stat_metadata[s.metadata_id].name: _value(plane, s) for s in item.stats},
        )
        while stack and stack[-1].start + stack[-1].span <= start:
            stack.pop()
        event.outer = stack[-1] if stack else None
        # TensorFlow numbers the threads of its pools by hashes of 64 bits.
        event.thread = line.id & 0x7FFFFFFF
        stack.append(event)
        found.append(event)
        if event.is_activity:
            around = next((outer for outer in event.around() if outer.is_activity), None)
            if around is not None:
                around.inside += event.span
    return found


def _value(plane: Any, stat: Any) -> Any:
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return plane.stat_metadata[stat.ref_value].name
    return None if kind is None else getattr(stat, kind)


def _steps(events: Iterable[LineEvent]) -> dict[Any, Function | None]:
    """Return the function that each step of a graph runs, by the step's id; None if the program
    did not ask for the step."""
    runs: list[tuple[Any, tuple[str, str, str]]] = []
    steps: dict[Any, Function | None] = {_FOLDING: None}
    for event in sorted(events, key=lambda event: event.start):
        if event.name == _SESSION and "id" in event.stats:
            is_own = any(outer.name == _OWN for outer in event.around())
            steps[event.stats["id"]] = None if is_own else Function("graph")
        elif event.name == _RUN and "id" in event.stats:
            called = (outer.name.removeprefix(_LOCAL) for outer in event.around())
            match = next((m for m in map(_FUNCTION.fullmatch, called) if m is not None), None)
            if match is not None:
                runs.append((event.stats["id"], (match[1], match[2], match[0])))
    # Functions of one name, in the order in which they were first run.
    orders: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for _, (kind, name, full) in runs:
        if full not in orders[kind, name]:
            orders[kind, name].append(full)
    for step, (kind, name, full) in runs:
        order = orders[kind, name]
        steps[step] = Function(name, order.index(full), len(order))
    return steps


@attrs.define
class _Reader:
    """Turns events into activities and executions."""

    _recording: ProfilerRecording
    _names: Names
    _functions: Mapping[Any, Function | None]

    def read_host(self, event: LineEvent, track: str) -> None:
        """Read an event of a thread."""
        if (op_id := marked_op(event.name)) is not None:
            self._recording.executions.append(OpSpan(op_id, event.start, event.span, track))
        elif event.name == _KERNEL:
            self._add_eager(event, track)
        elif event.node:
            self._add_node(event, (event.node, event.kind), event.kind, "cpu", track)

    def read_device(self, event: LineEvent, device: str, track: str) -> None:
        """Read a kernel on a device; it names the operator of the host that launched it."""
        source = str(event.stats.get("tf_op") or "")
        node, _, kind = source.rpartition(":")
        if (op_id := marked_op(source)) is not None:
            self._add(event, op_id, event.name, device, track)
        elif kind:
            self._add_node(event, (node, kind), event.name, device, track)
        else:
            self._add(event, "", event.name, device, track)

    def _add_node(
        self, event: LineEvent, of: tuple[str, str], name: str, device: str, track: str
    ) -> None:
        """Add a kernel of a graph's node, unless a tool has inserted the node or the program did
        not ask for the step.

        Args:
            of: the node and its type.
        """
        step = next((e.stats.get("id") for e in event.around() if e.name == _STEP), None)
        function = self._functions.get(step)
        if step in self._functions and function is None:
            return
        found = self._names.find(*of, function)
        # Assigned to the first operator nevertheless: times then add up.
        self._recording.ambiguous += len(found) > 1
        owner = found[0] if found else ""
        if owner or not _is_inserted(of[0]):
            self._add(event, owner, name, device, track)

    def _add_eager(self, event: LineEvent, track: str) -> None:
        """Add the kernel of an eager operator, unless a routine of a tool has run it."""
        local = event.outer
        if local is None or not local.name.startswith(_LOCAL):
            return
        kind = local.name.removeprefix(_LOCAL)
        # The kernels of a called function are events of their own.
        if _FUNCTION.fullmatch(kind) is not None or any(
            _is_inserted(e.node) for e in event.around()
        ):
            return
        marks = (marked_op(e.name) for e in event.around())
        owner = next((op_id for op_id in marks if op_id is not None), "")
        if self._names.may_run(owner, kind):
            self._add(event, owner, kind, "cpu", track)

    def _add(self, event: LineEvent, op: str, name: str, device: str, track: str) -> None:
        own, moved = max(event.span - event.inside, 0.0), _moved(event.stats)
        times = (event.start, own, event.span)
        self._recording.activities.append(
            Activity(op, name, device, *times, track, bytes=moved, thread=event.thread)
        )


def _is_inserted(node: str) -> bool:
    """True if a tool has inserted a node into a graph."""
    return "/amanda/" in f"/{_CALL.sub('', node)}"


def _moved(stats: Mapping[str, Any]) -> int | None:
    """Return the bytes of a copy, from ``size:1024 ...`` in its details."""
    match = re.search(r"\b(?:size|num_bytes):(\d+)", str(stats.get("memcpy_details", "")))
    return int(match[1]) if match is not None else None


def began_at(planes: Iterable[Any]) -> int | None:
    """Return when the profile began, in nanoseconds of ``time.time_ns()``, if it tells."""
    stats = ((plane, stat) for plane in planes for stat in plane.stats)
    names = ((plane.stat_metadata[stat.metadata_id].name, stat) for plane, stat in stats)
    return next((s.uint64_value for name, s in names if name == "profile_start_time"), None)


def planes_in(contents: Iterable[bytes]) -> Iterator[Any]:
    """Yield the planes in files that the profiler has written."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for content in contents:
        yield from xplane_pb2.XSpace.FromString(content).planes
