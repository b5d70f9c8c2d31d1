"""Figures of operators that run in graphs of TensorFlow, where layers are not called by Python.

The driver tells where layers are entered and left in a run: operators between the two add to the
pass that runs. Those of layers of which it does not tell are counted, and a run is estimated.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import attrs

from amanda.interface.points import Point, PointContext
from amanda_tools.summary.keras_layers import KerasLayers, is_keras
from amanda_tools.summary.recorder import Recorder, specs_of


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
    """The operators of graphs, by the layers that made them.

    Args:
        recorder: has the passes of all models.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._ops: dict[str, GraphOp] = {}
        self._recorder = recorder.of_graphs()
        self._layers = KerasLayers()

    def adder(self, op_id: str, module: str) -> Callable[[int, int], None]:
        """A function that counts the executions of an operator."""
        op = self._ops.setdefault(op_id, GraphOp(module))

        def add(macs: int, size: int) -> None:
            if not self._recorder.add_at(module, macs, size):
                op.add(macs, size)

        return add

    def passed(self, point: PointContext) -> None:
        """A routine at modules: a layer is entered or left in a run of a graph."""
        if is_eager(point.namespace) or not is_keras(point.target):
            return
        if point.point is Point.MODULE_ENTRY:
            self._recorder.enter(self._layers, point.target, ())
        else:
            self._recorder.leave(point.target, specs_of(point.outputs))

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


def is_eager(namespace: str) -> bool:
    """Whether operators run at once: of PyTorch, and in one mode of TensorFlow."""
    return not namespace.startswith("tensorflow/") or namespace.endswith("/eager")
