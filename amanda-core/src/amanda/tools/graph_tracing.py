"""Graph tracing: records the operators, the tensors between them and the backward operators.

The graph is ``tool.graph``; tools that depend on :class:`GraphTracingTool` also read it as
``context["graph"]``::

    tracing = GraphTracingTool()
    with amanda.apply(tracing):
        y = model(x)
    for op in tracing.graph.ops:
        print(op.id, op.type, op.module)
    (again,) = tracing.graph.replay([x])

The graph refers to tensors weakly; a tensor that takes no weak reference, such as a NumPy scalar,
is kept alive until the scope ends.
"""

from __future__ import annotations

from typing import Any

from amanda.interface.context import OpContext
from amanda.interface.tool import Tool, traceable
from amanda.tools.graph import Edge, Graph, TracedOp, TracedTensor
from amanda.tools.mapping import MappingTool

__all__ = ["Edge", "Graph", "GraphTracingTool", "TracedOp", "TracedTensor"]


class GraphTracingTool(Tool):
    """Records the graph of the operators that run (paper, section 5.2).

    An operator is recorded at its first execution. A routine binds its output tensors to the graph
    at every execution, so that operators that first run in a later iteration are connected to it;
    without the routine they read tensors that seem to be inputs of the graph. A tensor that a tool
    returns in place of an output is that output to the graph.

    Args:
        follow: True to insert that routine. Without it an operator costs nothing once it is
            recorded.

    Attributes:
        graph: the graph, which other tools read as ``context["graph"]``.
    """

    only_watches = True

    def __init__(self, *, follow: bool = True) -> None:
        super().__init__()
        self.graph = Graph()
        self._follows = follow
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self._trace, require_outputs=True)
        self.add_inst_for_op(self._trace_backward, backward=True)

    def exit_scope(self) -> None:
        self.graph.release()

    def before_analyses(self, context: OpContext) -> None:
        context["graph"] = self.graph

    def note_substitute(self, output: Any, substitute: Any) -> None:
        self.graph.note_substitute(output, substitute)

    def _trace(self, context: OpContext) -> None:
        op = self.graph.add(context)
        if self._follows and any(tensor is not None for tensor in op.outputs):
            context.insert_after_op(self._follow, op=op)

    def _trace_backward(self, context: OpContext) -> None:
        self.graph.add_backward(context)

    # Traceable: graph drivers call it once, while they instrument a graph, with symbolic tensors.
    @traceable
    def _follow(self, *outputs: Any, op: TracedOp) -> None:
        self.graph.follow(op, outputs)
