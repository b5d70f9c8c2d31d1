"""The fast path: amanda-tensorflow lets operators run without Python. It imports no TensorFlow."""

from __future__ import annotations

import importlib
from types import ModuleType

VERSION = 3
"""Of what the extension offers amanda-tensorflow; the two have to agree."""


def load() -> ModuleType:
    """The C extension.

    Raises:
        ImportError: it was not built, or for another Python.
    """
    return importlib.import_module("amanda_tensorflow_accel.fast_path")
