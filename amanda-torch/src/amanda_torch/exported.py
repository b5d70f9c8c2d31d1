"""Reads the programs that ``torch.export`` and ``torch.onnx`` write, for ``amanda.align``."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from amanda.errors import FileError
from amanda.interface.driver import ExportedNode
from amanda_torch.mapping_rules import canonical

_NOTES = "pkg.torch.onnx."
"""What the keys of the metadata of nodes begin with, as torch.onnx writes them."""

_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_NUMBERS = re.compile(r"(_\d+)?(_split_\d+)?$")
"""The key of the metadata of a value that onnxscript's optimizer has computed beforehand, and the
end of the names of values, which begin with that of an operator (0.7)."""

_ALIASES = "contiguous clone alias detach view view_as reshape reshape_as flatten getitem to"

_OTHERS: Mapping[str, str] = {
    "_native_batch_norm_legit_no_training": "batch_norm", "_softmax": "softmax",
    "_log_softmax": "log_softmax", "_to_copy": "to float half double long int bool type type_as",
    "_unsafe_view": _ALIASES, "add": "sum", "addmm": "linear", "alias": _ALIASES,
    "clone": f"{_ALIASES} dropout", "convolution": "conv1d conv2d conv3d", "expand": "expand_as",
    "index": "getitem", "native_group_norm": "group_norm", "mean": "adaptive_avg_pool2d",
    "native_layer_norm": "layer_norm",
    "permute": "transpose t", "reshape": _ALIASES, "select": "getitem", "slice": "getitem narrow",
    "split": "chunk", "split_with_sizes": "split chunk", "squeeze": "getitem",
    "sub": "diff", "to": "float half double long int bool type type_as",
    "transpose": "permute t", "unsqueeze": "getitem", "view": _ALIASES,
}  # fmt: skip
"""By an operator of a program, types that an exporter writes as it, or with it as the last one."""


def nodes_of(target: Any) -> list[ExportedNode] | None:
    """Return the nodes of a program or of its file; None for anything else.

    Raises:
        FileError: the file cannot be read.
    """
    if isinstance(target, (str, os.PathLike)):
        target = _read(os.fspath(target))
    if isinstance(target, torch.export.ExportedProgram):
        return list(_of_graph(target.graph))
    if type(target).__name__ == "ModelProto":
        target = importlib.import_module("onnx_ir").from_proto(target)
    if isinstance(target, torch.onnx.ONNXProgram):
        target = target.model
    ir = sys.modules.get("onnx_ir")
    return _of_onnx(target.graph) if ir is not None and isinstance(target, ir.Model) else None


def _read(path: str) -> Any:
    """Read a file of a program; None for a file of another kind."""
    try:
        if path.endswith(".pt2"):
            return torch.export.load(path)
        if path.endswith(".onnx"):
            return importlib.import_module("onnx_ir").load(path)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise FileError(f"{path} cannot be read: {reason}") from error
    return None


def _types(name: str, library: str = "") -> frozenset[str]:
    """The types of the operators that may have become an operator of a library, "" for aten."""
    if library:
        return frozenset({f"{library}::{name}"})
    kind = canonical(name)
    return frozenset({kind, *_OTHERS.get(kind, "").split(), *_OTHERS.get(name, "").split()})


def _of_graph(graph: torch.fx.Graph) -> Iterator[ExportedNode]:
    """Yield the groups of nodes that decompositions have made of one node each."""
    called = [node for node in graph.nodes if len(str(node.target).split(".")) == 3]
    for (module, _, operator), group in itertools.groupby(called, _origin_of):
        nodes = list(group)
        value = nodes[-1].meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        yield ExportedNode(
            module,
            _types_of(str(nodes[-1].target)) | _types_of(operator),
            [_known(v.shape) for v in values if isinstance(v, torch.Tensor)],
            tuple(node.name for node in nodes),
        )


def _types_of(target: str) -> frozenset[str]:
    """The types of the operators that may have become a node of this target."""
    library, name, _ = target.split(".")
    return _types(name, "" if library == "aten" else library)


def _known(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """A shape with None for each size that is a symbol."""
    return tuple(size if isinstance(size, int) else None for size in shape)


def _origin_of(node: torch.fx.Node) -> tuple[str, str, str]:
    """Return the module that has made a node, and the node and the operator that ``torch.export``
    had there, which decompositions replace."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    name, operator, sources = node.name, str(node.target), node.meta.get("from_node")
    while sources:
        name, operator = sources[-1].name, sources[-1].target
        sources = sources[-1].from_node
    return modules[-1][0] if modules else "", name, operator


def _of_onnx(graph: Any) -> list[ExportedNode]:
    """Return the groups of nodes that the exporter has made of one operator each."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    lost = [value for value in graph.initializers.values() if _FOLDED in value.metadata_props]
    for node in graph:
        notes = node.metadata_props
        paths = ast.literal_eval(notes.get(f"{_NOTES}name_scopes", "[]"))
        kinds = ast.literal_eval(notes.get(f"{_NOTES}class_hierarchy", "[]"))
        if paths and kinds and kinds[-1].startswith("aten."):
            module = paths[-2] if len(paths) > 1 else ""
            groups.setdefault((paths[-1], module, kinds[-1]), []).append(node)
        else:
            lost += node.outputs
    return [
        *(_group(module, kind, nodes) for (_, module, kind), nodes in groups.items()),
        ExportedNode(None, frozenset().union(*map(_rewritten, lost))),
    ]


def _rewritten(value: Any) -> frozenset[str]:
    """The types of the operators that may have computed a value that has lost them: by its name,
    or the names of all that the optimizer has computed it from."""
    folded = ast.literal_eval(value.metadata_props.get(_FOLDED, "[]"))
    names = (_NUMBERS.sub("", name) for name in (value.name, *folded) if "." not in name)
    return frozenset().union(*map(_types, names))


def _group(module: str, kind: str, nodes: Sequence[Any]) -> ExportedNode:
    own = {id(node) for node in nodes}
    made = [value for node in nodes for value in node.outputs]
    given = [v for v in made if v.is_graph_output() or any(id(n) not in own for n, _ in v.uses())]
    shapes = None
    # Of a sequence of tensors, as which a split is written, they are not known.
    if not any(node.op_type == "SplitToSequence" for node in nodes):
        shapes = [_known(value.shape) for value in given if value.shape is not None]
    read = [value for node in nodes for value in node.inputs if value is not None]
    parameters = frozenset(value.name for value in read if value.is_initializer())
    parts = tuple(node.name for node in nodes)
    return ExportedNode(module, _types(kind.split(".")[1]), shapes, parts, parameters)
