"""The part of amanda-torch in C++: hot records, operators, and backward operators."""

from __future__ import annotations

import importlib
from types import ModuleType

VERSION = 21
"""Of what :mod:`amanda_torch_accel.gate` offers amanda-torch; the two have to agree."""


def load() -> ModuleType:
    """The extension module.

    Raises:
        ImportError: it was not built, or for another version of Python or PyTorch.
    """
    import torch

    try:
        from amanda_torch_accel.built_for import TORCH
    except ImportError:
        raise ImportError(
            "it was not built, as without a compiler: install it with "
            "AMANDA_TORCH_ACCEL_BUILD=require to see the compiler's errors"
        ) from None
    found = minor_version(torch.__version__)
    if found != TORCH:
        raise ImportError(f"it was built for PyTorch {TORCH}, and this is {found}: install it anew")
    return importlib.import_module("amanda_torch_accel.gate")


def minor_version(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])
