"""Shapes of nested tensors of PyTorch, whose FLOPs are those of their items.

::

    if is_nested(tensor):
        [shapes] = item_shapes_of([tensor])     # ItemShapes(((2, 4), (3, 4)))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from amanda_tools._operators.signature import Shape


@attrs.frozen
class ItemShapes:
    """Shapes of the items of a nested tensor."""

    shapes: tuple[Shape, ...]


def item_shapes_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shapes of tensors some of which are nested, of these the shapes of the items.

    A nested tensor with a ragged axis has a shape, too, but not the sizes of its items.
    """
    return tuple(
        ItemShapes(tuple([tuple(item.shape) for item in tensor.unbind()]))
        if is_nested(tensor)
        else None if tensor is None else tensor.shape
        for tensor in tensors
    )  # fmt: skip


def is_nested(tensor: Any) -> bool:
    """Return True for PyTorch's nested tensors, which hold a list of tensors."""
    return bool(getattr(tensor, "is_nested", False))


def split_by_item(calls: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the calls of operators for each item of nested tensors, with the other tensors.

    Args:
        calls: the shapes of inputs and of outputs, of a backward operator and its forward operator.

    Raises:
        LookupError: nested tensors have different numbers of items, or one call has none.
    """
    counts = [
        {len(s.shapes) for s in (*ins, *outs) if isinstance(s, ItemShapes)} for ins, outs in calls
    ]
    if any(count != counts[0] or len(count) > 1 for count in counts):
        raise LookupError(f"nested tensors of {counts} items")
    for number in range(max(counts[0], default=1)):
        yield [tuple(tuple(_item(s, number) for s in shapes) for shapes in call) for call in calls]


def _item(shape: Any, number: int) -> Any:
    return shape.shapes[number] if isinstance(shape, ItemShapes) else shape
