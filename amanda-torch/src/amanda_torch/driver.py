"""The base of both drivers, which can import torch: namespace, attaching, tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

import amanda
from amanda.errors import CapabilityError
from amanda.namespace import Namespace
from amanda_torch.plugin import TorchDriver


class LoadedDriver(TorchDriver):
    """A driver for PyTorch that can be attached."""

    @property
    def namespace(self) -> Namespace:
        """``pytorch/<major>.<minor>/<mode>``."""
        return Namespace(f"pytorch/{'.'.join(torch.__version__.split('.')[:2])}/{self.mode}")

    def attach(self) -> None:
        """Check PyTorch's private symbols, then make the patches.

        Raises:
            CapabilityError: this PyTorch lacks a private symbol; it is named.
        """
        gone = self.missing_symbols()
        if gone:
            raise CapabilityError(
                f"PyTorch {torch.__version__} has no {', '.join(gone)}, which amanda-torch "
                f"{amanda.__version__} needs; install a release of amanda-torch for it"
            )
        super().attach()

    def ad_isolated(self) -> AbstractContextManager[Any]:
        """``torch.no_grad()``."""
        return torch.no_grad()

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a ``torch.Tensor``."""
        return isinstance(value, torch.Tensor)
