"""The function of TensorFlow behind ``tf.gradients``, for gradients of a small part of a graph.

TensorFlow looks for the operators between two tensors among all that depend on the first one, which
in a copy is most of the network. Here they are looked for from the last tensor back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from tensorflow.python.ops import gradients_util

from amanda_tensorflow._internals.runtime import is_trainable

_HELPER: Any = gradients_util._GradientsHelper


def gradients_in_graph(*args: Any, **options: Any) -> Any:
    """``gradients_util._GradientsHelper``, which reads the operators between the tensors only."""
    return _reading(_HELPER, _PendingCount=_pending_count)(*args, **options)


def _reading(function: Any, **names: Any) -> Callable[..., Any]:
    """A function of ``gradients_util`` that finds others there by some names.

    For each call anew: names there are patched, ``_SymGrad`` by us, before and after.
    """
    known = {**vars(gradients_util), **names}
    return FunctionType(function.__code__, known, function.__name__, function.__defaults__)


def _pending_count(to_ops: Sequence[Any], from_ops: Sequence[Any], *others: Any) -> Any:
    """``gradients_util._PendingCount``, which marks the operators in between only."""

    def mark(starts: Sequence[Any], reached: set[Any], func_graphs: Sequence[Any]) -> None:
        between = operators_between(to_ops, starts)
        if between is None:
            gradients_util._MarkReachedOps(starts, reached, func_graphs)
        else:
            reached.update(between)

    pending = _reading(gradients_util._PendingCount, _MarkReachedOps=mark)
    return pending(to_ops, from_ops, *others)


def operators_between(to_ops: Iterable[Any], from_ops: Sequence[Any]) -> set[Any] | None:
    """The operators on a way of gradients from `from_ops` to `to_ops`, and `from_ops`.

    Operators are in the order of their ids, each after those that it reads.

    Returns:
        None where a back edge of a loop of TensorFlow 1, which breaks that order, may be on a way;
        and where the operators are in several graphs.
    """
    ops = [*to_ops, *from_ops]
    if any(op.graph is not ops[0].graph for op in ops):
        return None
    first, reached = min(op._id for op in from_ops), set(from_ops)
    needed: dict[int, Any] = {}
    left = list(to_ops)
    while left:
        op = left.pop()
        if op.type in ("Merge", "RefMerge"):
            return None
        if op._id in needed or op._id < first or op in reached:
            continue
        needed[op._id] = op
        left += [tensor.op for tensor in op.inputs]
    for _, op in sorted(needed.items()):
        if any(tensor.op in reached and is_trainable(tensor) for tensor in op.inputs):
            reached.add(op)
    return reached
