"""Graph tracing: operators, the tensors between them, backward operators, module paths.

A tool that depends on :class:`GraphTracingTool` finds the graph in
``context["graph"]``; afterwards it is ``tool.graph``::

    tracing = GraphTracingTool()
    with amanda.apply(tracing):
        y = model(x)
    for op in tracing.graph.ops:
        print(op.id, op.type, op.module)
    (again,) = tracing.graph.replay([x])

The graph holds tensors weakly; one that takes no weak reference, such as a NumPy scalar, it
holds until the scope ends.
"""

from __future__ import annotations

from typing import Any

from amanda.interface.context import OpContext
from amanda.interface.tool import Tool, traceable
from amanda.tools.graph import Edge, Graph, TracedBackwardOp, TracedOp, TracedTensor
from amanda.tools.mapping import MappingTool

__all__ = [
    "Edge",
    "Graph",
    "GraphTracingTool",
    "TracedBackwardOp",
    "TracedOp",
    "TracedTensor",
]


class GraphTracingTool(Tool):
    """Records the graph of what runs (paper, section 5.2).

    Each operator is recorded at its first execution; a routine follows its
    outputs at every execution, so that operators that are first met later are
    connected too. Without it an operator that is first met in a later iteration
    reads from tensors that seem to come from outside of the graph. A tensor that
    a tool has put in the place of another one is connected only if that tool acts
    before this one.

    Args:
        follow: use that routine. Without it an operator costs nothing once it is recorded.

    Attributes:
        graph: the graph, which other tools find as ``context["graph"]``.
    """

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

    def _trace(self, context: OpContext) -> None:
        op = self.graph.add(context)
        if self._follows and any(tensor is not None for tensor in op.outputs):
            context.insert_after_op(self._follow, op=op)

    def _trace_backward(self, context: OpContext) -> None:
        self.graph.add_backward(context)

    # In a graph mode the tensors are followed once, while the graph is instrumented.
    @traceable
    def _follow(self, *outputs: Any, op: TracedOp) -> None:
        self.graph.follow(op, outputs)
