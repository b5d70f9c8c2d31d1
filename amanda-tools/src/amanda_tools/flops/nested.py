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


def split_by_item(shapes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the shapes of each item of nested tensors, with those of the other tensors.

    Raises:
        LookupError: nested tensors have different numbers of items.
    """
    counts = {len(shape.shapes) for shape in shapes if isinstance(shape, ItemShapes)}
    if len(counts) > 1:
        raise LookupError(f"nested tensors of {sorted(counts)} items")
    for number in range(counts.pop()):
        yield tuple(s.shapes[number] if isinstance(s, ItemShapes) else s for s in shapes)
