"""Extraction rules of operators that work element by element, or rearrange elements.

A rule takes a :class:`Call` and a :class:`Wanted`, and names the critical elements of the inputs
with ``wanted.add()``. Without a rule all inputs are critical, see :func:`add_everything`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from amanda_tools._operators.op_table import row_of, set_row
from amanda_tools._values.tensors import Array
from amanda_tools.path.rule_call import Call, NoRule, Rule, Wanted, unbroadcast
from amanda_tools.path.synapses import select_critical


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Set the rule of canonical types in the table of operators, in place of one that they have.

    Example::

        @rule("my_gate")
        def gate(call: Call, wanted: Wanted) -> None:
            wanted.add(0, wanted.index)
    """

    def register(function: Rule) -> Rule:
        for kind in types:
            set_row(kind, path=function)
        return function

    return register


def add_everything(call: Call, wanted: Wanted) -> None:
    """Name all elements of the inputs; with the batch in front, of the same entries of the
    batch."""
    output = call.output(wanted.output)
    for position in call.data:
        source = call.array(position)
        is_critical = np.ones(source.shape, bool)
        if source.ndim and output.ndim and source.shape[0] == output.shape[0] and output.size:
            is_critical[:] = False
            is_critical[np.unique(wanted.index // (output.size // output.shape[0]))] = True
        places = np.flatnonzero(is_critical)
        wanted.add(position, places)
        wanted.synapses.append(places)


@rule("relu")
def relu(call: Call, wanted: Wanted) -> None:
    """Critical inputs are the positive ones; clamped elements contribute nothing."""
    for position in call.data[:1]:
        own = call.output().reshape(-1)[wanted.index]
        wanted.add(position, wanted.index, own.astype(np.float64))


def passing(call: Call, wanted: Wanted) -> None:
    """Rule for operators that keep elements in their order and values (reshape, identity).

    An added bias is not a neuron. The n-th output belongs to the n-th input.
    """
    position = wanted.output
    if call.array(position).size != call.output(position).size:
        raise NoRule("its output has another size")
    wanted.add(position, wanted.index, wanted.values)


def elementwise(call: Call, wanted: Wanted) -> None:
    """Rule for elementwise operators: the element at the same position of each data input.

    Normalizations along other axes count the statistics that they found as constants. A constant
    factor of a weighted sum is a part of its weights.
    """
    output = call.output(wanted.output)
    call.width = max(1, len(call.data))
    for position in call.data:
        source = call.array(position)
        values = None
        if call.execution.op.about.type in ("mul", "div") and len(call.data) == 1:
            values = _unscaled(output, source, wanted)
        index = unbroadcast(wanted.index, output.shape, source.shape)
        wanted.add(position, index, values)


def _unscaled(output: Array, source: Array, wanted: Wanted) -> Array | None:
    """Return the values to explain before a constant scaled the elements."""
    if source.shape != output.shape:
        return None
    before = source.reshape(-1)[wanted.index]
    after = output.reshape(-1)[wanted.index].astype(np.float64)
    ratio = np.divide(before, after, out=np.zeros_like(after), where=after != 0)
    return np.asarray(wanted.values * ratio)


@rule("add", "sub", "rsub")
def addition(call: Call, wanted: Wanted) -> None:
    """Critical are the largest contributions of both branches; a constant is a bias."""
    output, data = call.output(wanted.output), call.data
    signs = np.ones(len(call.execution.inputs))
    if call.execution.op.about.type == "sub":
        signs[1:] = -1
    elif call.execution.op.about.type == "rsub":
        signs[:1] = -1
    if call.attribute("alpha", default=1) != 1:
        signs[1:] *= float(call.attribute("alpha"))
    sources = [call.array(position) for position in data]
    places = [unbroadcast(wanted.index, output.shape, s.shape) for s in sources]
    if len(data) == 1:
        own = sources[0].shape == output.shape
        wanted.add(data[0], places[0], wanted.values * signs[data[0]] if own else None)
        return
    parts = [
        signs[position] * source.reshape(-1)[place]
        for position, source, place in zip(data, sources, places, strict=True)
    ]
    call.width = len(data)
    mask = select_critical(np.stack(parts, axis=1), wanted.values, call.theta)
    for column, (position, place) in enumerate(zip(data, places, strict=True)):
        wanted.add(position, place[mask[:, column]])
    rows, columns = np.nonzero(mask)
    wanted.synapses.append(wanted.index[rows] * len(data) + columns)


@rule("batch_norm")
def batch_norm(call: Call, wanted: Wanted) -> None:
    """Rule for batch norm, folded into the operator before it: a scale and a bias per channel."""
    position = call.position("input", "x", 0)
    assert position is not None
    source = call.array(position)
    layout = call.execution.op.signature.data_layout or "NC"
    axis = layout.index("C")
    if call.attribute("training", "is_training", default=False):
        rest = tuple(i for i in range(source.ndim) if i != axis)
        variance = source.var(axis=rest, dtype=np.float64)
    else:
        variance = call.array("running_var", "variance")
    slope = 1 / np.sqrt(variance + call.attribute("eps", "epsilon", default=1e-5))
    if call.position("weight", "scale") is not None:
        slope = slope * call.array("weight", "scale")
    slopes = slope[np.unravel_index(wanted.index, source.shape)[axis]]
    alive = slopes != 0
    wanted.add(position, wanted.index[alive], wanted.values[alive] / slopes[alive])


def moving(call: Call, wanted: Wanted) -> None:
    """Rule for operators that only rearrange elements (reshape, gather): map output indices
    back."""
    if not call.data:
        return
    origins, parts = call.memo("origins", call.origins)
    places = origins[wanted.output].reshape(-1)[wanted.index]
    for position, part in zip(call.data, parts, strict=True):
        known = (places >= part.start) & (places < part.stop)
        wanted.add(position, places[known] - part.start, wanted.values[known])


@rule("embedding")
def embedding(call: Call, wanted: Wanted) -> None:
    """Name rows of the weight, and the indices that chose them."""
    op = call.execution.op
    weight = call.position("weight", "params", "resource")
    number = next(
        (i for i, a in enumerate(call.execution.inputs) if a is not None and a.dtype.kind in "iu"),
        None,
    )
    if weight is None:
        weight = next(iter(op.parameters), None)
    if weight is None or number is None:
        raise NoRule("its weight or its indices are not known")
    size = call.output().shape[-1]
    rows, columns = np.divmod(wanted.index, size)
    picked = call.array(number).reshape(-1)
    wanted.add(weight, picked[rows].astype(np.int64) * size + columns)
    wanted.add(number, np.unique(rows))


_NAMED: Mapping[str, Rule] = {"passing": passing, "elementwise": elementwise, "moving": moving}


def rule_of(kind: str) -> Rule | None:
    """Return the rule of a canonical type; None without one."""
    found = row_of(kind).path or row_of(kind.lstrip("_")).path
    return _NAMED[found] if isinstance(found, str) else found
