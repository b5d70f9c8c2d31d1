"""Windows of convolutions and pooling, in every layout and with every kind of padding.

``windows(call, kernel, groups, fill, strides)`` gives the padded data as a factor of products
(``synapses.Operand``), with an axis for each position in the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amanda_tools._values.tensors import Array
from amanda_tools.path.rule_call import Call, NoRule
from amanda_tools.path.synapses import Operand

OUTSIDE, INSIDE = "xyz", "uvw"
"""Letters of positions in the result, and of positions within the window."""


def layout_of(call: Call) -> str:
    """Return a letter per axis of the data; the batch axis may be missing.

    Raises:
        NoRule: the mapping rules do not know the layout.
    """
    layout = call.execution.op.signature.data_layout
    if "C" not in layout or "N" not in layout:
        raise NoRule(f"its data has the layout {layout or 'unknown'}")
    return layout if call.array(0).ndim == len(layout) else layout.replace("N", "")


def per_axis(value: Any, layout: str, default: Sequence[int]) -> list[int]:
    """Expand an argument to a number per spatial axis: given once, per spatial axis, or per
    axis."""
    spatial = [letter for letter in layout if letter not in "NC"]
    if value is None or (not isinstance(value, int) and len(value) == 0):
        return list(default[: len(spatial)])
    items = [value] if isinstance(value, int) else [int(item) for item in value]
    if len(items) == len(layout) and len(items) != len(spatial):
        return [items[layout.index(letter)] for letter in spatial]
    return items * len(spatial) if len(items) == 1 else items


def windows(
    call: Call, kernel: Sequence[int], groups: int, fill: float, strides: Sequence[int]
) -> tuple[Operand, str]:
    """Make an operand of the padded data, and the letters of the result.

    Letters: ``N`` batch, ``G`` group, ``C`` channels of the group, ``P`` outputs of the group,
    :data:`OUTSIDE` and :data:`INSIDE`.

    Args:
        call: the operator.
        kernel: sizes of the window.
        groups: number of groups of channels.
        fill: value of the padding.
        strides: strides if the operator has no such argument.
    """
    layout, source = layout_of(call), call.array(0)
    spatial = [letter for letter in layout if letter not in "NC"]
    strides = per_axis(call.attribute("stride", "strides"), layout, strides)
    dilations = per_axis(call.attribute("dilation", "dilations"), layout, [1] * 3)
    outputs = [call.output().shape[layout.index(letter)] for letter in spatial]
    # Windows are found on an array of indices: padding and layout are then the same for all rules.
    origin = _bordered(call, layout, outputs, [
        ((size - 1) * dilation + 1, stride)
        for size, dilation, stride in zip(kernel, dilations, strides, strict=True)
    ])  # fmt: skip
    plane = [math.prod(origin.shape[i + 1 :]) for i in range(origin.ndim)]
    per_group = origin.shape[1] // groups
    steps = {"N": plane[0], "G": plane[1] * per_group, "C": plane[1]}
    counts = {"N": origin.shape[0], "G": groups, "C": per_group}
    for i in range(len(spatial)):
        steps[OUTSIDE[i]] = plane[2 + i] * strides[i]
        steps[INSIDE[i]] = plane[2 + i] * dilations[i]
        counts[OUTSIDE[i]], counts[INSIDE[i]] = outputs[i], kernel[i]
    flat = origin.reshape(-1)
    values = np.where(flat < 0, np.asarray(fill, source.dtype), source.reshape(-1)[flat])
    names = {"C": "GP", **dict(zip(spatial, OUTSIDE, strict=False))}
    letters = "".join(names.get(letter, letter) for letter in layout)
    return Operand(values, steps, counts, flat), letters


def _bordered(
    call: Call, layout: str, outputs: Sequence[int], reach: Sequence[tuple[int, int]]
) -> Array:
    """Return flat indices of the data as (batch, channels, *spatial), -1 in the padding.

    Args:
        call: the operator.
        layout: letter per axis of the data.
        outputs: sizes of the result.
        reach: for each spatial axis the extent of a window, and its stride.
    """
    source = call.array(0)
    first = [letter for letter in "NC" if letter in layout]
    spatial = [letter for letter in layout if letter not in "NC"]
    order = [layout.index(letter) for letter in (*first, *spatial)]
    places: Array = np.arange(source.size).reshape(source.shape).transpose(order)
    if "N" not in layout:
        places = places[None]
    sizes = places.shape[2:]
    before = _before(call, layout, sizes, reach)
    after = [
        max(0, (count - 1) * stride + far - size - border)
        for count, (far, stride), size, border in zip(outputs, reach, sizes, before, strict=True)
    ]
    edges = [(0, 0), (0, 0), *zip(before, after, strict=True)]
    return np.pad(places, edges, constant_values=-1)


def _before(
    call: Call, layout: str, sizes: Sequence[int], reach: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the width of the padding before each spatial axis."""
    padding = call.attribute("padding", default=0)
    if isinstance(padding, bytes):
        padding = padding.decode()
    if not isinstance(padding, str):
        return per_axis(padding, layout, [0] * 3)
    if padding.upper() == "EXPLICIT":
        pairs = list(call.attribute("explicit_paddings"))
        return [int(pairs[2 * i]) for i, letter in enumerate(layout) if letter not in "NC"]
    if padding.upper() == "VALID":
        return [0] * len(sizes)
    counts = [-(-size // stride) for size, (_, stride) in zip(sizes, reach, strict=True)]
    return [
        max((count - 1) * stride + far - size, 0) // 2
        for count, size, (far, stride) in zip(counts, sizes, reach, strict=True)
    ]
