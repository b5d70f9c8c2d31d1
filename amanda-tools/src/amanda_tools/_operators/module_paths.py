"""Paths of modules: PyTorch's ``layer1.0.conv1`` and Keras' ``resnet/conv1``."""

from __future__ import annotations

import re

_SEPARATOR = re.compile(r"([./])")


def depth_of(module: str) -> int:
    """Return the number of names in a path; 0 for the outermost module."""
    return len(_SEPARATOR.split(module)) // 2 + 1 if module else 0


def prefix_of(module: str, depth: int) -> str:
    """Return the first `depth` names of a path."""
    return "".join(_SEPARATOR.split(module)[: max(2 * depth - 1, 0)])
