"""When each operator ran: spans, and their file in the Chrome trace-event format."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from amanda import OpContext
from amanda.tools.reporting import OpDescription, describe, write_json


@attrs.frozen
class Span:
    """One execution of an operator.

    Attributes:
        op: the operator.
        start: nanoseconds since the timeline began.
        duration: nanoseconds between the routines before and after the operator.
        thread: the thread's native id.
    """

    op: OpDescription
    start: int
    duration: int
    thread: int


class Timeline:
    """The spans of all executions, up to a limit.

    A span lies between two instrumentation routines, so that it holds the cost
    of the instrumentation of this one operator too. Operators of a device that
    works asynchronously show the time of their launch.

    Args:
        limit: spans to keep; those after are counted only.

    Attributes:
        spans: the spans, in the order in which they ended.
        dropped: how many were not kept.
    """

    def __init__(self, limit: int) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self._limit = limit
        self._began = time.perf_counter_ns()

    def watch(self, context: OpContext) -> None:
        """Insert the routines that time an operator; called in an analysis before it."""
        watch = _Watch(self, describe(context))
        if context.is_forward():
            context.insert_before_op(watch.start, inputs=[])
            context.insert_after_op(watch.stop, outputs=[])
        else:
            context.insert_before_backward_op(watch.start, grad_outputs=[])
            context.insert_after_backward_op(watch.stop, grad_inputs=[])

    def add(self, op: OpDescription, start: int, end: int) -> None:
        """Keep a span, given in the nanoseconds of ``time.perf_counter_ns()``."""
        if len(self.spans) >= self._limit:
            self.dropped += 1
            return
        thread = threading.get_native_id()
        self.spans.append(Span(op, start - self._began, end - start, thread))

    def seconds(self) -> dict[str, float]:
        """Total time of each operator, by id."""
        totals: dict[str, int] = {}
        for span in self.spans:
            totals[span.op.id] = totals.get(span.op.id, 0) + span.duration
        return {op_id: nanoseconds / 1e9 for op_id, nanoseconds in totals.items()}

    def write(self, path: Path) -> None:
        """Write a file for Perfetto (ui.perfetto.dev) or ``chrome://tracing``."""
        write_json(path, {"traceEvents": list(self._events()), "displayTimeUnit": "ms"})

    def _events(self) -> Iterator[dict[str, Any]]:
        process = os.getpid()
        for span in self.spans:
            yield {
                "name": span.op.type,
                "cat": span.op.direction,
                "ph": "X",
                "ts": span.start / 1000,
                "dur": span.duration / 1000,
                "pid": process,
                "tid": span.thread,
                "args": {"id": span.op.id, "module": span.op.module},
            }


class _Watch:
    """The two routines of one operator."""

    def __init__(self, timeline: Timeline, op: OpDescription) -> None:
        self._timeline = timeline
        self._op = op
        self._started: dict[int, int] = {}

    def start(self) -> None:
        self._started[threading.get_ident()] = time.perf_counter_ns()

    def stop(self) -> None:
        end = time.perf_counter_ns()
        start = self._started.pop(threading.get_ident(), None)
        if start is not None:
            self._timeline.add(self._op, start, end)
