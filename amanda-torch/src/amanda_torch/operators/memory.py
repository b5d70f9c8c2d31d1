"""The memory of tensors that operators write into: overlaps, and copies to compute with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from amanda_torch import _internals


def has_memory(value: Any) -> bool:
    """True if a value is a plain tensor with a storage of elements."""
    return (
        type(value) in _internals.PLAIN_TENSORS
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
    )


def overlap(tensors: Sequence[Any]) -> bool:
    """True if some tensors may share memory."""
    spans = []
    for tensor in filter(has_memory, tensors):
        # On the meta device there is no memory.
        if tensor.numel() and (begin := tensor.data_ptr()):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            spans.append((begin, begin + (last + 1) * tensor.element_size()))
    spans.sort()
    return any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))


def distinct_part(value: Any, target: Any) -> Any:
    """The part of a value for distinct elements of `target` in memory: one element of each expanded
    dimension, all elements of the others."""
    if not has_memory(target):
        return value
    for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and not stride:
            value = value.narrow(dimension, 0, 1)
    return value


def copied_for(value: Any, target: Any) -> Any:
    """A copy of a value to write into in place of `target`, and expanded as that is.

    Few operators write into an expanded tensor, such as ``zero_``; others raise, as without Amanda.
    """
    part = distinct_part(value, target)
    return _cloned(value) if part is value else _cloned(part).expand(target.shape)


def _cloned(value: Any) -> Any:
    """A copy with the same strides: ``normal_`` fills a contiguous tensor in another order, and
    overlapping elements are written several times."""
    if not has_memory(value) or value.is_contiguous():
        return value.clone()
    strides = value.shape, value.stride()
    copy = torch.empty_strided(*strides, dtype=value.dtype, device=value.device)
    return copy.copy_(value)
