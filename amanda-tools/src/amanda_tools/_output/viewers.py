"""The operator graph and figures of operators in the formats of other viewers.

``graph_collection(rows, edges)`` is a graph for Google's Model Explorer, ``node_data(name, rows,
key)`` a figure that it shows on that graph, both as they stand in JSON; ``graph_def(rows, edges,
graph_pb2)`` is TensorBoard's graph. The formats: https://github.com/google-ai-edge/model-explorer
(``graph_builder.py``, ``node_data_builder.py``), and TensorFlow's ``GraphDef``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from amanda.python.text import printable
from amanda_tools._operators.model_phases import MODEL
from amanda_tools._output.report.model_ops import names_of, tensor_text

GRAPH = "amanda"
"""Id of the graph; node data refer to it."""

_GRADIENT = ({"stop": 0, "bgColor": "#fff4e8"}, {"stop": 1, "bgColor": "#e8833a"})
"""Colours of the lowest and the highest value."""

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
"""Characters that names in TensorBoard's graphs must not have."""

Rows = Iterable[Mapping[str, Any]]


def graph_collection(rows: Sequence[Mapping[str, Any]], edges: Rows) -> dict[str, Any]:
    """Return forward operators and their edges for Model Explorer.

    Args:
        rows: rows of a result in the common form.
        edges: mappings with ``producer``, ``output``, ``consumer`` and ``input``.
    """
    nodes = {str(row["id"]): _node(row) for row in rows if row["direction"] == "forward"}
    for row in rows:
        # A forward operator lists its backward ones; no tensor leads from one to the other.
        if node := nodes.get(str(row.get("forward"))):
            node["attrs"].append({"key": "backward", "value": printable(str(row["type"]))})
    for edge in edges:
        if edge["consumer"] in nodes and edge["producer"] in nodes:
            nodes[edge["consumer"]]["incomingEdges"].append(
                {
                    "sourceNodeId": edge["producer"],
                    "sourceNodeOutputId": str(edge["output"]),
                    "targetNodeInputId": str(edge["input"]),
                }
            )
    return {"label": GRAPH, "graphs": [{"id": GRAPH, "nodes": list(nodes.values())}]}


def _node(row: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {key: row[key] for key in ("module", "source", "phase", "name") if row.get(key)}
    given = row.get("attributes")
    attributes.update(given if isinstance(given, Mapping) else {})
    names = [name.replace("/", "\u2215") for name in _groups(row)]
    return {
        "id": str(row["id"]),
        "label": str(row["type"]),
        "namespace": "/".join(names),
        "attrs": _pairs(attributes),
        "incomingEdges": [],
        "inputsMetadata": _tensors(row.get("inputs"), row.get("input_names") or ()),
        "outputsMetadata": _tensors(row.get("outputs"), ()),
    }


def _groups(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the groups around an operator: its modules, and outside of the model its
    phase, which viewers show closed."""
    phase, names = row.get("phase"), list(names_of(row["id"], row["module"]))
    return names if phase is None or phase in MODEL else [str(phase), *names]


def _tensors(tensors: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for i, tensor in enumerate(tensors if isinstance(tensors, (list, tuple)) else ()):
        if not isinstance(tensor, Mapping):
            continue
        about = {"tensor_shape": tensor_text(tensor), "device": tensor.get("device")}
        if i < len(names) and names[i]:
            about["__tensor_tag"] = names[i]
        found.append({"id": str(i), "attrs": _pairs({k: v for k, v in about.items() if v})})
    return found


def _pairs(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"key": str(key), "value": printable(str(value))} for key, value in values.items()]


def node_data(name: str, rows: Rows, key: str) -> dict[str, Any]:
    """Return a figure of operators for the graph of :func:`graph_collection`.

    Those of backward operators are added to that of the forward operator.
    """
    sums: dict[str, float] = {}
    for row in rows:
        op_id = str(row.get("forward") or row["id"])
        sums[op_id] = sums.get(op_id, 0) + (row.get(key) or 0)
    results = {op_id: {"value": value} for op_id, value in sums.items()}
    return {GRAPH: {"name": name, "results": results, "gradient": list(_GRADIENT)}}


def graph_def(rows: Rows, edges: Rows, graph_pb2: Any) -> Any:
    """Return forward operators and their edges as TensorBoard's message ``GraphDef``."""
    forward = [row for row in rows if row["direction"] == "forward"]
    names = _node_names(forward)
    graph = graph_pb2.GraphDef()
    nodes = {}
    for row in forward:
        nodes[row["id"]] = node = graph.node.add(name=names[row["id"]], op=str(row["type"]))
        _add_shapes(node, row.get("outputs") or ())
        for key, value in (row.get("attributes") or {}).items():
            node.attr[_NO_NAME.sub("_", str(key))].s = str(value).encode("utf-8", "replace")
    for edge in edges:
        if edge["consumer"] in nodes and edge["producer"] in names:
            output = f":{edge['output']}" if edge["output"] else ""
            nodes[edge["consumer"]].input.append(names[edge["producer"]] + output)
    graph.versions.producer = 22
    return graph


def _node_names(rows: Rows) -> dict[str, str]:
    """Return a unique node name by operator id."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for row in rows:
        parts = [*_groups(row), str(row["id"]).rpartition("/")[2]]
        name = "/".join(_NO_NAME.sub("_", part) for part in parts)
        while name in taken:
            name += "_"
        taken.add(name)
        names[row["id"]] = name
    return names


def _add_shapes(node: Any, outputs: Iterable[Any]) -> None:
    """Add the shapes of an operator's outputs to its node; an unknown size is -1."""
    for tensor in outputs:
        if isinstance(tensor, Mapping) and isinstance(tensor.get("shape"), (list, tuple)):
            shape = node.attr["_output_shapes"].list.shape.add()
            for size in tensor["shape"]:
                shape.dim.add(size=-1 if size is None else size)
