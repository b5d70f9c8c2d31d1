"""``kernels``: kernels and copies that each operator runs on the device, and their times."""

from __future__ import annotations

import collections
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from amanda import Driver, OpContext
from amanda.results import Chart, Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.phases import MODEL, PhaseOptions, other_phases
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._output.units import format_short, share_text
from amanda_tools._timelines.activities import Activity, ProfilerRecording
from amanda_tools._timelines.chrome import write_events
from amanda_tools.kernels import timeline_file
from amanda_tools.kernels.recordings import MODULES, ProfilerRecorder

_TYPES, _KERNELS = 12, 9
"""Bars of the chart, and kernels in it that have a colour of their own."""

_OTHERS = "others"

_NOTHING: Mapping[str, Any] = {"calls": 0, "duration_us": 0.0, "bytes": None, "ops": 0}
"""The figures of a kernel that does not run in a step."""

__all__ = ["KernelsOptions", "KernelsTool"]


@attrs.frozen(kw_only=True)
class KernelsOptions(PhaseOptions):
    """The options of ``kernels``.

    Attributes:
        by: grouping of the second table: op, type or module.
        shapes: note the shapes of tensors, which gives bytes and costs time (PyTorch).
        limit: executions of operators to record; of eager operators only.
        csv: also write a table with a line for each operator and kernel.
    """

    by: Literal["op", "type", "module"] = "type"
    shapes: bool = True
    limit: int = attrs.field(default=20_000, validator=attrs.validators.ge(0))
    csv: bool = True


class KernelsTool(PrintingTool[KernelsOptions]):
    """Assigns device kernels, or activities of the CPU, to operators.

    Example: ``amanda run -t kernels:by=type -o out -- train.py``

    Attributes:
        recording: activities and executions that the profilers recorded; complete after the scope.
    """

    name = "kernels"
    figures = ("device_us", "host_us")
    Options = KernelsOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recording = ProfilerRecording()
        self._ops: dict[str, OpDescription] = {}
        self._recorders: dict[str, ProfilerRecorder] = {}
        self._problems: list[str] = []
        self.depends_on(MappingTool.standard())
        for backward in (False, True):
            self.add_inst_for_op(self._analyse, backward=backward)
            self.add_inst_for_op(self._analyse_outputs, backward=backward, require_outputs=True)

    # -- life cycle -------------------------------------------------------

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Start the profilers of the drivers' frameworks."""
        super().enter_scope(drivers)
        for framework in dict.fromkeys(driver.namespace.tags[0] for driver in drivers):
            # A framework with several drivers (eager, session) has one profiler.
            if framework in MODULES and framework not in self._recorders:
                module = importlib.import_module(MODULES[framework])
                recorder = module.RECORDER(self.options.shapes, self.options.limit)
                recorder.start()
                self._recorders[framework] = recorder

    def exit_scope(self) -> None:
        """Stop the profilers and take their recordings."""
        recorders, self._recorders = self._recorders, {}
        for recorder in recorders.values():
            self.recording.extend(recorder.stop())
            if recorder.not_recorded:
                self._problems.append(
                    f"{recorder.not_recorded} executions came after the limit of "
                    f"{self.options.limit}"
                )
            if recorder.problem:
                self._problems.append(recorder.problem)

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        self._ops[op.id] = op
        recorder = self._recorders.get(context.namespace.tags[0])
        if recorder is not None:
            recorder.watch(context, op)

    def _analyse_outputs(self, context: OpContext) -> None:
        recorder = self._recorders.get(context.namespace.tags[0])
        if recorder is not None:
            recorder.watch_outputs(context, describe(context))

    # -- result -----------------------------------------------------------

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator.

        ``executions`` are those recorded; null where the profiler records kernels only, as it does
        of graphs. ``kernels`` is a list, the longest first, of ``name``, ``device``, ``calls``,
        ``duration_us``, ``launch_us``, ``waited_us`` and ``bytes``. ``activities`` is the number of
        their calls, ``device_us`` and ``host_us`` are sums of durations. On the host kernels are
        activities, each without the time of the activities within it. ``per_step`` has
        ``executions``, ``activities``, ``device_us`` and ``host_us`` of the last step.
        """
        step = self._of_step()
        whole, part = _OfOps(self.recording), None if step is None else _OfOps(step)
        rows = []
        for op_id, op in self._ops.items():
            row = {**op.row(), **whole.figures(op_id)}
            if part is not None:
                row["per_step"] = part.figures(op_id, row["executions"] is not None)
            rows.append({**row, "kernels": _merged(whole.activities[op_id])})
        return rows

    def _of_step(self) -> ProfilerRecording | None:
        """Return the recording of the last step; None without a complete one.

        In a program without modules a step begins with its backward pass, and is incomplete.
        """
        if self.step_times is None:
            return None
        begin, end = (1e6 * moment for moment in self.step_times)
        found = ProfilerRecording(
            [a for a in self.recording.activities if begin <= a.begin < end],
            [e for e in self.recording.executions if begin <= e.start < end],
        )
        forward = {op_id for op_id, op in self._ops.items() if op.phase == "forward"}
        return found if any(a.op in forward for a in found.activities) else None

    def summary(self) -> dict[str, Any]:
        """Times by kernel, type and module, and the fraction of them that belongs to operators.

        ``device_us`` and ``host_us`` are all that was recorded, ``device_attributed`` and
        ``host_attributed`` the fraction of it in operators, null without any; ``launches`` counts
        kernels on devices. ``by_kernel`` has the keys of a row's ``kernels``, and ``ops``, the
        number of operators that run it. ``by_type`` and ``by_module`` have ``ops``, ``calls``,
        ``device_us``, ``host_us`` and ``kernels``, microseconds by name. ``ambiguous`` counts
        activities whose name belongs to several operators; ``problems`` says what is missing.
        """
        activities = self.recording.activities
        found: dict[str, Any] = {**_times(activities)}
        for place, is_kernel in (("device", True), ("host", False)):
            part = [a for a in activities if a.is_kernel is is_kernel]
            total = sum(a.duration for a in part)
            inside = sum(a.duration for a in part if a.op)
            found[f"{place}_attributed"] = inside / total if total else None
        found["launches"] = sum(a.is_kernel for a in activities)
        found["by_kernel"] = {f"{k['name']} ({k['device']})": k for k in _merged(activities)}
        for key in ("type", "module"):
            found[f"by_{key}"] = self._grouped(key)
        known = {op.namespace for op in self._ops.values()}
        others = {name for name in known if name.partition("/")[0] not in MODULES}
        problems = [
            *self._problems,
            *(f"no profiler is known for {name}" for name in sorted(others)),
        ]
        return {**found, "ambiguous": self.recording.ambiguous, "problems": problems}

    def summary_of_steps(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the summary of steps, with the times of the last step in ``per_step``."""
        found = super().summary_of_steps(rows)
        step = self._of_step()
        if step is None:
            return found
        launches = sum(activity.is_kernel for activity in step.activities)
        times = {**_times(step.activities), "launches": launches}
        return {**found, "per_step": {**found["per_step"], **times}}

    def _is_shown(self, op: OpDescription) -> bool:
        return self.options.phases == "all" or op.phase in MODEL

    def _grouped(
        self,
        key: str,
        ops: Iterable[OpDescription] | None = None,
        recording: ProfilerRecording | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Sum times of operators by a field of their description, the longest first.

        Args:
            ops: the operators; None for all.
            recording: the activities to sum; None for the whole recording.
        """
        by_op = _OfOps(recording or self.recording).activities
        groups: dict[str, list[OpDescription]] = collections.defaultdict(list)
        for op in self._ops.values() if ops is None else ops:
            groups[getattr(op, key)].append(op)
        found = {
            name: _group(ops, [a for op in ops for a in by_op.get(op.id, ())])
            for name, ops in groups.items()
        }
        return dict(
            sorted(found.items(), key=lambda item: (-item[1]["device_us"], -item[1]["host_us"]))
        )

    # -- for people -------------------------------------------------------

    def tables(self) -> Iterable[Table]:
        """Yield tables of the longest kernels, and of the operators, types or modules with them."""
        found, rows = self.summary(), self.op_rows()
        place = "device" if found["launches"] else "host"
        step = self._of_step()
        run = self._listed(self.recording, place)
        listed = run if step is None else self._listed(step, place)
        yield self._kernels(listed, run, place, step is not None)
        yield self._groups(step, place, sum(a.duration for a in listed))
        yield from other_phases("kernels", rows, self.options, (f"{place}_us",))
        if problems := found["problems"]:
            yield Table("kernels: not recorded", ("why",), [(text,) for text in problems])

    def _kernels(
        self, listed: Sequence[Activity], run: Sequence[Activity], place: str, has_run: bool
    ) -> Table:
        """Return a table of kernels: figures of a step, and milliseconds of the run."""
        total = sum(a.duration for a in listed)
        inside = sum(a.duration for a in listed if a.op) / total if total else 0.0
        what = "kernels" if place == "device" else "activities"
        ran = f"in a step ({sum(a.duration for a in run) / 1000:.3f} ms in the run), "
        title = (
            f"kernels: {total / 1000:.3f} ms on the {place} in {len(listed):,} {what}"
            f"{f' {ran}' if has_run else ', '}{100 * inside:.1f} % in operators"
        )
        step = {(k["name"], k["device"]): k for k in _merged(listed)}
        whole = {(k["name"], k["device"]): k for k in _merged(run)}
        lines = []
        for key, of_run in sorted(whole.items(), key=lambda item: _order(item, step)):
            cells = _kernel_cells(step.get(key, {**of_run, **_NOTHING}), total)
            lines.append((*cells, *([f"{of_run['duration_us'] / 1000:.3f}"] if has_run else ())))
        columns = ("kernel", "calls", "ms", "share", "µs a call", "bytes", "ops")
        return Table(title, (*columns, *_run_column(has_run)), lines)

    def _groups(self, step: ProfilerRecording | None, place: str, total: float) -> Table:
        """Return a table of operators, types or modules: figures of a step and of the run."""
        by, has_run = self.options.by, step is not None
        key = {"op": "id", "module": "place"}.get(by, by)
        ops = [op for op in self._ops.values() if self._is_shown(op)]
        whole, groups = self._grouped(key, ops), self._grouped(key, ops, step)
        names = sorted(groups, key=lambda name: -groups[name][f"{place}_us"])
        lines = [
            (
                *_group_cells(name, groups[name], place, total),
                *([f"{whole[name][f'{place}_us'] / 1000:.3f}"] if has_run else ()),
            )
            for name in names
        ]
        heads = (by, "ops", "calls", "ms", "share", "longest kernel", *_run_column(has_run))
        return Table(f"kernels: {place} time by {by}", heads, lines)

    def _listed(self, recording: ProfilerRecording, place: str) -> list[Activity]:
        """Return the activities on devices or on the host, without those of hidden operators."""
        hidden = {op_id for op_id, op in self._ops.items() if not self._is_shown(op)}
        return [
            activity
            for activity in recording.activities
            if activity.is_kernel is (place == "device") and activity.op not in hidden
        ]

    def charts(self) -> Iterable[Chart]:
        """Time of the types that take most of it, by kernel: on devices if there are any, else
        on the host; in a step, and in the run."""
        summary, step = self.summary(), self._of_step()
        place = "device" if summary["launches"] else "host"
        ops = list(filter(self._is_shown, self._ops.values()))
        whole, groups = self._grouped("type", ops), self._grouped("type", ops, step)
        order = sorted(groups, key=lambda kind: -groups[kind][f"{place}_us"])
        types = [kind for kind in order if groups[kind][f"{place}_us"]][:_TYPES]
        values = _stacked([_kernels_at(groups[kind], place) for kind in types])
        runs = [_kernels_at(whole[kind], place) for kind in types]
        yield Chart(
            title=f"time on the {place}, by kernel",
            kind="bar",
            labels=types,
            values=values,
            unit="s",
            run=_stacked(runs, [name for name in values if name != _OTHERS]) if step else {},
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        return [line for row in self.op_rows() for line in _csv_lines(row)]

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.csv`` and ``<stem>.timeline.json``."""
        path = folder / f"{stem}.timeline.json"
        write_events(timeline_file.events(self.recording, self._ops), path)
        return [*super().write_files(folder, stem), path]


class _OfOps:
    """The recorded kernels, by operator.

    Attributes:
        activities: activities by operator id.
    """

    def __init__(self, recording: ProfilerRecording) -> None:
        self.activities: dict[str, list[Activity]] = collections.defaultdict(list)
        for activity in recording.activities:
            self.activities[activity.op].append(activity)
        self._executions = collections.Counter(e.op for e in recording.executions)

    def figures(self, op_id: str, is_counted: bool = False) -> dict[str, Any]:
        """Return the figures of an operator that add up.

        Args:
            op_id: the operator.
            is_counted: True if its executions are recorded, so that none means 0 and not unknown.
        """
        found = self.activities[op_id]
        none = 0 if is_counted else None
        executions = self._executions.get(op_id, none)
        return {"executions": executions, "activities": len(found), **_times(found)}


def _times(activities: Iterable[Activity]) -> dict[str, float]:
    """Sum durations on devices and on the host."""
    times = {"device_us": 0.0, "host_us": 0.0}
    for activity in activities:
        times["device_us" if activity.is_kernel else "host_us"] += activity.duration
    return times


def _sum(values: Iterable[float | None]) -> float | None:
    """Sum the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _merged(activities: Iterable[Activity]) -> list[dict[str, Any]]:
    """Merge activities of one name and device, the longest first."""
    groups: dict[tuple[str, str], list[Activity]] = collections.defaultdict(list)
    for activity in activities:
        groups[activity.name, activity.device].append(activity)
    merged = [
        {
            "name": name,
            "device": device,
            "calls": len(part),
            "duration_us": sum(a.duration for a in part),
            "launch_us": _sum(a.launch for a in part),
            "waited_us": _sum(a.waited for a in part),
            "bytes": _sum(a.bytes for a in part),
            "ops": len({a.op for a in part if a.op}),
        }
        for (name, device), part in groups.items()
    ]
    return sorted(merged, key=lambda kernel: -kernel["duration_us"])


def _group(ops: Sequence[OpDescription], activities: Sequence[Activity]) -> dict[str, Any]:
    kernels = _merged(activities)
    return {
        "ops": len(ops),
        "calls": len(activities),
        **_times(activities),
        "kernels": {f"{k['name']} ({k['device']})": k["duration_us"] for k in kernels},
    }


def _kernels_at(group: Mapping[str, Any], place: str) -> dict[str, float]:
    """Return seconds by kernel, of those on devices or on the host."""
    on_host = place == "host"
    kernels = group["kernels"].items()
    return {name: us / 1e6 for name, us in kernels if name.endswith("(cpu)") is on_host}


def _stacked(
    bars: Sequence[Mapping[str, float]], names: Sequence[str] = ()
) -> dict[str, list[float | None]]:
    """Return a series for each of the longest kernels, or of `names`, and one for the others."""
    totals: collections.Counter[str] = collections.Counter()
    for bar in bars:
        totals.update(bar)
    names = names or [name for name, _ in totals.most_common(_KERNELS)]
    series: dict[str, list[float | None]] = {name: [b.get(name) for b in bars] for name in names}
    if totals.keys() - series.keys():
        series[_OTHERS] = [sum(t for k, t in b.items() if k not in names) for b in bars]
    return series


def _order(item: tuple[Any, Mapping[str, Any]], step: Mapping[Any, Any]) -> tuple[float, float]:
    """Sort key: the longest in the step first, then the longest in the run."""
    key, of_run = item
    return -step.get(key, _NOTHING)["duration_us"], -of_run["duration_us"]


def _run_column(has_run: bool) -> tuple[str, ...]:
    return ("run",) if has_run else ()


def _kernel_cells(kernel: Mapping[str, Any], total: float) -> tuple[Any, ...]:
    duration, moved = kernel["duration_us"], kernel["bytes"]
    return (
        kernel["name"],
        kernel["calls"],
        f"{duration / 1000:.3f}",
        share_text(duration, total),
        f"{duration / kernel['calls']:.1f}" if kernel["calls"] else "-",
        "-" if moved is None else format_short(moved, "B"),
        kernel["ops"],
    )


def _group_cells(name: str, group: Mapping[str, Any], place: str, total: float) -> tuple[Any, ...]:
    duration = group[f"{place}_us"]
    kernels = _kernels_at(group, place)
    longest = next(iter(kernels)).rpartition(" (")[0] if kernels else "-"
    calls = group["calls"]
    return name, group["ops"], calls, f"{duration / 1000:.3f}", share_text(duration, total), longest


def _csv_lines(row: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield a line per kernel of an operator; a single line for an operator without any."""
    common = {key: value for key, value in row.items() if key != "kernels"}
    for kernel in row["kernels"] or ({"name": ""},):
        figures = {key: value for key, value in kernel.items() if key not in ("name", "ops")}
        yield {**common, "kernel": kernel["name"], **figures}
