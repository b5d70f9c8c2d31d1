"""The numbers of PyTorch's tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from amanda_tools._values.numerics import Array, Numerics


class TorchNumerics(Numerics):
    """PyTorch's tensors, on any device that has data."""

    def is_floating(self, tensor: Any) -> bool:
        return bool(tensor.is_floating_point()) and self.is_readable(tensor)

    def is_readable(self, tensor: Any) -> bool:
        return not (
            tensor.is_meta
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.layout is not torch.strided
        )

    def shape(self, tensor: Any) -> list[int]:
        # A nested tensor of the strided kind has none.
        return [] if tensor.is_nested else super().shape(tensor)

    def is_finite(self, tensor: Any) -> bool:
        return bool(torch.isfinite(tensor).all())

    def is_clean(self, tensor: Any) -> bool:
        # One kernel and one number. A sum of finite numbers may overflow, so that only
        # a finite one is an answer.
        try:
            if math.isfinite(tensor.sum().item()):
                return True
        except (RuntimeError, TypeError):
            # It has no sum or no real one: quantized, nested, complex, without data.
            pass
        return super().is_clean(tensor)

    def has_nan(self, tensor: Any) -> bool:
        return bool(torch.isnan(tensor).any())

    def numpy(self, tensor: Any) -> Array:
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.dtype not in _NUMPY:
            tensor = tensor.float()
        array: Array = tensor.resolve_conj().resolve_neg().numpy().copy()
        return array

    def stored(self, tensor: Any) -> Any:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def copy(self, tensor: Any) -> Any:
        return tensor.detach().clone()

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")


_NUMPY = (torch.float64, torch.float32, torch.float16)

NUMERICS = TorchNumerics()
