"""What automatic differentiation keeps for the backward pass, where a framework tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from amanda import OpContext
from amanda.tools.description import op_name
from amanda_tools._operators.weights import byte_size

HOOKED: Any = object()
"""Stands for a tensor that a hook of the program keeps in its own way, as checkpoints do."""

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
    for tensor in saved_items(context):
        address = 0 if tensor is HOOKED else _address(tensor)
        if address and address not in parameters:
            found[address] = max(found.get(address, 0), byte_size(tensor) or 0)
    return found


def saved_items(context: OpContext) -> Iterator[Any]:
    """All tensors that an operator has saved; :data:`HOOKED` for what a hook has taken."""
    inputs, outputs = context.get_inputs(), context.get_outputs() or ()
    name = op_name(context.get_op()).partition(".")[0]
    writes = name.endswith("_")
    if not writes and any(tensor is output for tensor in inputs for output in outputs):
        # It has handed its input on: x.float() of what is float.
        return
    for node in _nodes(inputs, outputs):
        yield from (item for item in _saved(node) if item is not None)


def _nodes(inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes between an operator's inputs and outputs."""
    waiting = [node_of(tensor) for tensor in outputs]
    # Of an operator in place the input is the output by now, and only its own node is sure.
    in_place = any(tensor is output for tensor in inputs for output in outputs)
    if in_place:
        yield from {id(node): node for node in waiting if node is not None}.values()
        return
    before = [node_of(tensor) for tensor in inputs]
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


def node_of(tensor: Any) -> Any:
    """The node that computes a tensor's gradient, None if there is none."""
    try:
        return getattr(tensor, "grad_fn", None)
    except RuntimeError:
        # A view that was made and changed under no_grad may not be asked.
        return None


def _saved(node: Any) -> Iterator[Any]:
    """What a node has saved, without asking a hook to restore it."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            value = getattr(node, name)
            items = value if isinstance(value, (list, tuple)) else (value,)
            for item in items:
                yield HOOKED if item.unpack_hook is not None else item.data
        except RuntimeError:
            # The backward pass has been there.
            continue


def _address(tensor: Any) -> int:
    """Where the memory of a tensor begins, 0 where it has none of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
