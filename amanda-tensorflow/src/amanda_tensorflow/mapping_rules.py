"""The standard mapping rules for TensorFlow (contract rule 15). They import no TensorFlow.

The canonical type of an operator is PyTorch's name for it, or else TensorFlow's own in lower case
with underscores: ``Conv2D`` is ``conv2d``, ``ConcatV2`` is ``cat``, ``MatrixBandPart`` is
``matrix_band_part``. A depthwise convolution is a ``conv2d``, as on PyTorch; the layout of its
weight differs. A product with a variable or constant of two dimensions or more, be it reshaped or
transposed, is a ``linear``; its bias is an operator of its own, ``bias_add``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.tools.contraction import weight_layout
from amanda_tensorflow.attribute_rules import RULES, permute, reshape

if TYPE_CHECKING:
    from amanda.interface.context import OpContext

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

TYPES: Mapping[str, str] = _TABLES["types"]
"""By canonical type, TensorFlow's types without versions (``V2``), where it is not their name in
lower case."""

_CANONICAL = {kind: name for name, kinds in TYPES.items() for kind in kinds.split()}

WEIGHTED: Mapping[str, tuple[int | None, int | None, str | None]] = {
    kind: (row.get("weight"), row.get("bias"), row.get("layout"))
    for kind, row in _TABLES["weighted"].items()
}
"""By type without version, the index of the weight, the index of the bias, and the weight's layout.

A letter per axis: I, O channels in and out, D, H, W space, V, E vocabulary and embedding. ``HWCM``
is a depthwise convolution: C channels with M outputs each."""

_LAYOUT_FUNCTIONS = (permute, reshape)
"""Functions that change the layout of tensors: those of TensorFlow have no methods for it."""

_TRANSPOSED = (("transpose_a", "adj_x", "a"), ("transpose_b", "adj_y", "b"))
"""Attributes of products by which the left and the right factor are transposed."""

_GRADIENT_ROLES: Mapping[str, Mapping[str, int]] = _TABLES["gradient_roles"]
"""By backward type without version, the output that is the gradient of each role.

Used where the driver does not know the names of gradients."""

_AGGREGATIONS = frozenset({"AddN", "AccumulateNV2"})
"""Types that add the gradients of several uses of a tensor."""

_SHAPE_ARITHMETIC = frozenset(_TABLES["shape_arithmetic"].split())
"""Types of operators in a gradient that compute shapes and constants, and no gradients."""


def standard(context: OpContext) -> None:
    """Set the canonical type, the roles and the layouts of one operator."""
    if context["op_type"] is None:
        _describe(context)
    if context.is_backward():
        kind = context.get_backward_op().type
        context["backward_op_type"] = canonical_backward(kind, context["op_type"])
        roles = _roles(context, kind)
        if roles:
            context["grad_input_roles"] = roles


def canonical(kind: str) -> str:
    """The canonical type for one of TensorFlow's types."""
    return _CANONICAL.get(unversioned(kind)) or _snake(kind)


def unversioned(kind: str) -> str:
    """A type without its version: ``FusedBatchNorm`` for ``FusedBatchNormV3``."""
    return re.sub(r"V\d+$", "", kind)


def canonical_backward(kind: str, op_type: str) -> str:
    """The canonical type of a backward operator: ``conv2d_backward``, ``accumulate_grad``.

    Operators that compute shapes or constants for a gradient keep their own type.

    Args:
        kind: the type of the backward operator.
        op_type: the canonical type of the forward operator.
    """
    if kind in _AGGREGATIONS:
        return "accumulate_grad"
    if kind in _SHAPE_ARITHMETIC:
        return canonical(kind)
    return f"{op_type}_backward"


def _describe(context: OpContext) -> None:
    """Set the keys that the forward operator determines."""
    kind = context.get_op().type
    attributes = context.get_attrs()
    op_type = canonical(kind)
    _set_weight(context, *WEIGHTED.get(unversioned(kind), (None, None, None)))
    if kind == "Conv":
        op_type = _describe_conv(context, attributes)
    elif kind == "Einsum":
        op_type = _describe_einsum(context, attributes)
    elif kind.startswith("CudnnRNN"):
        op_type = _recurrent(kind, attributes)
    elif op_type == "matmul":
        op_type = _describe_product(context, attributes)
    elif op_type == "index_select" and _is_weight(context, 0):
        op_type = "embedding"
        _set_weight(context, 0, None, "VE")
    context["op_type"] = op_type
    context["attribute_rule"] = RULES.get(kind)
    context["layout_functions"] = _LAYOUT_FUNCTIONS
    if isinstance(attributes.get("data_format"), str) and context["data_layout"] is None:
        context["data_layout"] = attributes["data_format"]


def _set_weight(
    context: OpContext, weight: int | None, bias: int | None, layout: str | None
) -> None:
    for key, value in (("weight_index", weight), ("bias_index", bias), ("weight_layout", layout)):
        if value is not None:
            context[key] = value


def _is_weight(context: OpContext, index: int) -> bool:
    """True if an input is a variable or a constant of two dimensions or more."""
    return _rank(context, index) >= 2


def _rank(context: OpContext, index: int) -> int:
    """Count the dimensions of a variable or constant; 0 for other inputs."""
    return len(getattr(context.get_value(index), "shape", ()))


def _describe_product(context: OpContext, attributes: Mapping[str, Any]) -> str:
    """The type of a matrix product: linear if a factor is a weight, the right one first."""
    for index, layout in ((1, "IO"), (0, "OI")):
        rank = _rank(context, index)
        if rank >= 2:
            transposed = any(attributes.get(name) for name in _TRANSPOSED[index])
            matrix = layout[::-1] if transposed else layout
            _set_weight(context, index, None, "B" * (rank - 2) + matrix)
            return "linear"
    return "matmul"


def _describe_einsum(context: OpContext, attributes: Mapping[str, Any]) -> str:
    """The type of an Einsum: linear if it has two factors and one is a weight."""
    equation = str(attributes.get("equation", ""))
    if weight_layout(equation, 0) is None:
        return "einsum"
    for index in (1, 0):
        if _is_weight(context, index):
            _set_weight(context, index, None, weight_layout(equation, index))
            return "linear"
    return "matmul"


def _describe_conv(context: OpContext, attributes: Mapping[str, Any]) -> str:
    """The type of a ``Conv``, of any rank: it has a stride for each axis of the data."""
    spatial = "DHW"[5 - len(attributes.get("strides") or "NHWC") :]
    last = attributes.get("data_format") != "CHANNELS_FIRST"
    _set_weight(context, 1, None, f"{spatial}IO")
    context["data_layout"] = f"N{spatial}C" if last else f"NC{spatial}"
    return f"conv{len(spatial)}d"


def _recurrent(kind: str, attributes: Mapping[str, Any]) -> str:
    """The type of a recurrent network of cuDNN, or of one of its helpers."""
    mode = str(attributes.get("rnn_mode", ""))
    if unversioned(kind) != "CudnnRNN":
        return _snake(kind)
    return mode if mode in ("lstm", "gru") else "rnn"


def _roles(context: OpContext, kind: str) -> dict[str, int]:
    """The outputs of a backward operator that are the gradients of input, weight and bias."""
    produced = context.get_grad_input_names()
    if not any(produced):
        return dict(_GRADIENT_ROLES.get(unversioned(kind), {}))
    names = context.get_input_names()
    weight, bias = context["weight_index"], context["bias_index"]
    data = next((i for i in range(len(names)) if i not in (weight, bias)), None)
    roles = {}
    for role, index in (("input", data), ("weight", weight), ("bias", bias)):
        name = names[index] if index is not None and index < len(names) else ""
        # The items of a list of tensors share a name, which then identifies none of them.
        if name and names.count(name) == 1 and name in produced:
            roles[role] = produced.index(name)
    return roles


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def _snake(kind: str) -> str:
    """``ResourceApplyAdam`` as ``resource_apply_adam``, ``ReadVariableOp`` as ``read_variable``."""
    name = unversioned(kind)
    name = name[:-2] if name.endswith("VariableOp") else name
    return _WORD.sub("_", name).lower()
