"""Shapes and sizes of tensors of any framework, as plain Python numbers.

``shape_of(torch.ones(2, 3))`` is ``(2, 3)``, ``byte_size`` of it 24.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from amanda.interface.specs import TensorSpec
from amanda.tools.canonical import total
from amanda_tools._internals import batch_sizes, local_part, may_be_batched

Shape = tuple[int, ...]

HANDLES = ("resource", "variant")
"""Element types of tensors that stand for a variable, an iterator or a list."""


def shape_of(tensor: Any) -> Shape:
    """Return the shape of a tensor; all of its sizes have to be known.

    Raises:
        TypeError: a size is unknown, or differs between the items of a nested tensor.
    """
    try:
        return tuple([int(size) for size in tensor.shape])
    except AttributeError as error:
        # Of the ragged axis of a nested tensor: its size has no number (PyTorch 2.13).
        raise TypeError(f"no shape in numbers: {error}") from error


def batch_of(tensors: Sequence[Any]) -> dict[int, int]:
    """Return how often an operator computes at once what the shapes of its tensors say.

    Under ``torch.vmap`` and what is made of it, such as ``jacrev``, tensors do not show the axes
    that are mapped over.

    Returns:
        The sizes of these axes in all tensors, by the level of the transform, outermost first.

    Raises:
        LookupError: a size cannot be found.
    """
    sizes: dict[int, int] = {}
    if may_be_batched(tensors):
        torch = sys.modules["torch"]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                sizes.update(batch_sizes(tensor))
    return dict(sorted(sizes.items()))


def physical_shape(tensor: Any) -> tuple[Any, ...]:
    """Return the shape of what this process has of a tensor, the axes of ``torch.vmap`` first.

    Raises:
        LookupError: a size cannot be found.
    """
    return (*batch_of([tensor]).values(), *local_part(tensor).shape)


def rank_of(tensor: Any) -> int | None:
    """Return the number of axes; None of a symbolic tensor of unknown rank."""
    rank = tensor.shape.rank if hasattr(tensor.shape, "rank") else len(tensor.shape)
    return None if rank is None else int(rank)


def size_of(tensor: Any) -> int:
    """Return the number of elements, of a nested tensor those of all items."""
    if getattr(tensor, "is_nested", False):
        return sum(map(size_of, tensor.unbind()))
    return math.prod(map(int, tensor.shape))


def total_bytes(tensors: Iterable[Any] | None) -> int | None:
    """Return the bytes of the elements of tensors; None if those of one are unknown."""
    return total(byte_size(tensor) for tensor in tensors or () if tensor is not None)


def element_count(tensor: Any) -> int | None:
    """Return the number of elements of all samples of ``torch.vmap``, of all items of a nested
    tensor, of a distributed tensor those of this process; None if its shape is unknown."""
    try:
        if getattr(tensor, "is_nested", False):
            return size_of(tensor)
        return math.prod(map(int, physical_shape(tensor)))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # Symbolic.
        return None


def byte_size(tensor: Any) -> int | None:
    """Return the bytes of the elements of a tensor, or of one described; None if its shape or
    element type is unknown."""
    if isinstance(tensor, TensorSpec):
        return tensor.nbytes
    dtype = getattr(tensor, "dtype", None)
    item = getattr(dtype, "itemsize", None) or getattr(dtype, "size", None)
    size = element_count(tensor)
    return None if item is None or size is None else size * int(item)
