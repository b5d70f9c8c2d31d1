"""The order in which the parts of a gradient are added, as it is in the vanilla graph.

TensorFlow adds the gradients that several operators return for one tensor in the order in which it
has called their gradient functions. That order is one of breadth: where a gradient is derived anew
in a copy, nodes of routines on some ways change it, and so the last bits of sums of three parts and
more (TensorFlow 2.21: Keras' ``GRU`` with ``recurrent_dropout``).
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map.recording import (
    GradientCall,
    TensorName,
    forward_op,
    log_of,
    tensor_name,
)
from amanda_tensorflow.operators.types import UNROUTABLE

_SMALLEST = 3
"""Parts of the smallest sum whose order matters."""

_FIRST = (-1, 0)
"""The place of a gradient that was given, and not returned by a gradient function."""

_EXPECTED: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
"""By vanilla graph whose gradient has not been built, the order of its operators' gradients."""

_LOOPS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""By graph of a copy and name there, the vanilla loops, branches and calls."""

Place = tuple[int, int]
"""Number of a gradient call in the vanilla graph, and position among the gradients it returns."""


Producers = Mapping[TensorName, Sequence[GradientCall]]
"""By name of a tensor of one graph, the gradient calls that return it."""


def note_loop(new: Any, op: Any) -> None:
    """Note of which vanilla loop, branch or call an operator of a copy is the copy."""
    _LOOPS.setdefault(new.graph, {})[new.name] = op


def restore_order(graph: Any, added: Sequence[Any]) -> None:
    """Let additions of gradients that were derived in a copy add in the order of the vanilla ones.

    Args:
        graph: the graph of the copy.
        added: operators of it, of the derived gradient.
    """
    sums = [op for op in added if is_sum(op)]
    if not sums:
        return
    producers: dict[TensorName, list[GradientCall]] = {}
    for call in log_of(graph).calls:
        for name in call.grad_inputs:
            if name is not None:
                producers.setdefault(name, []).append(call)
    for op in sums:
        order, inputs = vanilla_order(producers, op), list(op.inputs)
        for index, source in enumerate(order or ()):
            _internals.update_input(op, index, inputs[source])


def is_sum(op: Any) -> bool:
    """True if an operator is a sum, perhaps of gradients, whose order matters."""
    return op.type == "AddN" and len(op.inputs) >= _SMALLEST


def vanilla_order(producers: Producers, op: Any) -> Sequence[int] | None:
    """The inputs of an addition of gradients, derived in a copy, in the order of the vanilla ones.

    Args:
        producers: of its graph.
        op: the addition, an :func:`is_sum`.

    Returns:
        The positions of its inputs in that order; None where that is its own order, or where it is
        not known.
    """
    parts = [_places(producers, tensor, op.graph) for tensor in op.inputs]
    targets = set.intersection(*(set(part) for part in parts if part)) if any(parts) else set()
    if len(targets) != 1 or None in parts:
        return None
    (target,) = targets
    taken: collections.Counter[str] = collections.Counter()
    places: list[Place] = []
    for tensor, part in zip(op.inputs, parts, strict=True):
        # One tensor may be the gradient that several operators return.
        known = sorted(part[target])[taken[tensor.name] :] if part else [_FIRST]
        if not known:
            return None
        taken[tensor.name] += 1
        places.append(known[0])
    order = sorted(range(len(places)), key=lambda index: places[index])
    return None if order == list(range(len(order))) else order


def _places(producers: Producers, tensor: Any, graph: Any) -> dict[int, list[Place]] | None:
    """Where a part of a gradient comes from, by ``id`` of the vanilla tensor whose gradient it is.

    Args:
        graph: that of the gradient.

    Returns:
        Nothing if it was given, or stands for no part of the vanilla sum: the gradient of the lists
        in which the vanilla loop keeps values, which is zero. None if that is not known.
    """
    name = tensor_name(tensor)
    if name not in producers and tensor.op.type == "UnsortedSegmentSum":
        # An IndexedSlices that has been made dense to be added; its values stand for it.
        name = tensor_name(tensor.op.inputs[0])
    found: dict[int, list[Place]] = {}
    is_known = name not in producers and tensor.op.type != "AddN"
    for call in producers.get(name, ()):
        source = _vanilla(call)
        if source is None:
            continue
        is_known = True
        number = _number(source, is_inside=call.forward.graph() is graph)
        if number is None:
            continue
        for position, returned in enumerate(call.grad_inputs):
            if returned == name and position < len(source.inputs):
                target = source.inputs[position]
                found.setdefault(id(target), []).append((number, position))
    return found if is_known else None


def _vanilla(call: GradientCall) -> Any:
    """The vanilla operator whose copy a gradient call differentiates; None for inserted ones."""
    op = forward_op(call)
    if op is None:
        return None
    identified = (_internals.known_ops(op.graph) or {}).get(op.name)
    return _LOOPS.get(op.graph, {}).get(op.name) if identified is None else identified.source


def _number(op: Any, is_inside: bool) -> int | None:
    """The place of an operator's gradient among those of its vanilla graph; None if it has none.

    A gradient that has been built tells it. Where there is none, as in a function that is called
    under a tape, it is that of the whole graph, from all of its outputs to all of its inputs.

    Args:
        is_inside: whether it is a gradient in the operator's graph, which may have one besides.
    """
    log = log_of(op.graph)
    built = log.inside if is_inside else log.outside
    if built:
        return built.get(op.name)
    if op.graph not in _EXPECTED:
        _EXPECTED[op.graph] = _expected(op.graph)
    return _EXPECTED[op.graph].get(op.name)


def _expected(graph: Any) -> dict[str, int]:
    """The order in which TensorFlow would call the gradient functions of a function's operators.

    An operator's turn comes when all operators that read its outputs have had theirs, as in
    ``gradients_util._GradientsHelper`` (TensorFlow 2.16 to 2.21).
    """
    outputs = getattr(graph, "outputs", ())
    ends = list(dict.fromkeys(t.op for t in outputs if _internals.is_trainable(t)))
    between = _leading_to(ends, _reached_from(getattr(graph, "inputs", ())))
    waiting: collections.Counter[Any] = collections.Counter()
    for op in between:
        waiting.update(t.op for t in op.inputs if t.op in between)
    order: dict[str, int] = {}
    queue = collections.deque(op for op in ends if op in between and not waiting[op])
    while queue:
        op = queue.popleft()
        order[op.name] = len(order)
        for tensor in op.inputs:
            waiting[tensor.op] -= 1
            if not waiting[tensor.op]:
                queue.append(tensor.op)
    return order


def _reached_from(tensors: Iterable[Any]) -> set[Any]:
    """Return the operators that make these tensors, and all that gradients of these pass."""
    reached: set[Any] = set()
    queue = collections.deque(tensor.op for tensor in tensors)
    while queue:
        op = queue.popleft()
        if op not in reached:
            reached.add(op)
            queue.extend(r for t in op.outputs if _passes(t) for r in t.consumers())
    return reached


def _leading_to(ends: Iterable[Any], reached: Container[Any]) -> set[Any]:
    """Return the operators among `reached` on the paths to these."""
    found: set[Any] = set()
    queue = collections.deque(ends)
    while queue:
        op = queue.popleft()
        if op in reached and op not in found:
            found.add(op)
            queue.extend(t.op for t in op.inputs)
    return found


def _passes(tensor: Any) -> bool:
    """True if gradients pass a tensor."""
    return tensor.dtype in UNROUTABLE or bool(_internals.is_trainable(tensor))
