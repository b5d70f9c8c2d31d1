"""``trace``: the graph of operators with paths and source lines, and the timeline of a run.

::

    tool = TraceTool()
    with amanda.apply(tool):
        model(x).sum().backward()
    tool.graph.edges, tool.timeline.totals()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import attrs

from amanda import OpContext
from amanda.driver import Driver
from amanda.results import Chart, Table, plural
from amanda.tools.graph_tracing import Graph, GraphTracingTool, TracedOp, TracedTensor
from amanda_tools._bases.per_step import charts_by, grouped, has_steps
from amanda_tools._bases.phases import PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.source_lines import source_of
from amanda_tools._output.folding import folded_rows
from amanda_tools._timelines import chrome
from amanda_tools._timelines.timeline import Timeline, Total


@attrs.frozen(kw_only=True)
class TraceOptions(PhaseOptions):
    """The options of ``trace``.

    Attributes:
        limit: executions that the timeline keeps, later ones are counted only; 0 for no timeline.
        follow: follow tensors at every execution, not only at an operator's first, so that
            operators first met in a later iteration are connected, too; slower.
    """

    limit: int = attrs.field(default=5_000_000, validator=attrs.validators.ge(0))
    follow: bool = False


class TraceTool(PrintingTool[TraceOptions]):
    """Records the graph of operators, and when each of them ran.

    Example: ``amanda run -t trace:follow=true -o out -- train.py``

    Attributes:
        timeline: spans of all executions; empty with limit=0.
        sources: line of the user's program by id of a forward operator.
    """

    name = "trace"
    schema = 2
    Options = TraceOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tracing = GraphTracingTool(follow=self.options.follow)
        self.timeline = Timeline(self.options.limit)
        self.sources: dict[str, str] = {}
        self.depends_on(self._tracing)
        self.add_inst_for_op(self._analyse)
        if self.options.limit:
            self.add_inst_for_op(self.timeline.watch, backward=True)
            for backward in (False, True):
                watch = self.timeline.watch_outputs
                self.add_inst_for_op(watch, backward=backward, require_outputs=True)

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Start watching the program's use of TensorFlow's profiler."""
        super().enter_scope(drivers)
        if self.options.limit:
            self.timeline.begin(drivers)

    def exit_scope(self) -> None:
        """Add the times of operators of graphs."""
        self.timeline.close()

    @property
    def graph(self) -> Graph:
        """The graph of forward operators, each with its backward operators."""
        return self._tracing.graph

    def _analyse(self, context: OpContext) -> None:
        self.sources[context.get_op_id()] = source_of(context)
        if self.options.limit:
            self.timeline.watch(context)

    # -- result -----------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the common form, with the graph's ``tensors`` and ``edges``."""
        graph = self.graph
        return {
            **super().result(),
            "tensors": [attrs.asdict(tensor) for tensor in graph.tensors],
            "edges": [attrs.asdict(edge) for edge in graph.edges],
        }

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator; in ``inputs`` and ``outputs`` of forward ones, ``tensor`` is an
        index of ``tensors``."""
        return [row for op in self.graph.ops for row in self._rows(op)]

    def _rows(self, op: TracedOp) -> Iterator[dict[str, Any]]:
        source = self.sources.get(op.id, "")
        facts = self.graph.description(op.id).facts()
        yield {
            **self.graph.description(op.id).identity(),
            "source": source,
            **facts,
            "inputs": _numbered(facts["inputs"], op.inputs),
            "input_names": list(op.input_names),
            "outputs": _numbered(facts["outputs"], op.outputs),
            "attributes": dict(op.attributes),
        }
        for backward in op.backward:
            yield {**self.graph.description(backward.id).row(), "source": source}

    def summary(self) -> dict[str, Any]:
        """Sizes of the graph and of the timeline."""
        graph = self.graph
        return {
            "forward": len(graph.ops),
            "backward": len(graph.backward_ops),
            "edges": len(graph.edges),
            "inputs": len(graph.inputs),
            "parameters": len(graph.parameters),
            "outputs": len(graph.outputs),
            "executions": self.timeline.kept,
            "executions_not_kept": self.timeline.dropped,
        }

    def tables(self) -> Iterable[Table]:
        """Operators and their time by type, forward and backward, and by module."""
        rows = self._timed()
        ids = {row["id"] for row in rows}
        edges = sum(edge.producer in ids and edge.consumer in ids for edge in self.graph.edges)
        for direction in ("forward", "backward"):
            part = [row for row in rows if row["direction"] == direction]
            title = f"trace: {plural(len(part), f'{direction} op')}"
            if direction == "forward":
                title += f", {plural(edges, 'edge')}"
            yield self._table(title, part, ("type",))
        placed = folded_rows(rows, itemgetter("type"))
        modules = self._table("trace: ops by module", placed, ("module", "direction"))
        yield attrs.evolve(modules, detail=True)
        yield from other_phases("trace", self.op_rows(), self.options)
        if dropped := self.timeline.dropped:
            title = f"trace: the timeline is full (limit={self.options.limit})"
            yield Table(title, ("executions that it does not hold",), [(dropped,)])

    def charts(self) -> Iterable[Chart]:
        """Time by type, if a timeline was recorded."""
        yield from charts_by(("type",), self._timed(), "seconds", "time", "s")

    def _timed(self) -> list[dict[str, Any]]:
        """Return the rows that tables list, with their seconds in the run, and in the last step if
        there is one."""
        run, times = self.timeline.seconds(), self.step_times
        step = self.timeline.between(*times) if times else None
        rows = shown(self.op_rows(), self.options)
        for row in rows:
            row["seconds"] = run.get(row["id"], 0.0)
            if step is not None:
                row["per_step"] = {"seconds": step.totals.get(row["id"], Total()).seconds}
        return rows

    def _table(self, title: str, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Table:
        """Return a table of the operators and their time in the last step, and in the run, by the
        values of `keys`, the longest first."""
        figures = ("seconds", "run") if has_steps(rows) else ("seconds",)
        columns = ("ms", "ms in the run")[: len(figures)] if self.options.limit else ()
        timed = [{**row, "run": row["seconds"], **row.get("per_step", {})} for row in rows]
        groups = grouped(timed, lambda row: tuple(row[key] for key in keys), figures)
        listed = figures[: len(columns)]
        order = sorted(groups.items(), key=lambda item: (-item[1]["seconds"], -item[1]["ops"]))
        lines = [
            (*names, of["ops"], *(f"{1000 * of[figure]:.3f}" for figure in listed))
            for names, of in order
        ]
        return Table(title, (*keys, "ops", *columns), lines)

    # -- files ------------------------------------------------------------

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.timeline.json`` for Perfetto."""
        if not self.options.limit:
            return []
        path = folder / f"{stem}.timeline.json"
        chrome.write_events(chrome.events(self.timeline, self.sources), path)
        return [path]


def _numbered(
    rows: Sequence[dict[str, Any] | None], tensors: Sequence[TracedTensor | None]
) -> list[dict[str, Any] | None]:
    """Add to the row of each tensor its index in the graph."""
    return [
        None if tensor is None else {"tensor": tensor.index, **(row or {})}
        for row, tensor in zip_longest(rows, tensors)
    ]
