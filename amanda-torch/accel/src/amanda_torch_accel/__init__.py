"""The gate: amanda-torch notices operators without Python. It imports no torch."""

from __future__ import annotations

import importlib
from types import ModuleType

VERSION = 17
"""Of what :mod:`amanda_torch_accel.gate` offers amanda-torch; the two have to agree."""


def load() -> ModuleType:
    """The C extension.

    Raises:
        ImportError: it was not built, or for another Python.
    """
    return importlib.import_module("amanda_torch_accel.gate")
