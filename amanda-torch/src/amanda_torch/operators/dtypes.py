"""Element types of tensors."""

from __future__ import annotations

import torch

_INTEGERS = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)

SUMMED = _INTEGERS | {
    found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and found.is_floating_point
}
"""Those whose sum is one real number. PyTorch warns as it sums quantized numbers, which have none,
and complex ones of half precision."""
