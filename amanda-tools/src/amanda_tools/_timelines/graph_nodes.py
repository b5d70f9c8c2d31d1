"""Names of the nodes of TensorFlow's graphs, by which the records of its runtime are assigned."""

from __future__ import annotations

from amanda import OpContext
from amanda.tools.description import OpDescription
from amanda_tools._timelines.xplane import Names


def note_nodes(names: Names, context: OpContext, op: OpDescription) -> None:
    """Note the nodes of an operator of a graph, in an analysis after it."""
    tensors = context.get_outputs() if context.is_forward() else context.get_grad_inputs()
    nodes = {tensor.op.name for tensor in tensors or () if tensor is not None}
    if context.is_forward():
        # In loops, and without outputs, its name in the graph has the node's path, with the type
        # appended where the node's name lacks it.
        path = context.get_node_name().partition("/")[2]
        short = path.removesuffix(f"/{op.name}")
        if nodes:
            nodes |= {p for p in (path, short) if any(f"/{p}".endswith(f"/{end}") for end in nodes)}
        else:
            # `short` may be another operator's node, the scope of this one; of another type then.
            nodes = {path, f"{short}:{op.name}"}
    for node in nodes:
        names.add(node, op.id, context.get_node_name())
