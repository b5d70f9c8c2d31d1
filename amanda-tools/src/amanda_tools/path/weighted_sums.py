"""Extraction rules of weighted sums: convolutions, products, pooling, means, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from amanda_tools._operators.einsum import parse_equation
from amanda_tools._values.tensors import Array
from amanda_tools.path.rule_call import Call, NoRule, Wanted
from amanda_tools.path.rules import rule
from amanda_tools.path.synapses import LETTERS, Operand, Rows
from amanda_tools.path.windows import INSIDE, layout_of, per_axis, windows


def weighted_sum(
    call: Call,
    wanted: Wanted,
    operands: Sequence[Operand],
    letters: str,
    positions: Sequence[int | None],
    *,
    relative: bool = False,
) -> None:
    """Add the critical products of a sum of products.

    Args:
        call, wanted: arguments of the rule.
        operands: the factors.
        letters: axes of the result, in its order.
        positions: input of each operand, None for constants.
        relative: the result has no bias, and a factor may be missing (1 / n): values are scaled to
            the sum of the products.
    """
    rows = Rows.of(operands, letters, wanted.index)
    call.width = rows.width
    values = wanted.values
    if relative:
        own = call.output(wanted.output).reshape(-1)[wanted.index].astype(np.float64)
        values = np.divide(values, own, out=np.zeros_like(own), where=own != 0)
    found, products = rows.critical(values, call.theta, relative=relative)
    for position, index in zip(positions, found, strict=True):
        if position is not None:
            wanted.add(position, index)
    row, column = np.divmod(products, rows.width)
    wanted.synapses.append(wanted.index[row] * rows.width + column)


# -- products ---------------------------------------------------------------------


@rule("linear", "matmul", "linalg_matmul", "addmm", "einsum", "mv", "baddbmm", "addbmm")
def product(call: Call, wanted: Wanted) -> None:
    """Matrix product with vectors, batches and broadcasting, or Einstein sum of two factors."""
    left, right, equation = _factors(call)
    ranks = [call.array(i).ndim for i in (left, right)]
    factors, result = parse_equation(equation, ranks)
    if any(len(set(letters)) < len(letters) for letters in factors):
        raise NoRule(f"a diagonal in {equation}")
    operands = [Operand.of(call.array(i), f) for i, f in zip((left, right), factors, strict=True)]
    if call.attribute("alpha", default=1) != 1:
        raise NoRule("a product with a factor alpha")
    weighted_sum(call, wanted, operands, result, (left, right))


def _factors(call: Call) -> tuple[int, int, str]:
    """Return the positions of the factors of a product, and its equation."""
    op = call.execution.op
    present = [i for i, array in enumerate(call.execution.inputs) if array is not None]
    if "equation" in op.signature.attributes:
        if len(present) != 2:
            raise NoRule(f"an Einstein sum of {len(present)} factors")
        return present[0], present[1], str(op.signature.attributes["equation"])
    if op.about.name == "linear":
        return 0, 1, "...i,oi->...o" if call.array(1).ndim == 2 else "...i,i->..."
    # An addend comes before the factors (addmm).
    left, right = present[-2:]
    if op.about.name == "__rmatmul__":
        left, right = right, left
    return left, right, _matrices(call, left, right)


def _matrices(call: Call, left: int, right: int) -> str:
    """Return the equation of a matrix product."""
    first = "k" if call.array(left).ndim == 1 else "...ik"
    second = "k" if call.array(right).ndim == 1 else "...kj"
    if call.attribute("transpose_a", "adj_x", default=False):
        first = "...ki"
    if call.attribute("transpose_b", "adj_y", default=False):
        second = "...jk"
    rows, columns = "i" if "i" in first else "", "j" if "j" in second else ""
    return f"{first},{second}->...{rows}{columns}"


# -- windows ----------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call, wanted: Wanted) -> None:
    """Each output is a sum over a window and the channels of its group."""
    operands, letters = call.memo("windows", lambda: _convolved(call))
    weighted_sum(call, wanted, operands, letters, (0, 1))


def _convolved(call: Call) -> tuple[list[Operand], str]:
    """Return data and weight as operands, and the letters of the result."""
    weight, layout = call.array(1), call.execution.op.signature.weight_layout
    if weight.ndim != len(layout):
        raise NoRule(f"its weight does not have the layout {layout}")
    spatial = [letter for letter in layout if letter not in "OICM"]
    # In a depthwise convolution each channel is a group with M outputs.
    front = "CM" if "M" in layout else "OI"
    order = [layout.index(letter) for letter in (*front, *spatial)]
    ids: Array = np.arange(weight.size).reshape(weight.shape).transpose(order)
    kernel = ids.shape[2:]
    channels = call.array(0).shape[layout_of(call).index("C")]
    per_group = 1 if "M" in layout else ids.shape[1]
    ids = ids.reshape(channels // per_group, -1, per_group, *kernel)
    filters = Operand.of(weight.reshape(-1)[ids], "GPC" + INSIDE[: len(kernel)])
    filters = attrs.evolve(filters, source=ids.reshape(-1))
    image, letters = windows(call, kernel, channels // per_group, 0.0, [1] * len(kernel))
    return [image, filters], letters


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pooling(call: Call, wanted: Wanted) -> None:
    """Average pooling, as a convolution with equal weights."""
    image, letters = call.memo("windows", lambda: _pooled(call, 0.0))
    weighted_sum(call, wanted, [image], letters, (0,), relative=True)


@rule(*(f"max_pool{n}d{end}" for n in (1, 2, 3) for end in ("", "_with_indices")))
def max_pooling(call: Call, wanted: Wanted) -> None:
    """Add the largest element of the window, at ties the first."""
    image, letters = call.memo("windows", lambda: _pooled(call, -np.inf))
    rows = Rows.of([image], letters, wanted.index)
    _add_largest(call, wanted, rows)


def _add_largest(call: Call, wanted: Wanted, rows: Rows) -> None:
    call.width = rows.width
    places, columns = rows.largest()
    wanted.add(0, places, wanted.values)
    wanted.synapses.append(wanted.index * rows.width + columns)


def _pooled(call: Call, fill: float) -> tuple[Operand, str]:
    layout = layout_of(call)
    kernel = per_axis(call.attribute("kernel_size", "ksize"), layout, [1] * 3)
    channels = call.array(0).shape[layout.index("C")]
    image, letters = windows(call, kernel, channels, fill, kernel)
    # Each channel is a group of its own with one output.
    strides, sizes = {**image.strides, "P": 0}, {**image.sizes, "P": 1}
    return attrs.evolve(image, strides=strides, sizes=sizes), letters


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_pooling(call: Call, wanted: Wanted) -> None:
    """Windows from ``floor(i * size / outputs)`` to ``ceil((i + 1) * size / outputs)``."""
    source, output = call.array(0), call.output()
    count = int(call.execution.op.about.type[-2])
    front, back = LETTERS[: source.ndim - count], LETTERS[26:]
    inside, outside = back[:count], back[count : 2 * count]
    operands = [Operand.of(source, front + inside)]
    for axis in range(-count, 0):
        size, wide = source.shape[axis], output.shape[axis]
        place, window = np.arange(size), np.arange(wide)[:, None]
        within = (place >= window * size // wide) & (place < -(-(window + 1) * size // wide))
        operands.append(Operand.of(within.astype(source.dtype), outside[axis] + inside[axis]))
    positions = [0, *[None] * count]
    weighted_sum(call, wanted, operands, front + outside, positions, relative=True)


# -- reductions -------------------------------------------------------------------


def _reduced(call: Call) -> tuple[Operand, str]:
    """Return the data as operand, and the letters of the axes that remain."""
    source = call.array(0)
    axes = call.attribute("dim", "axis")
    if axes is None and len(call.execution.inputs) > 1:
        axes = call.array(1).reshape(-1).tolist()
    if axes is None:
        axes = range(source.ndim)
    gone = {int(axis) % source.ndim for axis in ([axes] if isinstance(axes, int) else axes)}
    letters = LETTERS[: source.ndim]
    kept = "".join(letter for i, letter in enumerate(letters) if i not in gone)
    return Operand.of(source, letters), kept


@rule("mean", "sum")
def reduction(call: Call, wanted: Wanted) -> None:
    """Contributions with equal weights."""
    operand, kept = call.memo("reduced", lambda: _reduced(call))
    weighted_sum(call, wanted, [operand], kept, (0,), relative=True)


@rule("amax", "max")
def maximum(call: Call, wanted: Wanted) -> None:
    """Add the largest element, at ties the first."""
    if len(call.data) != 1:
        raise NoRule("the larger of two")
    operand, kept = call.memo("reduced", lambda: _reduced(call))
    _add_largest(call, wanted, Rows.of([operand], kept, wanted.index))


# -- attention --------------------------------------------------------------------


@rule("attention")
def attention(call: Call, wanted: Wanted) -> None:
    """Add values by the attention weights, and keys and queries by the products in the scores.

    A score is critical if its weight is, as for a softmax.
    """
    names = ("query", "key", "value")
    if call.execution.op.about.name != "scaled_dot_product_attention":
        raise NoRule("attention with its projections in one operator")
    query, key, value = (call.array(name) for name in names)
    lead = LETTERS[: query.ndim - 2]
    shared = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    # Grouped queries: R of them share one key.
    heads = lead[:-1] + lead[-1:] + "R" if lead else ""
    split = (*query.shape[:-3], query.shape[-3] // shared, shared) if lead else ()
    q = Operand.of(query.reshape(*split, *query.shape[-2:]), heads + "IE")
    k, v = Operand.of(key, lead + "JE"), Operand.of(value, lead + "JD")
    scores, weights = call.memo("weights", lambda: _attention_weights(call, shared))
    p = Operand.of(weights.reshape(*split, *weights.shape[-2:]), heads + "IJ")
    rows = Rows.of([p, v], heads + "ID", wanted.index)
    own = call.output().reshape(-1)[wanted.index].astype(np.float64)
    # What follows may ask for a multiple of the value: the same multiple of the products explains
    # it.
    factor = np.divide(wanted.values, own, out=np.zeros_like(own), where=own != 0)
    (critical, of_values), products = rows.critical(factor, call.theta, relative=True)
    inner = Rows.of([q, k], heads + "IJ", critical)
    (of_queries, of_keys), others = inner.critical(
        scores.reshape(-1)[critical].astype(np.float64), call.theta
    )
    for name, index in zip(names, (of_queries, of_keys, of_values), strict=True):
        position = call.position(name)
        assert position is not None
        wanted.add(position, index)
    call.width = rows.width
    row, column = np.divmod(products, rows.width)
    wanted.synapses.append(wanted.index[row] * rows.width + column)
    row, column = np.divmod(others, inner.width)
    # Synapses of the scores are numbered after those of the weighted sum.
    first = call.output().size * rows.width
    wanted.synapses.append(first + critical[row] * inner.width + column)


def _attention_weights(call: Call, shared: int) -> tuple[Array, Array]:
    """Return the scores before scaling and masks, and the attention weights."""
    query, key = call.array("query"), call.array("key")
    if shared > 1:
        key = key.repeat(shared, axis=-3)
    scores = query @ np.swapaxes(key, -1, -2)
    scale = call.attribute("scale", default=1 / math.sqrt(query.shape[-1]))
    scaled = scores * scale
    if call.attribute("is_causal", default=False):
        scaled = np.where(np.tri(*scaled.shape[-2:]) > 0, scaled, -np.inf)
    if call.position("attn_mask") is not None:
        mask = call.array("attn_mask")
        bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
        scaled = scaled + bias
    greatest = scaled.max(axis=-1, keepdims=True)
    powers = np.exp(scaled - np.where(greatest == -np.inf, 0.0, greatest))
    total = powers.sum(axis=-1, keepdims=True)
    # A row whose positions are all masked gives zeros, as PyTorch's _safe_softmax has it (2.13).
    return scores, powers / np.where(total == 0.0, 1.0, total)
