"""``count``: how often each operator is executed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import attrs

from amanda import OpContext
from amanda.inline import Counter
from amanda.results import Chart, Table, plural
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
from amanda_tools._bases.per_step import charts_by, grouped, has_steps, per_step_by_id, with_steps
from amanda_tools._bases.phases import MODEL, PhaseOptions, other_phases
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._operators.targets import unmet_tables
from amanda_tools._output.folding import folded_rows


@attrs.frozen(kw_only=True)
class CountOptions(PhaseOptions):
    """The options of ``count``. Without any, all operators are counted, forward and backward.

    Attributes:
        ops: types of forward ops to count, such as conv2d.
        backward_ops: types of backward ops to count, such as conv2d_backward.
    """

    ops: Sequence[str] = attrs.field(default=(), converter=type_names)
    backward_ops: Sequence[str] = attrs.field(default=(), converter=type_names)


class CountTool(PrintingTool[CountOptions]):
    """Counts executions of operators, by type and by module.

    Only operators that are counted carry a routine. A type is the canonical one (``conv2d``) or the
    framework's name (``ConvolutionBackward0``).

    Example: ``amanda run -t count:ops=conv2d+linear -o out -- train.py``
    """

    name = "count"
    figures = ("executions",)
    Options = CountOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ops: dict[str, OpDescription] = {}
        self._counters: dict[str, Counter] = {}
        self._counts: list[int] = []
        self._is_backward = bytearray()
        self._types: set[str] = set()
        self.depends_on(MappingTool.standard())
        # An analysis for a direction that is not counted would cost time, too.
        for direction in self._directions():
            self.add_inst_for_op(self._analyse, backward=direction == "backward")

    def _directions(self) -> list[str]:
        """Return which of ``forward`` and ``backward`` are counted."""
        ops, backward_ops = self.options.ops, self.options.backward_ops
        asked = {"forward": ops or not backward_ops, "backward": backward_ops or not ops}
        return [direction for direction, is_asked in asked.items() if is_asked]

    def _analyse(self, context: OpContext) -> None:
        op = describe(context)
        self._types |= {op.type, op.name}
        options = self.options
        if not op.is_selected(options.ops if context.is_forward() else options.backward_ops):
            return
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
        """Executions in total, by type and by module; ``ops_never_met``, the types that no
        operator had."""
        rows = self.op_rows()
        ways = {way: _rows_of(rows, way) for way in ("forward", "backward")}
        return {
            **{way: _executions(part) for way, part in ways.items()},
            "by_type": {way: _by("type", part) for way, part in ways.items()},
            "by_module": {way: _by("module", part) for way, part in ways.items()},
            "ops_never_met": [
                kind
                for kind in (*self.options.ops, *self.options.backward_ops)
                if kind not in self._types
            ],
        }

    def tables(self) -> Iterable[Table]:
        """Executions by type, forward and backward, and by module, in a step and in the run."""
        every = self.op_rows()
        rows = self._shown(every)
        # One more column for the run, beside the figures of a step.
        steps = [{**row, "run": row["executions"], **row.get("per_step", {})} for row in rows]
        runs = ("run",) if has_steps(rows) else ()
        for way in self._directions():
            title = f"count: {plural(_executions(_rows_of(steps, way)), f'{way} execution')}"
            if runs:
                title += f" in a step ({_executions(_rows_of(rows, way))} in the run)"
            groups = _by("type", _rows_of(steps, way), runs)
            lines = [(kind, *of.values()) for kind, of in groups.items()]
            yield Table(title, ("type", "ops", "executions", *runs), lines)
        yield self._modules(steps, runs)
        if len(rows) < len(every):
            yield from other_phases("count", every, self.options, ("executions",))
        yield from self.unseen_tables("executions are lower bounds")
        yield from unmet_tables("count", self.summary()["ops_never_met"])

    def _modules(self, rows: Sequence[Mapping[str, Any]], runs: Sequence[str]) -> Table:
        ways = self._directions()
        places = folded_rows(rows, itemgetter("executions"))
        groups = [_by("module", _rows_of(places, way), runs) for way in ways]
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
        title = "count: executions by module"
        return Table(title, ("module", *ways, *runs), lines, detail=True)

    def charts(self) -> Iterable[Chart]:
        """Executions by type and by module."""
        rows = self._shown(self.op_rows())
        yield from charts_by(("type", "module"), rows, "executions", "executions")

    def _shown(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that tables list: types that were asked for are listed anyway."""
        options = self.options
        everything = options.phases == "all" or options.ops or options.backward_ops
        return [row for row in rows if everything or row["phase"] in MODEL]

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
