"""Magnitude pruning with one threshold for all operators (``scope=global``)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from amanda_tools._values.shapes import Shape
from amanda_tools._values.tensors import Array, arithmetic_of
from amanda_tools.prune.rules import mask_smallest


class MaskedWeight(Protocol):
    """The part of a pruned weight that a threshold needs; see ``static.PrunedWeight``."""

    shape: Shape
    mask: Array | None

    @property
    def step(self) -> int:
        """Training steps so far."""

    def set(self, mask: Array, due: int | None) -> None:
        """Set the mask, and the step at which the next one is made."""


class GlobalThreshold:
    """Prunes the smallest weights of all operators together.

    Magnitudes are collected during one iteration; when the first operator runs a second time, all
    operators have been met, and masks hold from then on. An operator that is met later is compared
    with the threshold found.

    Attributes:
        step: training step at which the magnitudes were collected.
    """

    def __init__(self) -> None:
        self.step = 0
        self._met: set[str] = set()
        self._scores: dict[MaskedWeight, Array] = {}
        self._threshold: float | None = None

    def collect(self, op_id: str, weight: MaskedWeight, value: Any) -> bool:
        """Collect a weight; return whether all weights had been collected before."""
        if op_id in self._met:
            return True
        if weight.mask is None and self._threshold is not None:
            scores = np.abs(arithmetic_of(value).wide_numpy(value))
            weight.set(scores > self._threshold, None)
            return False
        self._met.add(op_id)
        if weight not in self._scores:
            self._scores[weight] = np.abs(arithmetic_of(value).wide_numpy(value))
            self.step = weight.step
        return False

    def masks(self, sparsity: float) -> list[tuple[MaskedWeight, Array]]:
        """Return the masks of the collected weights, and forget their magnitudes."""
        scores = list(self._scores.items())
        flat = np.concatenate([part.ravel() for _, part in scores])
        mask = mask_smallest(flat, round(sparsity * flat.size))
        self._threshold = float(flat[~mask].max(initial=0.0))
        self._met.clear()
        self._scores.clear()
        parts = np.split(mask, np.cumsum([part.size for _, part in scores])[:-1])
        return [
            (weight, part.reshape(weight.shape))
            for (weight, _), part in zip(scores, parts, strict=True)
        ]
