"""Figures of operators that run in graphs of TensorFlow, where layers are not called by Python.

The driver reports where layers are entered and left in a run: operators between the two points add
to the current pass. Operators of layers that the driver does not report are counted, and their
number of executions in a run is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from amanda.interface.points import Point, PointContext
from amanda_tools.summary.executions import GraphOp, runs_of
from amanda_tools.summary.keras_layers import KerasModules, is_keras
from amanda_tools.summary.recorder import Recorder, specs_of
from amanda_tools.summary.scopes import ScopedOp
from amanda_tools.summary.tensorflow_modules import DroppedModule, TensorFlowModules


class GraphOps:
    """The operators of graphs, by the layers that made them.

    Args:
        recorder: holds the passes of all models.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._ops: dict[str, GraphOp] = {}
        self._eager_recorder = recorder
        self._recorder = recorder.of_graphs()
        self._layers = KerasModules()
        self._modules = TensorFlowModules()
        self._gone: dict[str, DroppedModule] = {}

    def adder(self, op_id: str, module: str, scoped: ScopedOp | None) -> Callable[[int, int], None]:
        """Return a function that counts the executions of an operator.

        Args:
            scoped: the operator in its name scope, for graphs in which no module is called.
        """
        op = self._ops.setdefault(op_id, GraphOp(module))

        def add(flops: int, size: int) -> None:
            if not self._recorder.add_at(module, flops, size):
                op.add(flops, size)
                if scoped is not None:
                    scoped.add(flops, size)

        return add

    def passed(self, point: PointContext) -> None:
        """Instrumentation routine: a module is entered or left, in a run of a graph or eagerly."""
        if not point.namespace.startswith("tensorflow/"):
            return
        target, recorder = point.target, self._recorder
        if point.runs_at_once:
            recorder = self._eager_recorder
        if target is None:
            name = point.module.rpartition("/")[2] or point.id
            target = self._gone.setdefault(point.id, DroppedModule(name))
        if point.point is Point.MODULE_EXIT:
            recorder.leave(target, specs_of(point.outputs))
        else:
            source = self._layers if is_keras(target) else self._modules
            recorder.enter(source, target, place=point.module)

    def figures_of(self, model: str) -> Mapping[str, tuple[int, int]]:
        """Return FLOPs and bytes of one run of a model's graph, by path of a layer.

        An operator in a loop runs several times in a run: as often as it ran more often than most.
        """
        ops = [
            op
            for op in self._ops.values()
            if op.executions and (op.module == model or op.module.startswith(f"{model}/"))
        ]
        if not ops:
            return {}
        runs = runs_of(ops)
        found: dict[str, tuple[int, int]] = {}
        for op in ops:
            flops, size = found.get(op.module, (0, 0))
            of_op = op.figures_in(runs)
            found[op.module] = flops + of_op[0], size + of_op[1]
        return found
