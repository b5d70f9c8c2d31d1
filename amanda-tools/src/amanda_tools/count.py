"""``count``: how often each operator is executed."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda import OpContext
from amanda.inline import Counter
from amanda.results import Chart, Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool
from amanda.tools.reporting import type_names
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
    """An operator that is counted, and its counter."""

    op: OpDescription
    counter: Counter = attrs.field(factory=Counter)

    @property
    def executions(self) -> int:
        """The executions so far."""
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
        self._counters: dict[str, list[Counter]] = {"forward": [], "backward": []}
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
        # An operator may be analysed again (in another scope, without the cache); it counts on.
        counted = self._counted.get(op.id)
        if counted is None:
            counted = self._counted[op.id] = CountedOp(op)
            self._counters[op.direction].append(counted.counter)
        # An operator that has raised has not been executed; a run of a graph raises as a whole.
        insert = insert_after if context.namespace.tags[-1] == "eager" else insert_before
        insert(context, counted.counter)

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per counted operator, with its ``executions``."""
        return [{**c.op.row(), "executions": c.executions} for c in self._counted.values()]

    def summary(self) -> dict[str, Any]:
        """Executions in total, by type and by module; ``ops_never_met``, the types that never
        came."""
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
        """Executions by type, forward and backward, and by module."""
        directions = self._directions()
        counted = self._shown()
        by_type = self._grouped(counted, lambda op: op.type)
        for direction in directions:
            rows = [(kind, of["ops"], of["executions"]) for kind, of in by_type[direction].items()]
            title = f"count: {self._total(direction, counted)} {direction} executions"
            yield Table(title, ("type", "ops", "executions"), rows)
        modules = self._grouped(counted, lambda op: op.place)
        names = dict.fromkeys(name for direction in directions for name in modules[direction])
        by_module = [
            (name, *(_executions(modules[way], name) for way in directions)) for name in names
        ]
        yield Table("count: executions by module", ("module", *directions), by_module)
        if len(counted) < len(self._counted):
            yield from other_phases("count", self.op_rows(), self.options, ("executions",))
        if missing := self.summary()["ops_never_met"]:
            title = "count: types that were asked for and never met"
            yield Table(title, ("type",), [(kind,) for kind in missing])

    def charts(self) -> Iterable[Chart]:
        """Executions by type and by module."""
        listed = [c.op.identity() for c in self._shown()]
        types = forward_types(listed)
        rows = [
            {**row, "type": types[row["id"]], "module": c.op.place, "executions": c.executions}
            for row, c in zip(listed, self._shown(), strict=True)
        ]
        by_type, by_module = (
            sum_by_direction(rows, key, "executions") for key in ("type", "module")
        )
        yield from rank_groups("executions by type", by_type, BOTH_DIRECTIONS, "", self.steps)
        yield from rank_modules("executions by module", by_module, BOTH_DIRECTIONS, "", self.steps)

    def _shown(self) -> list[CountedOp]:
        """Return the operators that tables list: types that were asked for are listed anyway."""
        counted, options = self._counted.values(), self.options
        everything = options.phases == "all" or options.ops or options.backward_ops
        return [c for c in counted if everything or c.op.phase in MODEL]

    def _total(self, direction: str, counted: Iterable[CountedOp] | None = None) -> int:
        part = self._counted.values() if counted is None else counted
        return sum(c.executions for c in part if c.op.direction == direction)

    def running_figures(self) -> dict[str, float]:
        """Executions so far, forward and backward."""
        # For each step: a generator would cost frames for each operator.
        forward, backward = self._counters["forward"], self._counters["backward"]
        return {"forward": sum(map(_count, forward)), "backward": sum(map(_count, backward))}

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


_count = operator.attrgetter("count")


def _executions(group: Mapping[str, Any], name: str) -> int:
    figures = group.get(name)
    return figures["executions"] if figures else 0
