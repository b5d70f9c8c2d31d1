"""Figures of operators that run in graphs of TensorFlow, where layers are not called by Python.

The driver reports where layers are entered and left in a run: operators between the two points add
to the current pass. Operators of a graph in which no layer is called add to their name scopes.
"""

from __future__ import annotations

from amanda.interface.points import Point, PointContext
from amanda_tools._frameworks import is_keras
from amanda_tools.summary.keras_layers import KerasModules
from amanda_tools.summary.op_figures import Add
from amanda_tools.summary.recorder import Recorder, tensor_rows
from amanda_tools.summary.scopes import ScopedOp
from amanda_tools.summary.tensorflow_modules import DroppedModule, TensorFlowModules


class GraphOps:
    """The operators of graphs, by the layers that made them.

    Args:
        recorder: holds the passes of all models.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._eager_recorder = recorder
        self._recorder = recorder.of_graphs()
        self._layers = KerasModules()
        self._modules = TensorFlowModules()
        self._gone: dict[str, DroppedModule] = {}

    def adder(self, module: str, scoped: ScopedOp | None) -> Add:
        """Return a function that adds the executions of an operator to the module that runs.

        Args:
            module: path of the operator's module.
            scoped: the operator in its name scope, for graphs in which no module is called.
        """

        def add(flops: int | None, size: int) -> None:
            if not self._recorder.add_at(module, flops, size) and scoped is not None:
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
            recorder.leave(target, tensor_rows(point.outputs), point.inputs)
        else:
            source = self._layers if is_keras(target) else self._modules
            recorder.enter(source, target, place=point.module)
