"""Figures of operators that run in graphs of TensorFlow, where no layer is called when they run."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import attrs


@attrs.define(eq=False)
class GraphOp:
    """One operator of a graph.

    Attributes:
        module: path of the layers that made it.
        executions: how often it ran.
        macs, bytes: of its last execution.
    """

    module: str
    executions: int = 0
    macs: int = 0
    bytes: int = 0

    def add(self, macs: int, size: int) -> None:
        """One execution."""
        self.executions += 1
        self.macs, self.bytes = macs, size


class GraphOps:
    """The operators of graphs, by the layers that made them."""

    def __init__(self) -> None:
        self._ops: dict[str, GraphOp] = {}

    def adder(self, op_id: str, module: str) -> Callable[[int, int], None]:
        """A function that counts the executions of an operator."""
        return self._ops.setdefault(op_id, GraphOp(module)).add

    def figures_of(self, model: str) -> Mapping[str, tuple[int, int]]:
        """Multiply-accumulates and bytes of one run of a model's graph, by path of a layer.

        An operator in a loop runs several times in a run: as often as it ran more often than most.
        """
        ops = [
            op
            for op in self._ops.values()
            if op.executions and (op.module == model or op.module.startswith(f"{model}/"))
        ]
        if not ops:
            return {}
        runs = collections.Counter(op.executions for op in ops).most_common(1)[0][0]
        found: dict[str, tuple[int, int]] = {}
        for op in ops:
            times = max(1, round(op.executions / runs))
            macs, size = found.get(op.module, (0, 0))
            found[op.module] = macs + times * op.macs, size + times * op.bytes
        return found
