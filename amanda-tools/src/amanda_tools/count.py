"""``count``: how often each operator is executed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from amanda import OpContext
from amanda.inline import Counter
from amanda.results import Chart, Table, plural
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda_tools._bases.per_step import charts_by, grouped, has_steps, per_step_by_id, with_steps
from amanda_tools._bases.phases import PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._output.folding import folded_rows

_WAYS = ("forward", "backward")


class CountTool(PrintingTool[PhaseOptions]):
    """Counts executions of operators, by type and by module.

    Example: ``amanda run -t count -o out -- train.py``
    """

    name = "count"
    figures = ("executions",)
    Options = PhaseOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ops: dict[str, OpDescription] = {}
        self._counters: dict[str, Counter] = {}
        self._counts: list[int] = []
        self._is_backward = bytearray()
        self.depends_on(MappingTool.standard())
        for is_backward in (False, True):
            self.add_inst_for_op(self._analyse, backward=is_backward)

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        # An operator may be analysed again (in another scope, without the cache): keep its counter.
        counter = self._counters.get(op.id)
        if counter is None:
            self._ops[op.id] = op
            self._is_backward.append(op.direction == "backward")
            counter = self._counters[op.id] = Counter()
        # An operator that raises is not counted; a run of a graph raises as a whole.
        insert = insert_after if context.runs_at_once else insert_before
        insert(context, counter)

    def op_counts(self) -> dict[str, list[int]]:
        """Executions of each operator so far, as :meth:`running_figures` has read them."""
        return {"executions": self._counts}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per counted operator, with its ``executions``, and ``per_step``, those of the
        last step."""
        steps = per_step_by_id(self._counters, self.op_counts_of_step())
        rows = [
            {**self._ops[op_id].row(), "executions": counter.count}
            for op_id, counter in self._counters.items()
        ]
        return with_steps(rows, steps, "executions")

    def summary(self) -> dict[str, Any]:
        """Executions in total, by type and by module."""
        rows = self.op_rows()
        ways = {way: _rows_of(rows, way) for way in _WAYS}
        return {
            **{way: _executions(part) for way, part in ways.items()},
            "by_type": {way: _by("type", part) for way, part in ways.items()},
            "by_module": {way: _by("module", part) for way, part in ways.items()},
        }

    def tables(self) -> Iterable[Table]:
        """Executions by type, forward and backward, and by module, in a step and in the run."""
        every = self.op_rows()
        rows = shown(every, self.options)
        # One more column for the run, beside the figures of a step.
        steps = [{**row, "run": row["executions"], **row.get("per_step", {})} for row in rows]
        runs = ("run",) if has_steps(rows) else ()
        for way in _WAYS:
            title = f"count: {plural(_executions(_rows_of(steps, way)), f'{way} execution')}"
            if runs:
                title += f" in a step ({_executions(_rows_of(rows, way)):,} in the run)"
            groups = _by("type", _rows_of(steps, way), runs)
            lines = [(kind, *of.values()) for kind, of in groups.items()]
            yield Table(title, ("type", "ops", "executions", *runs), lines)
        yield self._modules(steps, runs)
        if len(rows) < len(every):
            yield from other_phases("count", every, self.options, ("executions",))
        yield from self.unseen_tables("executions are lower bounds")

    def _modules(self, rows: Sequence[Mapping[str, Any]], runs: Sequence[str]) -> Table:
        places = folded_rows(rows, itemgetter("executions"))
        groups = [_by("module", _rows_of(places, way), runs) for way in _WAYS]
        # By the largest forward figures.
        names = dict.fromkeys(name for of_way in groups for name in of_way)
        lines = [
            (
                name,
                *(of_way.get(name, {}).get("executions", 0) for of_way in groups),
                *(sum(of_way.get(name, {}).get(run, 0) for of_way in groups) for run in runs),
            )
            for name in names
        ]
        return Table("count: executions by module", ("module", *_WAYS, *runs), lines, detail=True)

    def charts(self) -> Iterable[Chart]:
        """Executions by type and by module."""
        rows = shown(self.op_rows(), self.options)
        yield from charts_by(("type", "module"), rows, "executions", "executions")

    def running_figures(self) -> dict[str, float]:
        """Executions so far, forward and backward."""
        # A generator would cost frames for each operator, an attrgetter five times as much as a
        # comprehension. A list: other threads may add operators.
        self._counts = [counter.count for counter in list(self._counters.values())]
        backward = sum(itertools.compress(self._counts, self._is_backward))
        return {"forward": sum(self._counts) - backward, "backward": backward}


def _rows_of(rows: Iterable[Mapping[str, Any]], direction: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["direction"] == direction]


def _executions(rows: Iterable[Mapping[str, Any]]) -> int:
    return sum(row["executions"] for row in rows)


def _by(
    key: str, rows: Iterable[Mapping[str, Any]], runs: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Sum ``ops``, ``executions`` and `runs` by the value of `key`, the most frequent first."""
    figures = ("executions", *runs)
    groups = grouped(rows, itemgetter(key), figures)
    order = sorted(groups.items(), key=lambda item: [-item[1][name] for name in figures])
    return dict(order)
