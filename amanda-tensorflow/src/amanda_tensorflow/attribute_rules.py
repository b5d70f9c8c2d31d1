"""Canonical attributes of TensorFlow's operators (``amanda.tools.canonical``).

``RULES["Conv2D"](context)`` gives the attributes of a convolution. The mapping rules put a rule
into the context by TensorFlow's type; it runs where a tool asks. It imports no TensorFlow, but in
the functions that change a tensor's layout.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.interface.context import OpContext
from amanda.tools.canonical import (
    AttributeRule,
    axes,
    axis,
    element_count,
    index_items,
    known,
    output_shape,
    resolved,
    same_padding,
    shape_of,
    total,
)

Found = Mapping[str, Any]

_FEW = 64
"""Elements of the largest tensor that is read for an attribute; axes, sizes, paddings have less."""


def permute(tensor: Any, order: Sequence[int]) -> Any:
    """A tensor of TensorFlow or an array with its axes in another order."""
    if hasattr(tensor, "transpose"):
        return tensor.transpose(tuple(order))
    return _called("transpose", tensor, order)


def reshape(tensor: Any, shape: Sequence[int]) -> Any:
    """A tensor of TensorFlow or an array in another shape."""
    if hasattr(tensor, "reshape"):
        return tensor.reshape(tuple(shape))
    return _called("reshape", tensor, shape)


def _called(name: str, tensor: Any, numbers: Sequence[int]) -> Any:
    import tensorflow as tf

    has_values = not tf.is_symbolic_tensor(tensor) and hasattr(tensor, "numpy")
    if has_values and not tf.executing_eagerly():
        # The value of a variable is not part of the graph that is being built, and a graph of a
        # session does not take it.
        return getattr(tensor.numpy(), name)(tuple(numbers))
    return getattr(tf, name)(tensor, list(numbers))


def _constant(context: OpContext, *names: str) -> Any:
    """The numbers of a small input, as lists; None where they are known at run time only.

    Args:
        names: of the input, which has one of them.
    """
    index = next((i for i, name in enumerate(context.get_input_names()) if name in names), None)
    if index is None:
        return None
    shape = shape_of(context, index)
    count = element_count(shape)
    if count is None or count > _FEW:
        return None
    value = context.get_value(index)
    if value is None and context.runs_at_once:
        # A tensor of a graph has no numbers yet, and a look at it would make a copy of the graph.
        value = context.get_inputs()[index]
    try:
        return value.numpy().tolist()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _single(value: float) -> float:
    """A number of single precision, as attributes are, as it was written: 0.1, not 0.100000001."""
    return float(f"{value:.7g}")


def _rank(context: OpContext, index: int = 0) -> int | None:
    shape = shape_of(context, index)
    return None if shape is None else len(shape)


# -- space ----------------------------------------------------------------------


def _layout(context: OpContext) -> str:
    return str(context["data_layout"] or "NHWC")


def _places(context: OpContext, items: Sequence[Any] | None) -> tuple[Any, ...]:
    """The items for the spatial axes, of one item for each axis of the data."""
    if items is None:
        return ()
    pairs = zip(_layout(context), items, strict=False)
    return tuple(item for letter, item in pairs if letter not in "NC")


def _padding(
    context: OpContext,
    shape: Sequence[int | None] | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...] | None:
    """The padding in numbers, for data of this shape."""
    given = context.get_attrs()
    kind = given.get("padding", "VALID")
    if kind == "EXPLICIT":
        flat = given["explicit_paddings"]
        return _places(context, list(zip(flat[::2], flat[1::2], strict=True)))
    if kind == "SAME":
        sizes = _places(context, shape) or (None,) * len(kernel)
        return same_padding(sizes, kernel, stride, dilation)
    return ((0, 0),) * len(kernel)


def _weight(context: OpContext) -> dict[str, int]:
    """The sizes of the weight by letter of its layout."""
    shape = shape_of(context, context["weight_index"]) or ()
    pairs = zip(reversed(context["weight_layout"]), reversed(shape), strict=False)
    return {letter: size for letter, size in pairs if size is not None}


def _window(context: OpContext, data: Sequence[int | None] | None) -> dict[str, Any]:
    """The attributes that convolutions and transposed ones share, for data of this shape."""
    given, sizes = context.get_attrs(), _weight(context)
    spatial = [letter for letter in context["weight_layout"] if letter in "DHW"]
    kernel = tuple(sizes[letter] for letter in spatial if letter in sizes)
    stride = _places(context, given["strides"])
    # For the oldest types strides and dilations are those of every axis alike.
    dilation = _places(context, given.get("dilations")) or (1,) * len(kernel)
    channels = dict(zip(_layout(context), data or (), strict=False)).get("C")
    groups = sizes.get("C") if "M" in context["weight_layout"] else None
    if groups is None and channels and sizes.get("I"):
        groups = channels // sizes["I"]
    return {
        "kernel_size": kernel,
        "stride": tuple(stride),
        "padding": _padding(context, data, kernel, stride, dilation),
        "dilation": tuple(dilation),
        "groups": groups,
    }


def _convolution(context: OpContext) -> Found:
    return known(**_window(context, shape_of(context, 0)))


def _transposed_convolution(context: OpContext) -> Found:
    result: Any = _constant(context, "input_sizes") or output_shape(context)
    found = _window(context, result)
    if "M" not in context["weight_layout"]:
        channels = dict(zip(_layout(context), result or (), strict=False)).get("C")
        outputs = _weight(context).get("O")
        found["groups"] = channels // outputs if channels and outputs else None
    data = _places(context, shape_of(context, len(context.get_input_names()) - 1))
    sizes, padding = _places(context, result), found["padding"]
    if not data or not sizes or padding is None or None in (*data, *sizes):
        return known(**found)
    parts = zip(sizes, data, found["stride"], found["kernel_size"], found["dilation"], strict=True)
    plain = [(n - 1) * step + wide * (k - 1) + 1 for _, n, step, k, wide in parts]
    extra = [
        size - full + sum(pair) for size, full, pair in zip(sizes, plain, padding, strict=True)
    ]
    return known(**found, output_padding=tuple(extra))


def _pool(context: OpContext) -> dict[str, Any]:
    given = context.get_attrs()
    kernel = _places(context, given.get("ksize"))
    stride = _places(context, given.get("strides"))
    ones = (1,) * len(kernel)
    return {
        "kernel_size": tuple(kernel),
        "stride": tuple(stride),
        "padding": _padding(context, shape_of(context, 0), kernel, stride, ones),
        "ceil_mode": False,
    }


def _max_pool(context: OpContext) -> Found:
    found = _pool(context)
    return known(**found, dilation=(1,) * len(found["kernel_size"]))


def _avg_pool(context: OpContext) -> Found:
    return known(**_pool(context), count_include_pad=False)


def _batch_norm(context: OpContext) -> Found:
    given = context.get_attrs()
    training = bool(given.get("is_training", False))
    momentum = _single(given.get("exponential_avg_factor", 1.0)) if training else None
    eps = _single(given.get("epsilon", given.get("variance_epsilon", 0.0)))
    return known(eps=eps, training=training, momentum=momentum)


def _resize(context: OpContext) -> Found:
    size = _constant(context, "size")
    found = {"align_corners": bool(context.get_attrs().get("align_corners", False))}
    return found if size is None else {**found, "output_size": tuple(size)}


def _local_response_norm(context: OpContext) -> Found:
    given = context.get_attrs()
    size = 2 * given["depth_radius"] + 1
    numbers = {"beta": _single(given["beta"]), "k": _single(given["bias"])}
    # PyTorch divides the sum by the number of channels in the window.
    return {"size": size, "alpha": _single(given["alpha"] * size), **numbers}


# -- products -------------------------------------------------------------------


def _matmul(context: OpContext) -> Found:
    given = context.get_attrs()
    if context["op_type"] == "linear":
        return _linear(context)
    return {
        "transpose_a": bool(given.get("transpose_a") or given.get("adj_x")),
        "transpose_b": bool(given.get("transpose_b") or given.get("adj_y")),
    }


def _linear(context: OpContext) -> Found:
    shape, sizes = shape_of(context, context["weight_index"]) or (), dict[str, int]()
    for letter, size in zip(reversed(context["weight_layout"]), reversed(shape), strict=False):
        if size is None:
            return {}
        sizes[letter] = sizes.get(letter, 1) * size
    return {"in_features": sizes.get("I", 1), "out_features": sizes.get("O", 1)}


def _einsum(context: OpContext) -> Found:
    if context["op_type"] == "linear":
        return _linear(context)
    return {"equation": str(context.get_attrs().get("equation", "")).replace(" ", "")}


def _gather(context: OpContext) -> Found:
    if context["op_type"] == "embedding":
        shape = shape_of(context, 0) or (None, None)
        value = context.get_value(0)
        # A variable's handle has no shape of its own.
        sizes = tuple(value.shape) if value is not None else shape
        return known(num_embeddings=sizes[0], embedding_dim=sizes[-1])
    place = _constant(context, "axis") if "axis" in context.get_input_names() else 0
    return {} if place is None else known(axis=axis(place, _rank(context)))


# -- axes -----------------------------------------------------------------------


def _last(context: OpContext) -> Found:
    return known(axis=axis(-1, _rank(context)))


def _reduction(context: OpContext) -> Found:
    found = _constant(context, "reduction_indices", "axis", "dimension")
    keepdim = bool(context.get_attrs().get("keep_dims", False))
    return known(axis=None if found is None else axes(found, _rank(context)), keepdim=keepdim)


def _norm(context: OpContext) -> Found:
    return {**_reduction(context), "ord": 2.0}


def _along(context: OpContext) -> Found:
    """Operators along one axis, which is an input or an attribute."""
    found = _constant(context, "axis", "split_dim")
    found = context.get_attrs().get("axis") if found is None else found
    return {} if found is None else known(axis=axis(found, _rank(context)))


def _concatenation(context: OpContext) -> Found:
    names = context.get_input_names()
    first = next((i for i, name in enumerate(names) if name.startswith("values")), 0)
    found = _constant(context, "axis", "concat_dim")
    return {} if found is None else known(axis=axis(found, _rank(context, first)))


def _stack(context: OpContext) -> Found:
    rank = _rank(context)
    return known(axis=axis(context.get_attrs()["axis"], None if rank is None else rank + 1))


def _flip(context: OpContext) -> Found:
    found = _constant(context, "axis")
    return {} if found is None else known(axis=axes(found, _rank(context)))


def _unsqueeze(context: OpContext) -> Found:
    found, rank = _constant(context, "dim"), _rank(context)
    if found is None or rank is None:
        return {}
    return {"axis": axes(found, rank + 1)}


def _squeeze(context: OpContext) -> Found:
    shape, given = shape_of(context, 0), context.get_attrs().get("squeeze_dims")
    found = axes(given or None, None if shape is None else len(shape))
    if shape is None or found is None:
        return {}
    return {"axis": tuple(i for i in found if given or shape[i] == 1)}


def _split(context: OpContext) -> Found:
    names = context.get_input_names()
    data = names.index("value") if "value" in names else 0
    shape, found = shape_of(context, data), _constant(context, "split_dim")
    if found is None or shape is None:
        return {}
    place = axis(found, len(shape))
    size = None if place is None else shape[place]
    sizes = _constant(context, "size_splits")
    if sizes is not None and size is not None and -1 in sizes:
        # The sum has one -1 in it.
        rest = size - sum(sizes) - 1
        sizes = [rest if item == -1 else item for item in sizes]
    if sizes is None and size is not None and "num_split" in context.get_attrs():
        count = context.get_attrs()["num_split"]
        sizes = [size // count] * count
    return known(axis=place, sizes=None if sizes is None else tuple(sizes))


# -- shapes and selections ------------------------------------------------------


def _reshape(context: OpContext) -> Found:
    shape = _constant(context, "shape")
    if shape is None:
        return {}
    return {"shape": resolved(shape, element_count(shape_of(context, 0)))}


def _given(**names: str) -> AttributeRule:
    """A rule for attributes that are inputs, by the names of these."""

    def rule(context: OpContext) -> Found:
        found = {key: _constant(context, name) for key, name in names.items()}
        return known(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})

    return rule


def _pad(context: OpContext) -> Found:
    pairs, given = _constant(context, "paddings"), context.get_attrs()
    mode = {"REFLECT": "reflect", "SYMMETRIC": "symmetric"}.get(given.get("mode", ""), "constant")
    is_given = "constant_values" in context.get_input_names()
    value = _constant(context, "constant_values") if is_given else 0
    padding = None if pairs is None else tuple((before, after) for before, after in pairs)
    if mode != "constant" or value is None:
        return known(padding=padding, mode=mode)
    return known(padding=padding, mode=mode, value=float(value))


def _slice(context: OpContext) -> Found:
    begin, size = _constant(context, "begin"), _constant(context, "size")
    if begin is None or size is None:
        return {}
    ends = [
        None if count == -1 else start + count for start, count in zip(begin, size, strict=True)
    ]
    return known(index=index_items(map(slice, begin, ends), shape_of(context, 0)))


def _strided_slice(context: OpContext) -> Found:
    names = ("begin", "end", "strides")
    begin, end, step = (_constant(context, name) for name in names)
    if begin is None or end is None or step is None:
        return {}
    given = context.get_attrs()
    items: list[Any] = []
    for position in range(len(begin)):

        def is_masked(mask: str, position: int = position) -> bool:
            return bool(given.get(f"{mask}_mask", 0) >> position & 1)

        if is_masked("ellipsis"):
            items.append(...)
        elif is_masked("new_axis"):
            items.append(None)
        elif is_masked("shrink_axis"):
            items.append(begin[position])
        else:
            first = None if is_masked("begin") else begin[position]
            last = None if is_masked("end") else end[position]
            items.append(slice(first, last, step[position]))
    return known(index=index_items(items, shape_of(context, 0)))


# -- values ---------------------------------------------------------------------


def _fixed(**found: Any) -> AttributeRule:
    """A rule for attributes that all operators of a type have alike."""
    return lambda context: found


def _leaky_relu(context: OpContext) -> Found:
    return {"alpha": _single(context.get_attrs()["alpha"])}


def _cast(context: OpContext) -> Found:
    return {"dtype": context.get_attrs()["DstT"].name}


def _topk(context: OpContext) -> Found:
    k = _constant(context, "k")
    k = context.get_attrs().get("k") if k is None else k
    return known(k=k, axis=axis(-1, _rank(context)), largest=True)


_REDUCTIONS = {"add": "sum", "mul": "product"}
"""PyTorch's names for reductions of TensorFlow's, where they differ."""


def _collective(context: OpContext) -> Found:
    given = context.get_attrs()
    group = given.get("group_key", _constant(context, "group_key"))
    reduction = given.get("merge_op", given.get("reduction"))
    reduction = None if reduction is None else str(reduction).lower()
    return known(
        group=None if group is None else str(group),
        bytes=total(one.nbytes for one in context.get_input_specs()[:1] if one),
        reduction=_REDUCTIONS.get(reduction or "", reduction),
    )


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

RULES: Mapping[str, AttributeRule] = {
    **dict.fromkeys(_TABLES["without"].split(), _fixed()),
    **{kind: _fixed(**found) for kind, found in _TABLES["fixed"].items()},
    **{kind: _given(**names) for kind, names in _TABLES["inputs"].items()},
    **{k: globals()[f"_{rule}"] for rule, kinds in _TABLES["rules"].items() for k in kinds.split()},
}
"""By TensorFlow's type the function that gives the canonical attributes."""
