"""The standard mapping rules for JAX. They import no framework.

The canonical type of an operator is PyTorch's name for it, or else JAX's own. A product that is no
``matmul`` is an ``einsum``, whose equation is read from the jaxpr of the function.
"""

from __future__ import annotations

import functools
import itertools
import string
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import amanda
from amanda.tools import canonical
from amanda.tools.canonical import axes, axis, known, output_shape, shape_of
from amanda.tools.contraction import weight_layout

Found = Mapping[str, Any]

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

TYPES = {name: kind for kind, names in _TABLES["types"].items() for name in names.split()}
"""By JAX's name of a function or primitive the canonical type, where that is another name."""

_SPACE = {1: "W", 2: "HW", 3: "DHW"}
_EQUATION = "equation"


def standard(context: amanda.OpContext) -> None:
    """Set the canonical type, the roles, the layouts and the rule of attributes."""
    op = context.get_op()
    if context.is_backward():
        context["backward_op_type"] = f"{context['op_type']}_backward"
        return
    op_type = TYPES.get(op.__name__, op.__name__)
    if op.__name__ == "conv_general_dilated":
        op_type = _convolution_type(context)
    elif (found := product_of(op.__name__, context.get_attrs(), op)) is not None:
        op_type = "matmul" if _is_matmul(found) else "einsum"
        context[_EQUATION] = found
        for index in (1, 0):
            if context.get_value(index) is not None:
                context.update(weight_index=index, weight_layout=weight_layout(found, index))
                break
    context["op_type"] = op_type
    context[canonical.RULE] = RULES.get(op_type)


# -- products -----------------------------------------------------------------


def product_of(name: str, attributes: Found, op: Any) -> str | None:
    """The equation of an operator that is one product of two tensors; None for others."""
    if name == "dot_general":
        letters = iter(string.ascii_letters)
        names = ["".join(itertools.islice(letters, rank)) for rank in op.ranks]
        lhs, rhs = names
        return _canonical(names, *_contracted(lhs, rhs, attributes["dimension_numbers"]))
    jaxpr = getattr(op, "jaxpr", None)
    return None if jaxpr is None else equation_of(jaxpr)


@functools.lru_cache(maxsize=1000)
def equation_of(jaxpr: Any) -> str | None:
    """The equation of a jaxpr that is one product, and moves axes; None for others."""
    if len(jaxpr.invars) != 2 or len(jaxpr.outvars) != 1:
        return None
    letters, same = iter(string.ascii_letters), dict[str, str]()
    names = ["".join(itertools.islice(letters, len(v.aval.shape))) for v in jaxpr.invars]
    try:
        products, (output,) = _followed(jaxpr, names, same)
    except (KeyError, TypeError):  # TypeError: of a constant
        return None
    return _canonical(names, output, same) if products == 1 else None


def _followed(jaxpr: Any, names: Sequence[str], same: dict[str, str]) -> tuple[int, list[str]]:
    """The number of products in a jaxpr, and the letters of its outputs.

    Raises:
        KeyError: an operator does more than to move axes.
    """
    known_names, products = dict(zip(jaxpr.invars, names, strict=True)), 0
    for equation in jaxpr.eqns:
        given, params = [known_names[v] for v in equation.invars], equation.params
        name = equation.primitive.name
        if name == "dot_general":
            lhs, rhs = given
            made, merged = _contracted(lhs, rhs, params["dimension_numbers"])
            same.update(merged)
            products, outputs = products + 1, [made]
        elif name == "transpose":
            outputs = ["".join(given[0][i] for i in params["permutation"])]
        elif name in ("convert_element_type", "copy", "copy_p", "stop_gradient"):
            outputs = given
        elif name == "jit":
            inner, outputs = _followed(params["jaxpr"].jaxpr, given, same)
            products += inner
        else:
            raise KeyError(name)
        known_names.update(zip(equation.outvars, outputs, strict=True))
    return products, [known_names[v] for v in jaxpr.outvars]


def _contracted(lhs: str, rhs: str, numbers: Any) -> tuple[str, dict[str, str]]:
    """The letters of a product, and the letters of `rhs` that mean one of `lhs`."""
    (left, right), (left_batch, right_batch) = numbers
    pairs = zip((*left, *left_batch), (*right, *right_batch), strict=True)
    same = {rhs[j]: lhs[i] for i, j in pairs}
    batch = "".join(lhs[i] for i in left_batch)
    rest = [c for i, c in enumerate(lhs) if i not in (*left, *left_batch)]
    return batch + "".join(rest) + "".join(c for c in rhs if c not in same), same


def _canonical(names: Sequence[str], result: str, same: Mapping[str, str]) -> str:
    """An equation, with the letters a, b, c in the order of their occurrence."""
    texts = ["".join(same.get(c, c) for c in text) for text in (*names, result)]
    order = dict(zip(dict.fromkeys("".join(texts)), string.ascii_letters, strict=False))
    *left, right = ("".join(order[c] for c in text) for text in texts)
    return f"{','.join(left)}->{right}"


def _is_matmul(equation: str) -> bool:
    """True for a product of rows and columns, with equal batches before them."""
    left, _, result = equation.partition("->")
    first, _, second = left.partition(",")
    if len(first) < 2 or len(second) < 2:
        return False
    batch = first[:-2] if len(second) > 2 else ""
    return second[:-1] == batch + first[-1] and result == first[:-1] + second[-1]


# -- convolutions -------------------------------------------------------------


def _convolution_type(context: amanda.OpContext) -> str:
    attributes = context.get_attrs()
    data, weight, _ = attributes["dimension_numbers"]
    space = _SPACE.get(len(data) - 2, "")
    context.update(weight_index=1, weight_layout=_letters(weight, f"OI{space}"))
    context["data_layout"] = _letters(data, f"NC{space}")
    kind = "conv_transpose" if any(d > 1 for d in attributes["lhs_dilation"]) else "conv"
    return f"{kind}{len(space)}d" if space else "conv_general_dilated"


def _letters(places: Sequence[int], letters: str) -> str:
    """The letters in the order of the axes at these places."""
    return "".join(letter for _, letter in sorted(zip(places, letters, strict=True)))


def _convolution(context: amanda.OpContext) -> Found:
    attributes, weight = context.get_attrs(), shape_of(context, 1)
    kernel = [weight[i] for i in attributes["dimension_numbers"].rhs_spec[2:]] if weight else None
    transposed = any(d > 1 for d in attributes["lhs_dilation"])
    return known(
        kernel_size=tuple(kernel) if kernel else None,
        stride=tuple(attributes["lhs_dilation" if transposed else "window_strides"]),
        padding=tuple(attributes["padding"]),
        dilation=tuple(attributes["rhs_dilation"]),
        groups=attributes["feature_group_count"],
        output_padding=None,
    )


# -- attributes ---------------------------------------------------------------


def _attribute(context: amanda.OpContext, *names: str) -> Any:
    attributes = context.get_attrs()
    return next((attributes[name] for name in names if name in attributes), None)


def _reduction(context: amanda.OpContext) -> Found:
    shape, attributes = shape_of(context, 0), context.get_attrs()
    given = _attribute(context, "axes", "axis")
    if "axes" not in attributes and "axis" not in attributes:
        return {}
    found = None if shape is None else axes(given, len(shape))
    keeps = bool(attributes.get("keepdims", False))
    return known(axis=found, keepdim=keeps, correction=_attribute(context, "correction", "ddof"))


def _along(*names: str) -> Callable[[amanda.OpContext], Found]:
    def along(context: amanda.OpContext) -> Found:
        given, shape = _attribute(context, *names), shape_of(context, 0)
        return (
            {} if given is None else known(axis=axis(given, None if shape is None else len(shape)))
        )

    return along


def _to_shape(context: amanda.OpContext) -> Found:
    return known(shape=_attribute(context, "new_sizes", "shape") or output_shape(context))


def _permute(context: amanda.OpContext) -> Found:
    found = _attribute(context, "permutation", "axes")
    return known(perm=None if found is None else tuple(found))


def _cast(context: amanda.OpContext) -> Found:
    found = _attribute(context, "new_dtype", "dtype")
    return known(dtype=None if found is None else str(found))


def _clamp(context: amanda.OpContext) -> Found:
    return known(min=_attribute(context, "min"), max=_attribute(context, "max"))


_RULES: Mapping[str, Callable[[amanda.OpContext], Found]] = {
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d": _convolution,
    "matmul": lambda context: {"transpose_a": False, "transpose_b": False},
    "einsum": lambda context: {"equation": context[_EQUATION]},
    "sum mean prod amax amin any all argmax argmin logsumexp std var": _reduction,
    "cat": _along("dimension", "axis"),
    "softmax log_softmax cumsum cumprod glu flip sort": _along("dimension", "axis"),
    "reshape broadcast_to": _to_shape,
    "permute": _permute,
    "to": _cast,
    "clamp": _clamp,
    "add sub": lambda context: {"alpha": 1},
    "gelu": lambda context: {
        "approximate": "tanh" if context.get_attrs().get("approximate", True) else "none"
    },
}

RULES: Mapping[str, Callable[[amanda.OpContext], Found]] = {
    **{kind: lambda context: {} for kind, names in canonical.ATTRIBUTES.items() if not names},
    **{kind: rule for kinds, rule in _RULES.items() for kind in kinds.split()},
}
"""By canonical type the function that gives the canonical attributes."""
