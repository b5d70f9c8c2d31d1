"""The standard mapping rules for PyTorch: canonical types, roles of inputs, layouts.

``MappingTool.standard()`` applies them (contract rule 15). They import no torch.
"""

from __future__ import annotations

import re
import sys
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.python.memo import Memo
from amanda.tools.contraction import weight_layout
from amanda_torch.attribute_rules import COLLECTIVES, RULES

if TYPE_CHECKING:
    from amanda.interface.context import OpContext

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

_TYPES: Mapping[str, str] = _TABLES["types"]
"""By canonical type, names of operators other than its own; ``relu_`` counts as ``relu``, too."""

_CANONICAL = {kind: name for name, kinds in _TYPES.items() for kind in kinds.split()}

_WEIGHTED: Mapping[str, tuple[int, int | None, str]] = {
    kind: (row["weight"], row.get("bias"), row["layout"])
    for kind, row in _TABLES["weighted"].items()
}
"""By canonical type: the weight's input, the bias's input (None without a bias) and the weight's
layout with a letter per axis. O and I are output and input channels, D H W axes of space, V E
entries and features of an embedding, C channels, B batch."""

_DATA: Mapping[str, str] = _TABLES["data"]
"""By canonical type: the layout of input and output, N for the batch and the other letters as
above."""

_BACKWARD: Mapping[str, str] = _TABLES["backward"]
"""Autograd nodes whose canonical type does not follow from their name."""

_LINEAR_BACKWARD = frozenset({"AddmmBackward", "MmBackward", "LinearBackward", "BmmBackward"})
"""Nodes that compute linear's gradients: with or without bias, on inputs of two or more axes."""


def standard(context: OpContext) -> None:
    """Set the canonical type, the roles and the layouts of one operator."""
    if context["op_type"] is None:
        _describe(context)
    if context.is_backward():
        backward, forward = context.get_backward_op().__name__, context["op_type"]
        is_own = "::" not in forward or backward.startswith("AccumulateGrad")
        context["backward_op_type"] = (
            canonical_backward(backward, forward) if is_own else f"{forward}_backward"
        )


def _describe(context: OpContext) -> None:
    """Set the keys of the forward operator."""
    op = context.get_op()
    name, library = op.__name__.rpartition("::")[2], library_of(op)
    keys = _KEYS.get((library, name))
    if keys is None:
        keys = _KEYS[library, name] = _keys_of(_type_of(library, canonical(name)))
    context.update(keys)
    op_type = keys["op_type"]
    if name == "addmm" and _value(context, 2) is not None:
        # addmm(bias, input, weight): the call of transformers' Conv1D.
        context.update(_keys_of("linear"), bias_index=0, weight_index=2, weight_layout="IO")
    elif op_type == "matmul" and (weight := _value(context, 1)) is not None:
        context["weight_index"] = 1
        context["weight_layout"] = "B" * (weight.dim() - 2) + "IO"
    elif op_type == "einsum":
        _describe_einsum(context)


def _value(context: OpContext, index: int) -> Any:
    """The input at `index`, if it is a variable; None also for an object that is not a tensor."""
    return context.get_value(index) if index < len(context.get_input_names()) else None


_REGISTERED = re.compile(r"(\w+)\.\w+(\.\w+)?")
"""The text of an operator of ``torch.ops``, or of one of its overloads: ``aten.add.Tensor``."""


_OF_PYTHON = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.FunctionType})
"""Types of functions that are no operators of ``torch.ops``."""


def library_of(op: Any) -> str:
    """The namespace of an operator of ``torch.ops``, the module of an ``autograd.Function``; "" for
    PyTorch's own operators."""
    given = getattr(getattr(op, "func", None), "args", ())
    if given and isinstance(given[0], type):
        module = given[0].__module__
        return "" if module.startswith("torch.") else module
    func = getattr(op, "func", op)
    if type(func) in _OF_PYTHON:
        # Most operators; the text of an object takes longer.
        module = getattr(func, "__module__", "")
        return "c10d" if module == "torch.distributed.distributed_c10d" else ""
    found = _REGISTERED.fullmatch(str(func))
    return "" if found is None or found[1] in ("aten", "prims", "prim") else found[1]


def _type_of(library: str, name: str) -> str:
    """The type of an operator: with the library's name in front if PyTorch has the same name."""
    if library == "quantized":
        # An object that is not a tensor holds the weight (2.13).
        return f"packed_{name}" if name.startswith(("linear", "conv")) else name
    if library.startswith(("c10d", "_c10d")):
        if name in COLLECTIVES:
            return name
        if name in ("gather", "scatter"):
            return f"dist_{name}"
    is_taken = name in RULES or name in _WEIGHTED or name in _TYPES
    aten = sys.modules["torch"].ops.aten if library else None
    return f"{library}::{name}" if library and (is_taken or hasattr(aten, name)) else name


_KEYS: Memo[tuple[str, str], Mapping[str, Any]] = Memo(1024)
"""By the operator's library and name, its keys. The library and the name may be those of a function
of the program."""


def _keys_of(op_type: str) -> Mapping[str, Any]:
    """The keys that follow from the canonical type."""
    keys: dict[str, Any] = {"op_type": op_type, "attribute_rule": RULES.get(op_type)}
    if op_type in _WEIGHTED:
        weight, bias, layout = _WEIGHTED[op_type]
        keys.update(weight_index=weight, bias_index=bias, weight_layout=layout)
    if op_type in _DATA:
        keys["data_layout"] = _DATA[op_type]
    return keys


def _describe_einsum(context: OpContext) -> None:
    """Set the weight of an einsum of two factors: the right one, or else the left one."""
    equation = str(context.get_attrs().get("equation", ""))
    if weight_layout(equation, 0) is None:
        return
    for index in (1, 0):
        if _value(context, index) is not None:
            context["weight_index"] = index
            context["weight_layout"] = weight_layout(equation, index)
            return


def canonical(name: str) -> str:
    """The canonical type of an operator: ``relu_`` is ``relu``, ``__eq__`` is ``eq``."""
    base = name.partition(".")[0]
    if base in _CANONICAL:
        return _CANONICAL[base]
    if base.startswith("__") and base.endswith("__"):
        base = base[2:-2]
    elif base.endswith("_"):
        base = base[:-1]
    return _CANONICAL.get(base, base)


def canonical_backward(name: str, op_type: str) -> str:
    """The canonical type of an autograd node: ``conv2d_backward``, ``mul_backward``."""
    stem = name.rstrip("0123456789")
    if stem == "ConvolutionBackward" and op_type.startswith("conv"):
        return f"{op_type}_backward"
    if op_type == "linear" and stem in _LINEAR_BACKWARD:
        return "linear_backward"
    if stem in _BACKWARD:
        return _BACKWARD[stem]
    return _snake(stem.removesuffix("Backward")) + "_backward"


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def _snake(name: str) -> str:
    """``MaxPool2DWithIndices`` as ``max_pool2d_with_indices``."""
    return _WORD.sub("_", name).lower()
