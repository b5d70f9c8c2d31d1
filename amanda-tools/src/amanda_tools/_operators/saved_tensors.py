"""Tensors that autograd keeps for the backward pass of an operator; PyTorch only.

``sizes, unknown = saved_tensors(context)``, in an analysis that sees the outputs: bytes by address,
and the number of tensors that hooks of the program keep in another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from amanda import OpContext
from amanda.python.nested import leaves
from amanda.tools.description import op_name
from amanda_tools._internals import inside, may_be_batched, raw_saved_tensors
from amanda_tools._values.shapes import byte_size

_CHECKPOINTS = "torch.utils.checkpoint"
"""Its hooks keep nothing: what they stand for is computed again."""

_MOST_NODES = 1000
"""Limit of autograd nodes per operator: most make a few, an LSTM some hundred."""


def saved_tensors(context: OpContext) -> tuple[dict[int, int], int]:
    """Return the memory that an operator keeps for its backward pass, parameters and their views
    aside.

    Call it in an analysis that sees the outputs.

    Returns:
        Address of the memory to bytes, and for how many tensors it is not known what hooks of the
        program keep. Nothing where nothing is recorded, and for frameworks other than PyTorch,
        which do not expose it.
    """
    parameters = {
        _address(tensor)
        for position, tensor in enumerate(context.get_inputs())
        if tensor is not None and context.get_value(position) is not None
    }
    found: dict[int, int] = {}
    kept = list(leaves(list(saved_items(context))))
    for tensor in kept:
        address = _address(tensor)
        if address and address not in parameters:
            # Several views of one memory are saved once: the largest counts.
            found[address] = max(found.get(address, 0), byte_size(tensor) or 0)
    return found, sum(tensor is None for tensor in kept)


def saved_items(context: OpContext) -> Iterator[Any]:
    """Yield all tensors that an operator has saved.

    For one that a hook of the program has packed, a list of the tensors that it keeps instead;
    ``[None]`` where it keeps something else.
    """
    inputs, outputs = context.get_inputs(), context.get_outputs() or ()
    name = op_name(context.get_op()).partition(".")[0]
    writes = name.endswith("_")
    if not writes and any(tensor is output for tensor in inputs for output in outputs):
        # It returned its input, as x.float() of a float32 tensor does.
        return
    for node in _nodes(inputs, outputs):
        yield from (item for item in _saved(node) if item is not None)


def _nodes(inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield the autograd nodes between an operator's inputs and outputs."""
    waiting = _nodes_of(outputs)
    # After an in-place operator the input is the output: only its own node is known.
    if not {id(tensor) for tensor in inputs}.isdisjoint(map(id, outputs)):
        yield from {id(node): node for node in waiting}.values()
        return
    # Nodes of the inputs belong to earlier operators: the search ends there.
    seen = {id(node): node for node in _nodes_of(inputs)}
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        waiting += [previous for previous, _ in node.next_functions]


def _nodes_of(tensors: Sequence[Any]) -> list[Any]:
    return [node for tensor in tensors if (node := node_of(tensor)) is not None]


def node_of(tensor: Any) -> Any:
    """Return the ``grad_fn`` of a tensor, None if there is none."""
    try:
        nodes = (getattr(one, "grad_fn", None) for one in _layers(tensor))
        return next((node for node in nodes if node is not None), None)
    except RuntimeError:
        # PyTorch 2.13 raises for a view that was made, and changed in place, under no_grad.
        return None


def _layers(tensor: Any) -> Iterator[Any]:
    """Return a tensor, and behind it what each transform of ``torch.func`` has wrapped."""
    is_wrapped = tensor is not None and may_be_batched([tensor])
    return inside(tensor) if is_wrapped else iter((tensor,))


def _saved(node: Any) -> Iterator[Any]:
    """Yield what a node has saved, without calling unpack hooks."""
    for item in raw_saved_tensors(node):
        try:
            yield item.data if item.unpack_hook is None else _packed(item)
        except RuntimeError:
            # The backward pass has freed it.
            continue


def _packed(saved: Any) -> list[Any]:
    """Return the tensors that a hook keeps for one; ``[None]`` where that is not known."""
    found = [leaf for leaf in leaves(saved.data) if hasattr(leaf, "untyped_storage")]
    is_checkpoint = getattr(saved.unpack_hook, "__module__", "") == _CHECKPOINTS
    return found if found or is_checkpoint else [None]


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory, 0 if it has none of its own."""
    try:
        *_, tensor = _layers(tensor)
        storage = tensor.untyped_storage()
        # PyTorch warns where the address of a fake tensor's memory is asked for.
        return 0 if storage.device.type == "meta" else int(storage.data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
