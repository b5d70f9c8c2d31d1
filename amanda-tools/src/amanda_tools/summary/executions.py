"""Executions of an operator of a graph, and how many runs of the graph they make."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import attrs


@attrs.define(eq=False)
class CountedOp:
    """An operator of a graph.

    Attributes:
        module: what it belongs to: the path of a module, or a name scope.
        executions: how often it ran.
        flops, bytes: of its last execution.
    """

    module: str
    executions: int = attrs.field(default=0, kw_only=True)
    flops: int = attrs.field(default=0, kw_only=True)
    bytes: int = attrs.field(default=0, kw_only=True)

    def add(self, flops: int, size: int) -> None:
        """Count one execution."""
        self.executions += 1
        self.flops, self.bytes = flops, size

    def figures_in(self, runs: int) -> tuple[int, int]:
        """FLOPs and bytes in one of so many runs: several times those of an
        execution in a loop."""
        times = max(1, round(self.executions / runs)) if self.executions else 0
        return times * self.flops, times * self.bytes


def runs_of(ops: Iterable[CountedOp]) -> int:
    """The runs of a graph: as often as most of its operators ran; 0 if none did."""
    counts = collections.Counter(op.executions for op in ops if op.executions)
    return counts.most_common(1)[0][0] if counts else 0
