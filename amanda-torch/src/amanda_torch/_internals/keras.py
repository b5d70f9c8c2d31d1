"""Keras on PyTorch."""

from __future__ import annotations

import sys
import types

KERAS_INFERENCE = "compute_output_spec"
"""The function of Keras' backend that runs layers to learn the shapes of their results."""


def keras_backend() -> types.ModuleType | None:
    """The module by which Keras calls its backend; None where it is not imported."""
    return sys.modules.get("keras.src.backend")
