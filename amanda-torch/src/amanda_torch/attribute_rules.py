"""Canonical attributes of PyTorch's operators (``amanda.tools.canonical``). It imports no torch.

``RULES["conv2d"](context)`` gives the attributes of a convolution. The mapping rules put a rule
into the context by the canonical type; it runs where a tool asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from amanda.interface.context import OpContext
from amanda.tools.canonical import (
    AttributeRule,
    axes,
    axis,
    element_count,
    index_items,
    known,
    per_place,
    resolved,
    same_padding,
    shape_of,
    total,
)

Found = Mapping[str, Any]

_REDUCTIONS = ("none", "mean", "sum")
"""The reductions of losses, by PyTorch's number for each."""


def _places(context: OpContext) -> int:
    """The number of axes of space: 2 of ``conv2d``."""
    return int(str(context["op_type"])[-2])


def _kernel(context: OpContext) -> tuple[int, ...]:
    shape = shape_of(context, context["weight_index"]) or ()
    return tuple(size or 0 for size in shape[2:])


def _pairs(padding: Any, count: int) -> tuple[tuple[int, int], ...]:
    return tuple((size, size) for size in per_place(padding, count))


def _convolution(context: OpContext) -> Found:
    given, count = context.get_attrs(), _places(context)
    kernel = _kernel(context)
    stride = per_place(given["stride"], count)
    dilation = per_place(given["dilation"], count)
    padding = given["padding"]
    if padding == "same":
        pairs = same_padding([None] * count, kernel, [1] * count, dilation)
    else:
        pairs = _pairs(0 if padding == "valid" else padding, count)
    return {
        "kernel_size": kernel,
        "stride": stride,
        "padding": pairs,
        "dilation": dilation,
        "groups": given["groups"],
    }


def _transposed_convolution(context: OpContext) -> Found:
    extra = per_place(context.get_attrs()["output_padding"], _places(context))
    return {**_convolution(context), "output_padding": extra}


def _linear(context: OpContext) -> Found:
    layout = context["weight_layout"]
    shape = shape_of(context, context["weight_index"]) or ()
    sizes = dict(zip(reversed(layout), reversed(shape), strict=False))
    return known(in_features=sizes.get("I"), out_features=sizes.get("O"))


def _matmul(context: OpContext) -> Found:
    return {"transpose_a": False, "transpose_b": False}


def _einsum(context: OpContext) -> Found:
    return {"equation": str(context.get_attrs().get("equation", "")).replace(" ", "")}


def _pool(context: OpContext) -> dict[str, Any]:
    given, count = context.get_attrs(), _places(context)
    kernel = per_place(given["kernel_size"], count)
    stride = given.get("stride")
    return {
        "kernel_size": kernel,
        # Without a stride windows do not overlap.
        "stride": kernel if stride in (None, [], ()) else per_place(stride, count),
        "padding": _pairs(given.get("padding", 0), count),
        "ceil_mode": bool(given.get("ceil_mode", False)),
    }


def _max_pool(context: OpContext) -> Found:
    dilation = per_place(context.get_attrs().get("dilation", 1), _places(context))
    return {**_pool(context), "dilation": dilation}


def _avg_pool(context: OpContext) -> Found:
    found = _pool(context)
    # Without padding there are no padded elements to count.
    is_padded = any(any(pair) for pair in found["padding"])
    counted = is_padded and bool(context.get_attrs().get("count_include_pad", True))
    return {**found, "count_include_pad": counted}


def _adaptive_pool(context: OpContext) -> Found:
    return {"output_size": per_place(context.get_attrs()["output_size"], _places(context))}


def _batch_norm(context: OpContext) -> Found:
    given = context.get_attrs()
    training = bool(given.get("training", given.get("use_input_stats", False)))
    return known(
        eps=given["eps"], training=training, momentum=given.get("momentum") if training else None
    )


def _group_norm(context: OpContext) -> Found:
    given = context.get_attrs()
    return {"eps": given["eps"], "groups": given["num_groups"]}


def _layer_norm(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    normalized = tuple(given["normalized_shape"])
    return known(
        eps=given["eps"],
        axis=axes(range(-len(normalized), 0), None if shape is None else len(shape)),
    )


def _rank(context: OpContext) -> int | None:
    shape = shape_of(context, 0)
    return None if shape is None else len(shape)


def _along(context: OpContext) -> Found:
    """Operators along one axis."""
    return known(axis=axis(context.get_attrs().get("dim", 0), _rank(context)))


def _new_axis(context: OpContext) -> Found:
    rank = _rank(context)
    return known(axis=axis(context.get_attrs().get("dim", 0), None if rank is None else rank + 1))


def _flip(context: OpContext) -> Found:
    return known(axis=axes(context.get_attrs()["dims"], _rank(context)))


def _squeeze(context: OpContext) -> Found:
    shape, dim = shape_of(context, 0), context.get_attrs().get("dim")
    found = axes(dim, None if shape is None else len(shape))
    if shape is None or found is None:
        return {}
    # For this operator a scalar has one axis, and none can be removed.
    return {"axis": tuple(i for i in found if shape and shape[i] == 1)}


def _unsqueeze(context: OpContext) -> Found:
    return {"axis": (_new_axis(context)["axis"],)}


def _reduction(context: OpContext) -> dict[str, Any]:
    given = context.get_attrs()
    dim = given.get("dim")
    # An empty list of axes means all axes.
    found = axes(None if dim in ([], ()) else dim, _rank(context))
    return known(axis=found, keepdim=bool(given.get("keepdim", False)))


def _variance(context: OpContext) -> Found:
    given = context.get_attrs()
    correction = given.get("correction", given.get("unbiased", True))
    return {**_reduction(context), "correction": int(1 if correction is None else correction)}


def _norm(context: OpContext) -> Found:
    given = context.get_attrs()
    order = given.get("ord", given.get("p", 2))
    return {**_reduction(context), "ord": float(order)}


def _split(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    place = axis(given.get("dim", 0), None if shape is None else len(shape))
    size = None if shape is None or place is None else shape[place]
    sizes = given.get("split_sizes", given.get("split_size"))
    if sizes is None and size is not None:
        sizes = math.ceil(size / given["chunks"])
    if isinstance(sizes, int) and size is not None:
        whole, rest = divmod(size, sizes)
        sizes = [sizes] * whole + [rest] * bool(rest)
    return known(axis=place, sizes=tuple(sizes) if isinstance(sizes, Iterable) else None)


def _numbers(value: Any) -> tuple[Any, ...]:
    """The items of sizes that a call gives as one list or one by one."""
    items = tuple(value) if isinstance(value, Iterable) else (value,)
    return tuple(items[0]) if len(items) == 1 and isinstance(items[0], Iterable) else items


def _reshape(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    if "start_dim" in given:
        if shape is None or None in shape:
            return {}
        first, last = axis(given["start_dim"], len(shape)), axis(given["end_dim"], len(shape))
        merged = math.prod(shape[first : last + 1])  # type: ignore[arg-type, operator]
        return {"shape": (*shape[:first], merged, *shape[last + 1 :])}  # type: ignore[operator]
    sizes = given.get("shape", given.get("size"))
    if sizes is None:
        return {}
    return {"shape": resolved(_numbers(sizes), element_count(shape))}


def _unflatten(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    if shape is None:
        return {}
    place = axis(given["dim"], len(shape)) or 0
    sizes = resolved(_numbers(given["sizes"]), shape[place])
    return {"shape": (*shape[:place], *sizes, *shape[place + 1 :])}


def _roll(context: OpContext) -> Found:
    given = context.get_attrs()
    shifts, dims = _numbers(given["shifts"]), _numbers(given.get("dims", ()))
    # Without axes the elements move along all of them in turn.
    return known(shifts=shifts, axis=axes(dims, _rank(context)) if dims else None)


def _expand(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    sizes = given.get("size", given.get("shape"))
    if sizes is None or shape is None:
        return {}
    wanted = _numbers(sizes)
    padded = (1,) * (len(wanted) - len(shape)) + shape
    return {"shape": tuple(b if a == -1 else a for a, b in zip(wanted, padded, strict=True))}


def _permute(context: OpContext) -> Found:
    given, rank = context.get_attrs(), _rank(context)
    if rank is None:
        return {}
    if "dims" in given:
        return {"perm": tuple(int(item) % rank for item in _numbers(given["dims"]))}
    # x.t(), x.mT and x.T have no attributes.
    last = (-2, -1) if rank > 1 else (0, 0)
    first: int = given.get("dim0", given.get("axis0", last[0]))
    second: int = given.get("dim1", given.get("axis1", last[1]))
    order = list(range(rank))
    if not order:
        return {"perm": ()}
    order[first], order[second] = order[second], order[first]
    return {"perm": tuple(order)}


def _repeat(context: OpContext) -> Found:
    given = context.get_attrs()
    return {"repeats": _numbers(given.get("repeats", given.get("dims")))}


def _pad(context: OpContext) -> Found:
    given, rank = context.get_attrs(), _rank(context)
    sizes = [int(size) for size in given["pad"]]
    # The padding begins at the last axis; the axes in front have none.
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))[::-1]
    padding = None if rank is None else ((0, 0),) * (rank - len(pairs)) + tuple(pairs)
    mode = given.get("mode", "constant")
    value = float(given.get("value") or 0) if mode == "constant" else None
    return known(padding=padding, mode=mode, value=value)


def _getitem(context: OpContext) -> Found:
    index = context.get_attrs().get("index", ())
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    tensors = len(context.get_input_names()) > 1
    if tensors and not items:
        return {"index": ("tensor",)}
    if tensors:
        # In a mixed index None is a tensor or a new axis; which one it is cannot be seen.
        return {}
    items = ["tensor" if isinstance(item, (list, tuple)) else item for item in items]
    return known(index=index_items(items, shape_of(context, 0)))


def _narrow(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    place = axis(given["dim"], None if shape is None else len(shape))
    if place is None or ("start" not in given and "index" not in given):
        return {}
    item: Any = given.get("index")
    if "length" in given:
        item = slice(given["start"], given["start"] + given["length"])
    return known(index=index_items([slice(None)] * place + [item], shape))


def _attention(context: OpContext) -> Found:
    given, query = context.get_attrs(), shape_of(context, 0)
    scale = given.get("scale")
    if scale is None and query and query[-1]:
        # torch._native_multi_head_attention divides the width among its heads.
        scale = 1 / math.sqrt(query[-1] / given.get("num_head", 1))
    return known(
        scale=scale,
        causal=bool(given.get("is_causal", False)),
        p=float(given.get("dropout_p", 0.0)),
    )


def _dropout(context: OpContext) -> Found:
    given = context.get_attrs()
    return {"p": float(given["p"]), "training": bool(given.get("train", given.get("training")))}


def _recurrent(context: OpContext) -> Found:
    given = context.get_attrs()
    return known(
        num_layers=given.get("num_layers"),
        bidirectional=given.get("bidirectional"),
        p=float(given.get("dropout") or 0.0),
        # Of a packed sequence the positions of all samples stand in a row.
        batch_first=given.get("batch_first"),
    )


def _loss(*names: str, **renamed: str) -> AttributeRule:
    """A rule for losses: their reduction, and the other attributes of these names."""

    def loss(context: OpContext) -> Found:
        given = context.get_attrs()
        reduction = given.get("reduction", 1)
        found = {"reduction": _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction}
        found |= {name: given[name] for name in names if name in given}
        return found | {name: given[old] for name, old in renamed.items() if old in given}

    return loss


def _renamed(**names: str) -> AttributeRule:
    """A rule that reads each attribute by PyTorch's name for it."""

    def renamed(context: OpContext) -> Found:
        given = context.get_attrs()
        return {name: given[old] for name, old in names.items() if old in given}

    return renamed


def _clamp(context: OpContext) -> Found:
    given = context.get_attrs()
    return known(
        min=given.get("min", given.get("min_val")), max=given.get("max", given.get("max_val"))
    )


_CASTS = {"half": "float16", "float": "float32", "double": "float64", "int": "int32"}
_CASTS |= {"long": "int64", "bool": "bool", "bfloat16": "bfloat16"}


def _cast(context: OpContext) -> Found:
    name = context.get_op().__name__
    given = context.get_attrs().get("dtype")
    if given is None:
        return known(dtype=_CASTS.get(name))
    # Where a type is declared, a call may have a device, or the name of a class of tensors.
    is_type = type(given).__name__ == "dtype"
    return {"dtype": str(given).removeprefix("torch.")} if is_type else {}


def _cast_as(context: OpContext) -> Found:
    other = (context.get_tensor_specs().inputs or (None, None))[1]
    return {} if other is None else {"dtype": other.dtype}


def _topk(context: OpContext) -> Found:
    given = context.get_attrs()
    place = axis(given.get("dim", -1), _rank(context))
    return known(k=given["k"], axis=place, largest=bool(given.get("largest", True)))


def _sort(context: OpContext) -> Found:
    given = context.get_attrs()
    place = axis(given.get("dim", -1), _rank(context))
    return known(axis=place, descending=bool(given.get("descending", False)))


def _upsample(context: OpContext) -> Found:
    given, shape = context.get_attrs(), shape_of(context, 0)
    size = given.get("output_size")
    scales = given.get("scales_h")
    if size is None and isinstance(scales, Iterable) and shape is not None and None not in shape:
        places = zip(shape[2:], scales, strict=False)
        size = [int(old * scale) for old, scale in places if old is not None]
    found = {"align_corners": bool(given.get("align_corners", False))}
    return found if size is None else {**found, "output_size": tuple(size)}


_KINDS: Mapping[str, AttributeRule] = {
    "conv1d conv2d conv3d": _convolution,
    "conv_transpose1d conv_transpose2d conv_transpose3d": _transposed_convolution,
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "max_pool1d max_pool2d max_pool3d": _max_pool,
    "avg_pool1d avg_pool2d avg_pool3d": _avg_pool,
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": _adaptive_pool,
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d": _adaptive_pool,
    "batch_norm instance_norm": _batch_norm,
    "group_norm": _group_norm,
    "layer_norm rms_norm": _layer_norm,
    "softmax log_softmax glu cumsum cumprod gather index_select cat unbind": _along,
    "stack": _new_axis,
    "flip": _flip,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "sum mean prod amax amin max min any all argmax argmin logsumexp": _reduction,
    "std var": _variance,
    "norm linalg_vector_norm": _norm,
    "split split_with_sizes chunk": _split,
    "reshape view flatten": _reshape,
    "unflatten": _unflatten,
    "roll": _roll,
    "expand broadcast_to": _expand,
    "permute transpose swapaxes swapdims t mT T": _permute,
    "repeat tile": _repeat,
    "pad": _pad,
    "getitem setitem": _getitem,
    "narrow select": _narrow,
    "attention": _attention,
    "dropout": _dropout,
    "lstm gru rnn": _recurrent,
    "cross_entropy_loss nll_loss nll_loss_nd": _loss("ignore_index", "label_smoothing"),
    "mse_loss l1_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits": _loss(),
    "huber_loss": _loss(beta="delta"),
    "smooth_l1_loss": _loss("beta"),
    "gelu": _renamed(approximate="approximate"),
    "leaky_relu": _renamed(alpha="negative_slope"),
    "elu celu add sub": _renamed(alpha="alpha"),
    "softplus": _renamed(beta="beta"),
    "one_hot": _renamed(depth="num_classes"),
    "tril triu": _renamed(diagonal="diagonal"),
    "clamp hardtanh clamp_min clamp_max": _clamp,
    "to type half float double int long bool bfloat16": _cast,
    "type_as": _cast_as,
    "weight_norm": _along,
    "histc": _renamed(bins="bins", min="min", max="max"),
    "topk": _topk,
    "sort argsort": _sort,
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d": _upsample,
}


def _embedding(context: OpContext) -> Found:
    shape = shape_of(context, context["weight_index"]) or (None, None)
    return known(num_embeddings=shape[0], embedding_dim=shape[-1])


_OWN = """
    abs acos acosh arange asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_not bitwise_or
    bitwise_xor broadcast_tensors ceil clone contiguous copy cos cosh detach div empty
    empty_like eq erf erfc exp expm1 floor floor_divide full full_like ge grouped_mm gt hardsigmoid
    hardswish isfinite isinf isnan le log log1p log_sigmoid logical_and logical_not logical_or
    logical_xor lt masked_fill maximum minimum mish mul ne neg new_empty new_full new_ones new_zeros
    nonzero ones ones_like pow rand
    randint randn reciprocal relu relu6 remainder round rsqrt selu sigmoid sign silu sin sinh
    softsign sqrt square tan tanh tensor where xlogy zeros zeros_like
"""
"""Canonical types without canonical attributes."""

_RECEIVING = frozenset(
    "output output_tensor output_tensor_list output_tensor_lists tensor_list gather_list".split()
)
"""Parameters of collectives for tensors that they only write into."""


def _collective(context: OpContext) -> Found:
    given = context.get_attrs()
    inputs = zip(context.get_input_names(), context.get_input_specs(), strict=True)
    named = [(name, spec) for name, spec in inputs if spec is not None]
    # The process that scatters gives a list, the others receive a tensor.
    scatters = any(name == "scatter_list" for name, _ in named)
    received = _RECEIVING | {"tensor"} if scatters else _RECEIVING
    reduction = given.get("op", given.get("reduce_op"))
    return known(
        group=given.get("group"),
        ranks=given.get("ranks"),
        bytes=total(spec.nbytes for name, spec in named if name not in received),
        # The enumeration's member or, in the functional form, its name in lower case.
        reduction=None if reduction is None else str(reduction).rpartition(".")[2].lower(),
    )


COLLECTIVES = frozenset(
    """all_gather all_reduce all_to_all barrier broadcast dist_gather dist_scatter recv reduce
    reduce_scatter send""".split()
)
"""The canonical types of operators of several processes."""

RULES: Mapping[str, Callable[[OpContext], Found]] = {
    **dict.fromkeys(_OWN.split(), lambda _: {}),
    **{kind: rule for kinds, rule in _KINDS.items() for kind in kinds.split()},
    **dict.fromkeys(COLLECTIVES, _collective),
    "embedding": _embedding,
    "embedding_bag": _embedding,
}
"""By canonical type the function that gives the canonical attributes."""
