"""``coverage``: which operators module hooks, torch-function modes, Keras layers and Amanda see."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from amanda import Driver, OpContext, deferrable
from amanda.interface.points import PointContext
from amanda.results import Chart, Table
from amanda.tools.description import OpDescription, describe
from amanda.tools.graph_tracing import GraphTracingTool
from amanda_tools._bases.phases import PhaseOptions, other_phases, shown
from amanda_tools._bases.printing import PrintingTool
from amanda_tools.coverage.peers import Peer, make_peers

__all__ = ["CoverageOptions", "CoverageTool"]

OURS = "amanda"
"""Amanda's own name among the mechanisms."""

DIRECTIONS = ("forward", "backward")


@attrs.frozen(kw_only=True)
class CoverageOptions(PhaseOptions):
    """The options of ``coverage``.

    Attributes:
        csv: also write the rows of all operators as a table.
    """

    csv: bool = True


@attrs.define(eq=False)
class CoveredOp:
    """An operator, the mechanisms that may see it, and its executions."""

    op: OpDescription
    peers: Sequence[Peer]
    executions: int = 0

    @deferrable
    def count(self) -> None:
        """Instrumentation routine: count one execution."""
        self.executions += 1
        for peer in self.peers:
            peer.executed(self.op.id)


class CoverageTool(PrintingTool[CoverageOptions]):
    """Shows which mechanisms see each operator (paper, Figure 9).

    Example: ``amanda run -t coverage -o out -- train.py``
    """

    name = "coverage"
    group = "find"
    Options = CoverageOptions
    only_watches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ops: dict[str, CoveredOp] = {}
        self._peers: dict[str, tuple[Peer, ...]] = {}
        self._follows_modules = False
        self.depends_on(GraphTracingTool(follow=False))
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_outputs, require_outputs=True)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    # -- life cycle -------------------------------------------------------

    def enter_scope(self, drivers: Sequence[Driver]) -> None:
        """Make the mechanisms of the drivers' frameworks."""
        super().enter_scope(drivers)
        frameworks = {driver.namespace.tags[0]: driver.framework for driver in drivers}
        for name in frameworks:
            self._peers_of(name)
        if "torch" in frameworks.values() and not self._follows_modules:
            self._follows_modules = True
            for is_exit in (False, True):
                self.add_inst_for_module(self._passed, exit=is_exit)

    def exit_scope(self) -> None:
        """Discard the calls that are still running."""
        for peers in self._peers.values():
            for peer in peers:
                peer.exit()

    def _peers_of(self, framework: str) -> tuple[Peer, ...]:
        if framework not in self._peers:
            self._peers[framework] = make_peers(framework)
        return self._peers[framework]

    @deferrable
    def _passed(self, point: PointContext) -> None:
        for peer in self._peers_of(point.namespace.partition("/")[0]):
            peer.passed(point)

    # -- analyses ---------------------------------------------------------

    def _analyse(self, context: OpContext) -> None:
        peers = self._peers_of(context.namespace.tags[0])
        for peer in peers:
            peer.look(context)
        op = self._covered(context, peers)
        context.insert_before_op(op.count, inputs=[])

    def _analyse_outputs(self, context: OpContext) -> None:
        for peer in self._peers_of(context.namespace.tags[0]):
            peer.look_at_outputs(context)

    def _analyse_backward(self, context: OpContext) -> None:
        op = self._covered(context, ())
        context.insert_before_backward_op(op.count, grad_outputs=[])

    def _covered(self, context: OpContext, peers: Sequence[Peer]) -> CoveredOp:
        op = describe(context)
        # An operator may be analysed again (in another scope, without the cache): keep its count.
        return self._ops.setdefault(op.id, CoveredOp(op, peers))

    # -- result -----------------------------------------------------------

    def mechanisms(self) -> list[Peer]:
        """Return the mechanisms, without Amanda, of the frameworks whose operators occurred."""
        namespaces = (covered.op.namespace for covered in self._ops.values())
        frameworks = dict.fromkeys(name.partition("/")[0] for name in namespaces)
        return [peer for framework in frameworks for peer in self._peers_of(framework)]

    def op_rows(self) -> list[dict[str, Any]]:
        """One row per operator: ``executions``, and ``seen_by``, a list of mechanisms."""
        seen = {peer: peer.seen() for peer in self.mechanisms()}
        return [
            {
                **covered.op.row(),
                "executions": covered.executions,
                "seen_by": [OURS, *(p.name for p, ids in seen.items() if covered.op.id in ids)],
            }
            for covered in self._ops.values()
        ]

    def summary(self) -> dict[str, Any]:
        """Return the operators of its framework that each mechanism sees.

        ``mechanisms``: name to ``how`` ("measured", "derived"; Amanda: "measured") and, for
        ``forward`` and ``backward`` each, ``ops`` and ``executions`` seen, ``of_ops`` and
        ``of_executions`` that there are, and ``share``, a fraction of the operators, null without
        any. ``in_modules`` is the same for operators that modules or functions run: without the
        initialization of weights, optimizers and the like.
        """
        return {"mechanisms": self._seen_by_each(self.op_rows())}

    def _seen_by_each(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what each mechanism sees of the operators of its framework."""
        known = {OURS: ("", "measured")}
        known.update((peer.name, (peer.framework, peer.how)) for peer in self.mechanisms())
        found: dict[str, dict[str, Any]] = {}
        for name, (framework, how) in known.items():
            own = [row for row in rows if row["namespace"].startswith(framework)]
            inside = list(filter(_is_in_module, own))
            found[name] = {
                "how": how,
                **_by_direction(own, name),
                "in_modules": _by_direction(inside, name),
            }
        return found

    # -- for people -------------------------------------------------------

    def tables(self) -> Iterable[Table]:
        """The operators that each mechanism sees; types, those with the most operators missed
        first."""
        every = self.op_rows()
        listed = shown(every, self.options)
        found = self._seen_by_each(listed)
        counts = (f"{found[OURS][direction]['ops']} {direction} ops" for direction in DIRECTIONS)
        columns = ("mechanism", "direction", "ops", "%", "in modules", "%")
        rows = [
            (name if name == OURS else f"{name} ({of['how']})", direction, *_cells(of, direction))
            for direction in DIRECTIONS
            for name, of in found.items()
        ]
        yield Table("coverage: " + ", ".join(counts), columns, rows)
        names = [name for name in found if name != OURS]
        for direction in DIRECTIONS:
            yield self._groups(_in(listed, direction), direction, names)
        yield from other_phases("coverage", every, self.options, ("executions",))
        yield from self.unseen_tables("shares are of what amanda sees")

    def _groups(
        self, rows: Iterable[Mapping[str, Any]], direction: str, names: Sequence[str]
    ) -> Table:
        groups: dict[str, collections.Counter[str]] = {}
        for row in rows:
            groups.setdefault(row["type"], collections.Counter()).update(row["seen_by"])
        lines: list[tuple[Any, ...]] = [
            (group, *map(counts.__getitem__, (OURS, *names))) for group, counts in groups.items()
        ]
        # Those of which a mechanism misses the most operators first.
        lines.sort(key=lambda line: min(line[2:], default=line[1]) - line[1])
        return Table(f"coverage: {direction} ops by type", ("type", OURS, *names), lines)

    def charts(self) -> Iterable[Chart]:
        """Operators that each mechanism sees and misses: those in modules, or all if none is in
        one."""
        rows = self.op_rows()
        # A program without a model has other operators only.
        listed = shown(rows, self.options) or rows
        inside = list(filter(_is_in_module, listed))
        found = self._seen_by_each(inside or listed)
        bars = {
            f"{direction}: {name}": seen[direction]
            for direction in DIRECTIONS
            for name, seen in found.items()
        }
        yield Chart(
            title="operators, in modules" if inside else "operators",
            kind="bar",
            labels=list(bars),
            values={
                "seen": [bar["ops"] for bar in bars.values()],
                "missed": [bar["of_ops"] - bar["ops"] for bar in bars.values()],
            },
        )


def _in(rows: Iterable[Mapping[str, Any]], direction: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["direction"] == direction]


def _is_in_module(row: Mapping[str, Any]) -> bool:
    """True if a module or function runs the operator; ids of others begin with a slash."""
    return bool(row["module"]) or not row["id"].startswith("/")


def _by_direction(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Count what one mechanism sees of these operators, forward and backward."""
    return {direction: _figures(_in(rows, direction), name) for direction in DIRECTIONS}


def _figures(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Count what one mechanism sees of these operators."""
    seen = [row for row in rows if name in row["seen_by"]]
    return {
        "ops": len(seen),
        "of_ops": len(rows),
        "executions": sum(row["executions"] for row in seen),
        "of_executions": sum(row["executions"] for row in rows),
        "share": len(seen) / len(rows) if rows else None,
    }


def _cells(seen: Mapping[str, Any], direction: str) -> Iterable[Any]:
    """Yield number and share of the operators seen, of all and of those in modules."""
    for figures in (seen[direction], seen["in_modules"][direction]):
        share = figures["share"]
        yield from (figures["ops"], "-" if share is None else round(100 * share, 1))
