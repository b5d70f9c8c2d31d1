"""Which phases of operators belong to the model."""

from __future__ import annotations

MODEL = frozenset({"forward", "backward"})
"""The phases that belong to the model; the others build, feed, measure and change it."""
