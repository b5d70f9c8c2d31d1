"""Executions of operators of a graph, and the number of runs of the graph.

::

    op = GraphOp(module="net/fc")
    op.add(flops=1000, size=64)         # at each execution
    op.figures_in(runs_of([op]))        # (1000, 64): in one run
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import attrs


@attrs.define(eq=False)
class GraphOp:
    """An operator of a graph.

    Attributes:
        module: path of the module, or name scope, that the operator belongs to.
        executions: number of executions.
        flops, bytes: figures of its last execution.
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
        """Return FLOPs and bytes in one of `runs` runs of the graph.

        An operator in a loop has several executions in a run.
        """
        times = max(1, round(self.executions / runs)) if self.executions else 0
        return times * self.flops, times * self.bytes


def runs_of(ops: Iterable[GraphOp]) -> int:
    """Return the runs of a graph: the most frequent number of executions; 0 without any."""
    counts = collections.Counter(op.executions for op in ops if op.executions)
    return counts.most_common(1)[0][0] if counts else 0
