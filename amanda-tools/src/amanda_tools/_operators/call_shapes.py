"""Shapes of the tensors of one execution: under ``torch.vmap``, of nested and distributed tensors.

The FLOPs of an execution are those of its parts: of all samples, and of each item::

    calls = [(shapes_of(inputs), shapes_of(outputs))]
    sum_of_parts(calls, lambda call: formula.flops(CallShapes(signature, *map(plain, call))))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from amanda_tools._internals import local_part, may_be_batched
from amanda_tools._operators.signature import Shape
from amanda_tools._values.shapes import batch_of

Shapes = tuple[tuple[Any, ...], tuple[Any, ...]]
"""The shapes of inputs and outputs, as their framework represents them."""


def sum_of_parts(calls: Sequence[Shapes], flops: Callable[..., int | None]) -> int | None:
    """Return the FLOPs of an execution; None if those of a part, or a size, are not known.

    Args:
        calls: the call of an operator, and of a backward operator that of its forward operator.
        flops: the FLOPs of one sample under ``torch.vmap``, of one item of nested tensors; takes
            the calls of this part.
    """
    try:
        samples = _samples([*calls[0][0], *calls[0][1]])
        parts = split_by_item([tuple(tuple(map(_of_one, s)) for s in call) for call in calls])
        found = [flops(*part) for part in parts]
    except LookupError:
        return None
    return None if None in found else samples * sum(one or 0 for one in found)


def shapes_of(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shapes of tensors, of distributed ones those of the local parts; None for absent
    ones."""
    if may_be_batched(tensors):
        return tuple([None if tensor is None else _batched_shape(tensor) for tensor in tensors])
    try:
        shapes = [None if tensor is None else local_part(tensor).shape for tensor in tensors]
        # Kept for each operator: the garbage collector does not visit tuples of numbers, but
        # torch.Size.
        return tuple([tuple(shape) if isinstance(shape, tuple) else shape for shape in shapes])
    except (RuntimeError, ValueError):
        return item_shapes_of(tensors)


@attrs.frozen
class BatchedShape:
    """The shape of one sample under ``torch.vmap``, and the sizes of the axes mapped over, None if
    they cannot be found."""

    shape: Shape
    sizes: tuple[tuple[int, int], ...] | None


def _batched_shape(tensor: Any) -> BatchedShape:
    try:
        sizes = tuple(batch_of([tensor]).items())
    except LookupError:
        return BatchedShape(tuple(tensor.shape), None)
    return BatchedShape(tuple(tensor.shape), sizes)


def _of_one(shape: Any) -> Any:
    return shape.shape if type(shape) is BatchedShape else shape


def _samples(shapes: Sequence[Any]) -> int:
    """Return how many samples under ``torch.vmap`` an operator computes at once.

    Raises:
        LookupError: the size of a batch is not known.
    """
    batches = [shape.sizes for shape in shapes if type(shape) is BatchedShape]
    if None in batches:
        raise LookupError("the size of a batch is not known")
    return math.prod(dict(size for sizes in batches for size in sizes or ()).values())


def plain(shapes: Sequence[Any]) -> tuple[Shape | None, ...]:
    """Convert shapes to tuples of int.

    Raises:
        LookupError: a size is unknown, such as that of a ragged axis.
    """
    try:
        # For each operator that is new: a generator costs a frame for each size.
        return tuple([None if s is None else tuple(map(int, s)) for s in shapes])
    except (AttributeError, TypeError, ValueError) as error:
        raise LookupError("a size is not known") from error


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
