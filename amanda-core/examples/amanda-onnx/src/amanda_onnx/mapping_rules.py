"""The standard mapping rules for ONNX. They import no framework.

The canonical type of an operator is PyTorch's name for it, or else ONNX's own in lower case with
underscores. A product with a constant matrix is a ``linear``; its bias, if not that of a ``Gemm``,
is an ``add`` of its own.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import amanda
from amanda.tools import canonical
from amanda.tools.canonical import AttributeRule, axes, axis, known, output_shape, shape_of

Found = Mapping[str, Any]

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

TYPES = {kind: name for name, kinds in _TABLES["types"].items() for kind in kinds.split()}
"""By type of ONNX the canonical type, where that is not its name in lower case."""

RANKED: Mapping[str, str] = _TABLES["ranked"]
"""By type of ONNX the canonical type without the number of axes of space."""

WEIGHTED: Mapping[str, Mapping[str, Any]] = _TABLES["weighted"]
"""By canonical type the places of weight and bias, and the weight's layout."""

_LETTERS = {1: "W", 2: "HW", 3: "DHW"}


def standard(context: amanda.OpContext) -> None:
    """Set the canonical type, the roles, the layouts and the rule of attributes."""
    kind = context.get_op().__name__
    op_type = TYPES.get(kind) or _snake(kind)
    space = _LETTERS.get(_rank(context, 0) - 2, "")
    if kind in RANKED and space:
        op_type = f"{RANKED[kind]}{len(space)}d"
        context["data_layout"] = f"NC{space}"
    if kind in ("Conv", "ConvTranspose"):
        channels = "OI" if kind == "Conv" else "IO"
        context.update(weight_index=1, bias_index=2, weight_layout=f"{channels}{space}")
    elif kind in ("Gemm", "MatMul"):
        op_type = _product(context, kind)
    elif (
        kind == "Gather" and _constant_rank(context, 0) == 2 and not _attribute(context, "axis", 0)
    ):
        op_type = "embedding"
        context.update(weight_index=0, weight_layout="VE")
    elif kind == "Trilu":
        op_type = "triu" if _attribute(context, "upper", 1) else "tril"
    elif kind == "Resize":
        op_type = _resize(context)
    elif op_type in WEIGHTED:
        row = WEIGHTED[op_type]
        context.update(
            weight_index=row["weight"], bias_index=row.get("bias"), weight_layout=row["layout"]
        )
    context["op_type"] = op_type
    context[canonical.RULE] = RULES.get(op_type)


def _product(context: amanda.OpContext, kind: str) -> str:
    """The type of a matrix product: linear if a factor is constant, the right one first."""
    if kind == "Gemm":
        context["bias_index"] = 2
    for index, layout, flag in ((1, "IO", "transB"), (0, "OI", "transA")):
        rank = _constant_rank(context, index)
        if rank >= 2:
            matrix = layout[::-1] if _attribute(context, flag, 0) else layout
            context.update(weight_index=index, weight_layout="B" * (rank - 2) + matrix)
            return "linear"
    if kind == "Gemm":
        layout = "OI" if _attribute(context, "transB", 0) else "IO"
        context.update(weight_index=1, weight_layout=layout)
        return "linear"
    return "matmul"


def _resize(context: amanda.OpContext) -> str:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        _attribute(context, "mode", ""), "nearest"
    )
    return f"upsample_{mode}2d" if _rank(context, 0) == 4 else "resize"


# -- attributes ---------------------------------------------------------------


def _attribute(context: amanda.OpContext, name: str, default: Any) -> Any:
    return context.get_attrs().get(name, default)


def _rank(context: amanda.OpContext, index: int) -> int:
    shape = shape_of(context, index)
    return 0 if shape is None else len(shape)


def _constant_rank(context: amanda.OpContext, index: int) -> int:
    """Count the axes of a constant; 0 for other inputs."""
    return getattr(context.get_value(index), "ndim", 0)


def _numbers(context: amanda.OpContext, name: str) -> Any:
    """An attribute that later versions of an operator have as an input: numbers, or None."""
    names = list(context.get_input_names())
    tensor = context.get_inputs()[names.index(name)] if name in names else None
    return _attribute(context, name, None) if tensor is None else tensor.tolist()


def _places(context: amanda.OpContext) -> int:
    return _rank(context, 0) - 2


def _window(context: amanda.OpContext) -> dict[str, Any]:
    """Windows of convolutions and pools."""
    given, count = context.get_attrs(), _places(context)
    kernel = given.get("kernel_shape") or (shape_of(context, 1) or ())[2:]
    stride = tuple(given.get("strides") or [1] * count)
    dilation = tuple(given.get("dilations") or [1] * count)
    pads = given.get("pads") or [0] * 2 * count
    padding: Any = tuple(zip(pads[:count], pads[count:], strict=True))
    auto = given.get("auto_pad", "NOTSET")
    if auto.startswith("SAME"):
        sizes = (shape_of(context, 0) or ())[2:]
        padding = canonical.same_padding(sizes, kernel, stride, dilation)
        if auto == "SAME_LOWER" and padding is not None:
            padding = tuple(pair[::-1] for pair in padding)
    elif auto == "VALID":
        padding = ((0, 0),) * count
    found = {"kernel_size": tuple(kernel), "stride": stride, "padding": padding}
    return {**known(**found), "dilation": dilation}


def _convolution(context: amanda.OpContext) -> Found:
    return {**_window(context), "groups": _attribute(context, "group", 1)}


def _transposed_convolution(context: amanda.OpContext) -> Found:
    extra = _attribute(context, "output_padding", None) or [0] * _places(context)
    found = {**_convolution(context), "output_padding": tuple(extra)}
    given = context.get_attrs()
    if given.get("output_shape") or given.get("auto_pad", "NOTSET").startswith("SAME"):
        del found["padding"]  # It follows from the shape that the output shall have.
    return found


def _max_pool(context: amanda.OpContext) -> Found:
    return {**_window(context), "ceil_mode": bool(_attribute(context, "ceil_mode", 0))}


def _avg_pool(context: amanda.OpContext) -> Found:
    found = dict(_max_pool(context))
    del found["dilation"]
    padded = any(any(pair) for pair in found.get("padding", ()))
    return {
        **found,
        "count_include_pad": padded and bool(_attribute(context, "count_include_pad", 0)),
    }


def _global_pool(context: amanda.OpContext) -> Found:
    return {"output_size": (1,) * _places(context)}


def _linear(context: amanda.OpContext) -> Found:
    shape = shape_of(context, context["weight_index"]) or ()
    sizes = dict(zip(reversed(context["weight_layout"]), reversed(shape), strict=False))
    return known(in_features=sizes.get("I"), out_features=sizes.get("O"))


def _embedding(context: amanda.OpContext) -> Found:
    entries, width = shape_of(context, 0) or (None, None)
    return known(num_embeddings=entries, embedding_dim=width)


def _batch_norm(context: amanda.OpContext) -> Found:
    training = bool(_attribute(context, "training_mode", 0))
    momentum = _attribute(context, "momentum", 0.9)
    # ONNX weighs the old value, PyTorch the new one.
    return known(
        eps=_attribute(context, "epsilon", 1e-5),
        training=training,
        momentum=1 - momentum if training else None,
    )


def _instance_norm(context: amanda.OpContext) -> Found:
    return {"eps": _attribute(context, "epsilon", 1e-5), "training": True}


def _group_norm(context: amanda.OpContext) -> Found:
    groups = _attribute(context, "num_groups", None)
    return known(eps=_attribute(context, "epsilon", 1e-5), groups=groups)


def _layer_norm(context: amanda.OpContext) -> Found:
    rank = _rank(context, 0)
    first = _attribute(context, "axis", -1) % rank
    return {"eps": _attribute(context, "epsilon", 1e-5), "axis": tuple(range(first, rank))}


def _response_norm(context: amanda.OpContext) -> Found:
    given = context.get_attrs()
    defaults = {"alpha": 1e-4, "beta": 0.75}
    found = {name: given.get(name, value) for name, value in defaults.items()}
    return known(size=given.get("size"), k=given.get("bias", 1.0), **found)


def _along(default: int) -> AttributeRule:
    """A rule of operators along one axis."""

    def along(context: amanda.OpContext) -> Found:
        return known(axis=axis(_attribute(context, "axis", default), _rank(context, 0)))

    return along


def _cumulative(context: amanda.OpContext) -> Found:
    place = _numbers(context, "axis")
    return {} if place is None else known(axis=axis(_one(place), _rank(context, 0)))


def _one(value: Any) -> Any:
    """The only item of a list, or the number itself."""
    return value[0] if isinstance(value, list) else value


def _reduction(context: amanda.OpContext) -> dict[str, Any]:
    given = _numbers(context, "axes")
    keepdim = bool(_attribute(context, "keepdims", 1))
    if not given and _attribute(context, "noop_with_empty_axes", 0):
        return {"axis": (), "keepdim": keepdim}
    return known(axis=axes(given or None, _rank(context, 0)), keepdim=keepdim)


def _extremum(context: amanda.OpContext) -> Found:
    place = axes(_attribute(context, "axis", 0), _rank(context, 0))
    return known(axis=place, keepdim=bool(_attribute(context, "keepdims", 1)))


def _norm(context: amanda.OpContext) -> Found:
    order = 1.0 if context.get_op().__name__ == "ReduceL1" else 2.0
    return {**_reduction(context), "ord": order}


def _split(context: amanda.OpContext) -> Found:
    place = axis(_attribute(context, "axis", 0), _rank(context, 0))
    sizes = _numbers(context, "split")
    count = _attribute(context, "num_outputs", None)
    whole = None if place is None else (shape_of(context, 0) or ())[place]
    if sizes is None and count and whole is not None:
        size = math.ceil(whole / count)
        sizes = [min(size, max(whole - size * i, 0)) for i in range(count)]
    return known(axis=place, sizes=None if sizes is None else tuple(sizes))


def _squeeze(context: amanda.OpContext) -> Found:
    shape = shape_of(context, 0) or ()
    found = axes(_numbers(context, "axes"), len(shape))
    return known(axis=None if found is None else tuple(i for i in found if shape[i] == 1))


def _unsqueeze(context: amanda.OpContext) -> Found:
    given = _numbers(context, "axes")
    return {} if given is None else known(axis=axes(given, _rank(context, 0) + len(given)))


def _to_shape(context: amanda.OpContext) -> Found:
    """Operators whose attribute is the shape of their output; without it the shape asked for."""
    shape, given = shape_of(context, 0) or (), None
    if context.get_op().__name__ == "Flatten":
        place = _attribute(context, "axis", 1)
        place = place % len(shape) if place < 0 else place
        given = [math.prod(shape[:place]), math.prod(shape[place:])]  # type: ignore[arg-type]
    elif (found := _numbers(context, "shape")) is not None:
        copied = not _attribute(context, "allowzero", 0)
        given = [
            shape[i] if n == 0 and copied and i < len(shape) else n for i, n in enumerate(found)
        ]
        if context["op_type"] == "broadcast_to":
            given = _broadcast(list(shape), found)
    if given is None:
        return known(shape=output_shape(context))
    return {"shape": canonical.resolved(given, canonical.element_count(shape))}


def _broadcast(one: list[Any], other: list[Any]) -> list[Any]:
    rank = max(len(one), len(other))
    pairs = zip([1] * (rank - len(one)) + one, [1] * (rank - len(other)) + other, strict=True)
    return [b if a == 1 else a for a, b in pairs]


def _permute(context: amanda.OpContext) -> Found:
    perm = _attribute(context, "perm", None)
    return {"perm": tuple(perm or range(_rank(context, 0) - 1, -1, -1))}


def _tile(context: amanda.OpContext) -> Found:
    repeats = _numbers(context, "repeats")
    return known(repeats=None if repeats is None else tuple(repeats))


def _pad(context: amanda.OpContext) -> Found:
    rank, pads, some = _rank(context, 0), _numbers(context, "pads"), _numbers(context, "axes")
    if pads is None:
        return {}
    places = range(rank) if some is None else [place % rank for place in some]
    pairs = dict(
        zip(places, zip(pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True), strict=True)
    )
    mode = _attribute(context, "mode", "constant")
    value = _numbers(context, "constant_value") or _attribute(context, "value", 0.0)
    return known(
        padding=tuple(pairs.get(place, (0, 0)) for place in range(rank)),
        mode={"edge": "replicate", "wrap": "circular"}.get(mode, mode),
        value=float(_one(value)) if mode == "constant" else None,
    )


def _slice(context: amanda.OpContext) -> Found:
    shape = shape_of(context, 0) or ()
    starts, ends = _numbers(context, "starts"), _numbers(context, "ends")
    if starts is None or ends is None:
        return {}
    places = _numbers(context, "axes") or range(len(starts))
    steps = _numbers(context, "steps") or [1] * len(starts)
    items: list[Any] = [slice(None)] * len(shape)
    for place, *bounds in zip(places, starts, ends, steps, strict=True):
        items[place] = slice(*bounds)
    return known(index=canonical.index_items(items, shape))


def _clamp(context: amanda.OpContext) -> Found:
    return known(min=_numbers(context, "min"), max=_numbers(context, "max"))


def _topk(context: amanda.OpContext) -> Found:
    k = _numbers(context, "K") or _attribute(context, "k", None)
    return known(
        k=None if k is None else int(_one(k)),
        axis=axis(_attribute(context, "axis", -1), _rank(context, 0)),
        largest=bool(_attribute(context, "largest", 1)),
    )


_ELEMENT_TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    8: "string", 9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64",
    14: "complex64", 15: "complex128", 16: "bfloat16",
}  # fmt: skip


def _cast(context: amanda.OpContext) -> Found:
    return known(dtype=_ELEMENT_TYPES.get(_attribute(context, "to", 0)))


def _one_hot(context: amanda.OpContext) -> Found:
    depth = _numbers(context, "depth")
    return known(depth=None if depth is None else int(_one(depth)))


def _triangle(context: amanda.OpContext) -> Found:
    return {"diagonal": int(_one(_numbers(context, "k") or 0))}


def _dropout(context: amanda.OpContext) -> Found:
    p, training = _numbers(context, "ratio"), _numbers(context, "training_mode")
    return {"p": 0.5 if p is None else float(_one(p)), "training": bool(_one(training or False))}


def _resized(context: amanda.OpContext) -> Found:
    sizes, scales = _numbers(context, "sizes"), _numbers(context, "scales")
    shape = shape_of(context, 0) or ()
    if not sizes and scales:
        sizes = [int(old * by) for old, by in zip(shape, scales, strict=True) if old is not None]
    corners = _attribute(context, "coordinate_transformation_mode", "half_pixel") == "align_corners"
    return known(output_size=tuple(sizes[2:]) if sizes else None, align_corners=corners)


def _given(**defaults: tuple[str, Any]) -> AttributeRule:
    """A rule that reads attributes by ONNX's names, with their defaults."""

    def given(context: amanda.OpContext) -> Found:
        return {key: _attribute(context, *found) for key, found in defaults.items()}

    return given


_RULES: Mapping[str, AttributeRule] = {
    "conv1d conv2d conv3d": _convolution,
    "conv_transpose1d conv_transpose2d conv_transpose3d": _transposed_convolution,
    "max_pool1d max_pool2d max_pool3d": _max_pool,
    "avg_pool1d avg_pool2d avg_pool3d": _avg_pool,
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": _global_pool,
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d": _global_pool,
    "linear": _linear,
    "matmul": lambda context: {"transpose_a": False, "transpose_b": False},
    "einsum": lambda context: {
        "equation": str(_attribute(context, "equation", "")).replace(" ", "")
    },
    "embedding": _embedding,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm rms_norm": _layer_norm,
    "local_response_norm": _response_norm,
    "softmax log_softmax": _along(-1),
    "cat index_select gather": _along(0),
    "cumsum": _cumulative,
    "sum mean prod amax amin logsumexp": _reduction,
    "argmax argmin": _extremum,
    "norm": _norm,
    "split": _split,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "reshape broadcast_to": _to_shape,
    "permute": _permute,
    "tile": _tile,
    "pad": _pad,
    "getitem": _slice,
    "clamp": _clamp,
    "topk": _topk,
    "to": _cast,
    "one_hot": _one_hot,
    "tril triu": _triangle,
    "dropout": _dropout,
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d": _resized,
    "gelu": _given(approximate=("approximate", "none")),
    "leaky_relu": _given(alpha=("alpha", 0.01)),
    "elu celu": _given(alpha=("alpha", 1.0)),
    "softplus": lambda context: {"beta": 1.0},
    "add sub": lambda context: {"alpha": 1},
}

_PLAIN = """
    abs acos acosh arange asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_not bitwise_or
    bitwise_xor ceil cos cosh div eq erf exp floor full ge gt hardsigmoid hardswish identity isinf
    isnan le log logical_and logical_not logical_or logical_xor lt maximum minimum mish mul ne neg
    nonzero pow rand randn reciprocal relu remainder round selu shape sigmoid sign silu sin sinh
    size softsign sqrt tan tanh where
"""
"""Canonical types without canonical attributes."""

RULES: Mapping[str, AttributeRule] = {
    **dict.fromkeys(_PLAIN.split(), lambda context: {}),
    **{kind: rule for kinds, rule in _RULES.items() for kind in kinds.split()},
}
"""By canonical type the function that gives the canonical attributes."""

_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def _snake(kind: str) -> str:
    """``LeakyRelu`` as ``leaky_relu``."""
    return _WORD.sub("_", kind).lower()
