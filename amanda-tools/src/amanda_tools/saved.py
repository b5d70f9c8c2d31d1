"""What automatic differentiation keeps for the backward pass, where a framework tells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from amanda import OpContext

_MOST_NODES = 1000
"""An operator makes a few nodes, an LSTM some hundred."""


def saved_tensors(context: OpContext) -> dict[int, int]:
    """The tensors that an operator has saved, parameters and its own views of them aside.

    Called in an analysis that sees the outputs.

    Returns:
        Address of the memory to bytes; empty where nothing is recorded, or where the framework
        does not tell (only PyTorch's ``grad_fn`` does).
    """
    parameters = {
        _address(tensor)
        for position, tensor in enumerate(context.get_inputs())
        if tensor is not None and context.get_value(position) is not None
    }
    found: dict[int, int] = {}
    for node in _nodes(context.get_inputs(), context.get_outputs() or ()):
        for tensor in _saved(node):
            address = _address(tensor)
            if address and address not in parameters:
                size = math.prod(tensor.shape) * tensor.dtype.itemsize
                found[address] = max(found.get(address, 0), size)
    return found


def _nodes(inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes between an operator's inputs and outputs."""
    waiting = [_node_of(tensor) for tensor in outputs]
    # Of an operator in place the input is the output by now, and only its own node is sure.
    in_place = any(tensor is output for tensor in inputs for output in outputs)
    if in_place:
        yield from {id(node): node for node in waiting if node is not None}.values()
        return
    before = [_node_of(tensor) for tensor in inputs]
    seen = [node for node in before if node is not None]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop()
        if node is None or any(node is other for other in seen):
            continue
        seen.append(node)
        yield node
        waiting += [previous for previous, _ in node.next_functions]


def _node_of(tensor: Any) -> Any:
    """The node that computes a tensor's gradient, None if there is none."""
    try:
        return getattr(tensor, "grad_fn", None)
    except RuntimeError:
        # A view that was made and changed under no_grad may not be asked.
        return None


def _saved(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:
            # The backward pass has been there.
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(item, "data_ptr"):
                yield item


def _address(tensor: Any) -> int:
    """Where the memory of a tensor begins, 0 where it has none of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
