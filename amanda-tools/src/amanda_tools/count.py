"""``count``: how often each operator is executed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda.inline import Counter
from amanda.results import Chart, Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
from amanda_tools._bases.per_step import has_steps, in_step, per_step_by_id, with_steps
from amanda_tools._bases.phases import MODEL, PhaseOptions, other_phases
from amanda_tools._bases.printing import PrintingTool
from amanda_tools._operators.routines import insert_after, insert_before
from amanda_tools._output.chart_data import (
    BOTH_DIRECTIONS,
    forward_types,
    rank_groups,
    rank_modules,
    sum_by_direction,
)


@attrs.frozen(kw_only=True)
class CountOptions(PhaseOptions):
    """The options of ``count``. Without any, all operators are counted, forward and backward.

    Attributes:
        ops: types of forward ops to count, such as conv2d.
        backward_ops: types of backward ops to count, such as conv2d_backward.
    """

    ops: Sequence[str] = attrs.field(default=(), converter=type_names)
    backward_ops: Sequence[str] = attrs.field(default=(), converter=type_names)


@attrs.frozen(eq=False)
class CountedOp:
    """An operator and its counter."""

    op: OpDescription
    counter: Counter = attrs.field(factory=Counter)

    @property
    def executions(self) -> int:
        """Number of executions so far."""
        return self.counter.count


class CountTool(PrintingTool[CountOptions]):
    """Counts the executions of operators, forward and backward, by type and by module.

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
        self._counted: dict[str, CountedOp] = {}
        self._every: list[Counter] = []
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
        counted = self._counted.get(op.id)
        if counted is None:
            counted = self._counted[op.id] = CountedOp(op)
            self._is_backward.append(op.direction == "backward")
            self._every.append(counted.counter)
        # An operator that raises is not counted; a run of a graph raises as a whole.
        insert = insert_after if context.runs_at_once else insert_before
        insert(context, counted.counter)

    def op_counts(self) -> dict[str, list[int]]:
        """Executions of each operator so far, as :meth:`running_figures` has read them."""
        return {"executions": self._counts}

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per counted operator, with its ``executions``, and ``per_step``, those of the
        last step."""
        steps = per_step_by_id(self._counted, self.op_counts_of_step())
        rows = [{**c.op.row(), "executions": c.executions} for c in self._counted.values()]
        return with_steps(rows, steps, "executions")

    def summary(self) -> dict[str, Any]:
        """Executions in total, by type and by module; ``ops_never_met``, the types that no
        operator had."""
        return {
            "forward": self._total("forward"),
            "backward": self._total("backward"),
            "by_type": self._grouped(self._counted.values(), lambda op: op.type),
            "by_module": self._grouped(self._counted.values(), lambda op: op.module),
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
        runs = ("run",) if has_steps(rows) else ()
        for direction in self._directions():
            part = [row for row in rows if row["direction"] == direction]
            groups = _by(part, "type")
            lines = [
                (kind, of["ops"], of["executions"], *(of["run"] for _ in runs))
                for kind, of in sorted(groups.items(), key=_most)
            ]
            yield Table(_title(part, direction), ("type", "ops", "executions", *runs), lines)
        yield self._modules(rows, runs)
        if len(rows) < len(every):
            yield from other_phases("count", every, self.options, ("executions",))
        if missing := self.summary()["ops_never_met"]:
            title = "count: types that were asked for and never met"
            yield Table(title, ("type",), [(kind,) for kind in missing])

    def _modules(self, rows: Sequence[Mapping[str, Any]], runs: Sequence[str]) -> Table:
        ways = self._directions()
        places = [{**row, "module": self._counted[row["id"]].op.place} for row in rows]
        groups = {
            way: _by([row for row in places if row["direction"] == way], "module") for way in ways
        }
        # By the largest forward figures.
        names = dict.fromkeys(
            name for way in ways for name, _ in sorted(groups[way].items(), key=_most)
        )
        lines = [
            (
                name,
                *(groups[way].get(name, _NONE)["executions"] for way in ways),
                *(sum(groups[way].get(name, _NONE)["run"] for way in ways) for _ in runs),
            )
            for name in names
        ]
        return Table("count: executions by module", ("module", *ways, *runs), lines)

    def charts(self) -> Iterable[Chart]:
        """Executions by type and by module."""
        listed = self._shown(self.op_rows())
        types = forward_types(listed)
        rows = [
            {**row, "type": types[row["id"]], "module": self._counted[row["id"]].op.place}
            for row in listed
        ]
        for key, rank in (("type", rank_groups), ("module", rank_modules)):
            step, run = (
                sum_by_direction(part, key, "executions") for part in (in_step(rows), rows)
            )
            whole = run if has_steps(rows) else {}
            yield from rank(f"executions by {key}", step, BOTH_DIRECTIONS, "", whole)

    def _shown(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that tables list: types that were asked for are listed anyway."""
        options = self.options
        everything = options.phases == "all" or options.ops or options.backward_ops
        return [row for row in rows if everything or row["phase"] in MODEL]

    def _total(self, direction: str) -> int:
        return sum(c.executions for c in self._counted.values() if c.op.direction == direction)

    def running_figures(self) -> dict[str, float]:
        """Executions so far, forward and backward."""
        # A generator would cost frames for each operator, an attrgetter five times as much as a
        # comprehension.
        self._counts = [counter.count for counter in self._every]
        backward = sum(itertools.compress(self._counts, self._is_backward))
        return {"forward": sum(self._counts) - backward, "backward": backward}

    def _grouped(
        self, part: Iterable[CountedOp], key: Callable[[OpDescription], str]
    ) -> dict[str, dict[str, Any]]:
        """Count operators and executions by direction and `key`, the most frequent first."""
        groups: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
        for counted in part:
            group = groups[counted.op.direction]
            figures = group.setdefault(key(counted.op), collections.Counter())
            figures["ops"] += 1
            figures["executions"] += counted.executions
        return {
            direction: {
                name: dict(figures)
                for name, figures in sorted(group.items(), key=lambda item: -item[1]["executions"])
            }
            for direction, group in groups.items()
        }


_NONE = {"ops": 0, "executions": 0, "run": 0}


def _by(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, dict[str, int]]:
    """Count operators, and sum executions of a step and of the run, by the value of `key`."""
    groups: dict[str, dict[str, int]] = {}
    for row in rows:
        group = groups.setdefault(row[key], dict(_NONE))
        group["ops"] += 1
        group["executions"] += row.get("per_step", row)["executions"]
        group["run"] += row["executions"]
    return groups


def _most(item: tuple[str, Mapping[str, int]]) -> tuple[int, int]:
    return -item[1]["executions"], -item[1]["run"]


def _title(rows: Sequence[Mapping[str, Any]], direction: str) -> str:
    run = sum(row["executions"] for row in rows)
    if not has_steps(rows):
        return f"count: {run} {direction} executions"
    step = sum(row["per_step"]["executions"] for row in rows)
    return f"count: {step} {direction} executions in a step ({run} in the run)"
