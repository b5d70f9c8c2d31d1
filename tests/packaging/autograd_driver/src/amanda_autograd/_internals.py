"""The private symbols of autograd that the driver needs, seen in autograd 1.9.1."""

from __future__ import annotations

import types
from typing import Any

import autograd.numpy as anp
from autograd.extend import Box, VJPNode

PRIMITIVE: types.CodeType = anp.add.__code__
"""The code that all operators share: they are closures of one function."""


def node_in(box: Box, trace: int) -> Any:
    """The node of a box; None if it belongs to another trace than `trace`."""
    return box._node if box._trace == trace else None


def is_outermost(box: Box) -> bool:
    """Whether a backward pass alone differentiates it: no forward mode, no outer pass."""
    return isinstance(box._node, VJPNode) and not isinstance(box._value, Box)
