"""``profile``: time, calls, output memory and saved memory of every operator and module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal

import attrs

from amanda import OpContext
from amanda.driver import Driver
from amanda.inline import MemoryChange, MemoryUse
from amanda.results import Chart, Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.per_step import (
    charts_by,
    grouped,
    has_steps,
    in_step,
    per_step_by_id,
    with_steps,
)
from amanda_tools._bases.phases import MODEL, PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.op_table import has_activation
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._operators.saved_tensors import saved_tensors
from amanda_tools._operators.source_lines import source_of
from amanda_tools._operators.written_bytes import WrittenBytes
from amanda_tools._output.folding import folded_rows
from amanda_tools._output.ranked_charts import lines_over_steps
from amanda_tools._output.units import format_short, share_text
from amanda_tools._timelines import chrome
from amanda_tools._timelines.memory import device_bytes, synchronize
from amanda_tools._timelines.timeline import Stretch, Timeline, Total

__all__ = ["ProfileOptions", "ProfileTool"]

SORTS = {"time": "seconds", "calls": "calls", "memory": "output_bytes", "saved": "saved_bytes"}
"""Values of the option ``sort``, and the key of a row that each stands for."""


@attrs.frozen(kw_only=True)
class ProfileOptions(PhaseOptions):
    """The options of ``profile``.

    Attributes:
        by: grouping of the largest table: op, type or module.
        sort: order of its rows: time, calls, memory or saved.
        sync: wait for CUDA devices before reading the clock, so that times are of their work and
            not of its launch; slower.
        memory: sample the memory in use before and after each execution.
        csv: also write the rows of all operators as a table.
        limit: executions that the timeline keeps; 0 for no timeline.
    """

    by: Literal["op", "type", "module"] = "op"
    sort: Literal["time", "calls", "memory", "saved"] = "time"
    sync: bool = False
    memory: bool = True
    csv: bool = True
    limit: int = attrs.field(default=5_000_000, validator=attrs.validators.ge(0))


_ENDS = "seconds_min", "seconds_max"
_SUMMED = "calls", "seconds", "output_bytes", "saved_bytes", "saved_unknown", *_ENDS
"""Figures of rows that groups of them sum up."""

_MOST_SPANS = 4000
"""Operators of a step that a page shows over time, the longest ones."""

_SERIES = ("forward", "backward", "optimizer", "other", "setup")
"""Parts of a step, in the order of the colours in other charts."""

_NO_CALLS = Total()

_GRAPHS = ("function", "graph")
"""Ends of the namespaces of TensorFlow's graphs."""


def _spread(step: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[str, str]:
    """Return the least and the most milliseconds of a step, and those of the run."""
    low, high = step["seconds_min"], step["seconds_max"]
    steps = f"{1000 * low:.3f} to {1000 * high:.3f}" if low < high else ""
    return steps, f"{1000 * run['seconds']:.3f}"


def _typical(steps: Sequence[Total]) -> dict[str, Any]:
    """Return the figures of an operator in a step, from the sums of the last steps."""
    calls = steps[-1].calls
    seconds = [of.seconds for of in steps if of.calls == calls]
    ends = {"seconds_min": min(seconds), "seconds_max": max(seconds)}
    return {"calls": calls, "seconds": median(seconds), **ends}


def _saved_text(of: Mapping[str, Any]) -> str:
    return ("≥ " if of["saved_unknown"] else "") + format_short(of["saved_bytes"], "B")


def _title(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the title of the largest table: milliseconds of a step, or of the run."""
    found = [
        [
            1000 * sum(row["seconds"] for row in part if row["direction"] == way)
            for way in ("forward", "backward")
        ]
        for part in (in_step(rows), rows)
    ]
    texts = [f"{forward:.1f} ms forward, {backward:.1f} ms backward" for forward, backward in found]
    if not has_steps(rows):
        return f"profile: {texts[1]}, in operators"
    step = "of a step, the median of the last ones"
    return f"profile: {texts[0]}, in operators {step} ({texts[1]} in the run)"


class ProfileTool(PrintingTool[ProfileOptions]):
    """Measures time, calls, memory, and memory saved for backward.

    Example: ``amanda run -t profile:by=module -o out -- train.py``

    Attributes:
        timeline: spans of all executions.
    """

    name = "profile"
    figures = ("calls", "seconds")
    shows_training = True
    Options = ProfileOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        wait = synchronize if self.options.sync else None
        self.timeline = Timeline(self.options.limit, synchronize=wait)
        self._ops: dict[str, OpDescription] = {}
        self._sources: dict[str, str] = {}
        self._written = WrittenBytes()
        self._saved: dict[str, tuple[dict[int, int], int]] = {}
        self._deltas: dict[str, MemoryChange] = {}
        self._memory = MemoryUse()
        self._steps: tuple[list[tuple[float, float]], list[Mapping[str, Total]]] = [], []
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_outputs, require_outputs=True)
        self.add_inst_for_op(self._analyse, backward=True)
        self.add_inst_for_iteration(self._written.begin_step)
        self.add_inst_for_iteration(self._written.end_step, end=True)
        watch = self.timeline.watch_outputs
        self.add_inst_for_op(watch, backward=True, require_outputs=True)

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Start watching the program's use of TensorFlow's profiler."""
        super().enter_scope(drivers)
        self.timeline.begin(drivers)

    def exit_scope(self) -> None:
        """Add the times of operators of graphs."""
        self.timeline.close()

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        if self.shows(context) or op.id not in self._ops:
            self._ops[op.id] = op
        if context.is_forward():
            self._sources[op.id] = source_of(context)
        if not self.options.memory or not context.runs_at_once:
            # In a graph other operators run between the routines around one.
            self.timeline.watch(context)
            return
        # Outside of the timeline's routines: looking at the memory must not count as the operator's
        # time.
        self._choose_memory()
        delta = self._deltas.setdefault(op.id, MemoryChange(self._memory))
        insert_before(context, delta.before)
        self.timeline.watch(context)
        insert_after(context, delta.after)

    def _choose_memory(self) -> None:
        """Choose the memory to sample: of tensors on the CUDA device in use, else of the process.

        A program may begin to use a device at any time.
        """
        memory, used = self._memory, device_bytes if device_bytes() else None
        if used is not memory.used:
            memory.used, memory.peak = used, 0

    def _analyse_outputs(self, context: OpContext) -> None:
        op_id = context.get_op_id()
        self.timeline.watch_outputs(context)
        self._saved[op_id] = saved_tensors(context)
        if has_activation(self._ops[op_id].type):
            self._written.note(op_id, context)

    # -- result -----------------------------------------------------------

    def momentary_figures(self) -> dict[str, float]:
        """``memory_bytes`` at the end of a step, and ``peak_bytes``, the largest memory sampled at
        begins and ends of operators since the previous step; {} where ``memory_delta`` is null."""
        if not self._deltas:
            return {}
        now = self._memory.read()
        peak, self._memory.peak = self._memory.peak, 0
        return {"memory_bytes": now, "peak_bytes": peak}

    def op_counts(self) -> Mapping[str, Sequence[float]]:
        """Calls and nanoseconds of operators so far, if the timeline lacks spans."""
        return {} if self.timeline.keeps_all else self.timeline.sums()

    def _last_step(self) -> Stretch | None:
        """Return the last step of the timeline; None if its spans were not kept."""
        times = self.step_times
        return self.timeline.between(*times) if times else None

    def _per_step(self) -> dict[str, dict[str, Any]]:
        """Return figures of a step by operator id; {} if unknown.

        The calls of the last step, and the median time, with the least and the most, of the last
        steps in which an operator has as many calls.
        """
        times = self.times_of_steps
        if self._steps[0] != times:
            steps = [self.timeline.between(*each) for each in times]
            self._steps = times, [step.totals for step in steps if step is not None]
        if totals := self._steps[1]:
            parts = {op_id: [of.get(op_id, _NO_CALLS) for of in totals] for op_id in self._ops}
            return {op_id: _typical(of_steps) for op_id, of_steps in parts.items()}
        if any(op.namespace.endswith(_GRAPHS) for op in self._ops.values()):
            # Their times are known after the run.
            return {}
        counts = per_step_by_id(self.timeline.op_ids, self.op_counts_of_step())
        return {
            op_id: {"calls": of["calls"], "seconds": of["nanoseconds"] / 1e9}
            for op_id, of in counts.items()
        }

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator that ran to its end.

        ``calls``; ``seconds`` in all, ``mean``, ``shortest`` and ``longest``, in seconds; in
        ``per_step`` the calls of the last step, and ``seconds``, ``seconds_min`` and
        ``seconds_max``, the median, the least and the most of the last steps; ``source``.
        ``memory_delta``: bytes by which its executions together changed the memory of
        tensors on the CUDA device, or without one that of the process; null with ``memory=false``
        and in TensorFlow's graphs.
        Forward operators have ``output_bytes``, in graphs those of the last step, and
        ``saved_bytes`` of the first execution; ``saved_unknown`` counts tensors that hooks of the
        program keep in a form without tensors.
        """
        totals, steps = self.timeline.totals(), self._per_step()
        rows = []
        for op_id, op in self._ops.items():
            total = totals.get(op_id)
            if total is None:
                continue
            row = {
                **op.row(),
                "calls": total.calls,
                "seconds": total.seconds,
                "mean": total.seconds / total.calls,
                "shortest": total.shortest / 1e9,
                "longest": total.longest / 1e9,
                "memory_delta": delta.bytes if (delta := self._deltas.get(op_id)) else None,
                "source": self._sources.get(op.forward or op_id, ""),
            }
            if not op.forward:
                row["output_bytes"] = self._written.of(op_id)
                sizes, row["saved_unknown"] = self._saved.get(op_id, ({}, 0))
                row["saved_bytes"] = sum(sizes.values())
            rows.append(row)
        return with_steps(rows, steps, "calls")

    def summary(self) -> dict[str, Any]:
        """Time and calls in all, forward and backward, by type and by module.

        ``saved_bytes`` is what all operators together save for the backward pass; memory that
        several of them save counts once; a lower bound where ``saved_unknown`` is not 0.
        """
        rows = self.op_rows()
        saved = {address: n for part, _ in self._saved.values() for address, n in part.items()}
        found: dict[str, Any] = {
            "calls": sum(row["calls"] for row in rows),
            "saved_bytes": sum(saved.values()),
            "saved_unknown": sum(unknown for _, unknown in self._saved.values()),
        }
        for direction in ("forward", "backward"):
            part = [row for row in rows if row["direction"] == direction]
            found[f"seconds_{direction}"] = sum(row["seconds"] for row in part)
        for key in ("type", "module"):
            found[f"by_{key}"] = grouped(rows, itemgetter(key), _SUMMED)
        return found

    # -- for people -------------------------------------------------------

    def tables(self) -> Iterable[Table]:
        """Operators, types or modules, those with the most time (or other figure of ``sort``)
        first."""
        every = self.op_rows()
        rows, key, by = shown(every, self.options), SORTS[self.options.sort], self.options.by
        placed = folded_rows(rows, itemgetter("calls"))
        groups, runs = (
            grouped(part, itemgetter(by), _SUMMED) for part in (in_step(placed), placed)
        )
        total = sum(of["seconds"] for of in groups.values())
        # TensorFlow's saved bytes cannot be seen.
        has_saved = any(of["saved_bytes"] or of["saved_unknown"] for of in groups.values())
        order = sorted(groups.items(), key=lambda item: (-item[1][key], -runs[item[0]][key]))
        lines = [
            (
                name,
                of["calls"],
                f"{1000 * of['seconds']:.3f}",
                share_text(of["seconds"], total),
                f"{1e6 * of['seconds'] / of['calls']:.1f}" if of["calls"] else "-",
                format_short(of["output_bytes"], "B"),
                *([_saved_text(of)] if has_saved else []),
                *(_spread(of, runs[name]) if has_steps(rows) else []),
            )
            for name, of in order
        ]
        last = ("ms of steps", "ms in the run") if has_steps(rows) else ()
        columns = (
            by,
            "calls",
            "ms",
            "share",
            "µs a call",
            "outputs",
            *(["saved"] if has_saved else []),
            *last,
        )
        yield Table(_title(rows), columns, lines)
        yield from other_phases("profile", every, self.options, ("calls", "seconds"))

    def charts(self) -> Iterable[Chart]:
        """Time by module and by type; the last step over time; duration and memory of steps."""
        listed = shown(self.op_rows(), self.options)
        yield from charts_by(("module", "type"), listed, "seconds", "time", "s")
        yield from self._time_line()
        figures = self.figures_of_steps()
        title = "duration of each step, tools included"
        yield from lines_over_steps(title, figures, {"time": "seconds"}, "s")
        both = {"peak": "peak_bytes", "at its end": "memory_bytes"}
        yield from lines_over_steps("memory per step", figures, both, "B")

    def _time_line(self) -> Iterable[Chart]:
        """Yield a chart of the operators of the last step over time, by module."""
        step = self._last_step()
        if step is None or not step.spans:
            return
        spans = step.spans
        if len(spans) > _MOST_SPANS:
            spans = sorted(spans, key=lambda span: -span.duration)[:_MOST_SPANS]
            spans.sort(key=lambda span: span.start)
        ops = [span.op for span in spans]
        series = [op.direction if op.phase in MODEL else op.phase for op in ops]
        yield Chart(
            title="the last step over time",
            kind="spans",
            labels=[self._ops[span.op.id].place for span in spans],
            names=[op.type if op.phase in MODEL else op.phase for op in ops],
            starts=[(span.start - step.begin) / 1e9 for span in spans],
            values={
                name: [
                    span.duration / 1e9 if of == name else None
                    for span, of in zip(spans, series, strict=True)
                ]
                for name in sorted(set(series), key=_SERIES.index)
            },
            unit="s",
            modules=True,
        )

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.csv`` and ``<stem>.timeline.json``."""
        written = [*super().write_files(folder, stem)]
        if self.options.limit:
            written.append(folder / f"{stem}.timeline.json")
            chrome.write_events(chrome.events(self.timeline, self._sources), written[-1])
        return written
