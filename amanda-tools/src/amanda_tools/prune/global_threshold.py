"""Magnitude pruning over all operators together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amanda_tools._values.arithmetic import arithmetic_of
from amanda_tools.prune.rules import Array, without_smallest

if TYPE_CHECKING:
    from amanda_tools.prune.static import PrunedWeight


class GlobalThreshold:
    """The smallest weights of all operators together.

    The magnitudes are collected in one iteration, and the masks hold from the
    next one: when the first operator runs a second time, all have been met. One
    that is met later is compared with the threshold that was found.

    Attributes:
        step: of the iteration in which they were collected.
    """

    def __init__(self) -> None:
        self.step = 0
        self._met: set[str] = set()
        self._scores: dict[PrunedWeight, Array] = {}
        self._threshold: float | None = None

    def collect(self, op_id: str, weight: PrunedWeight, value: Any) -> bool:
        """Take in a weight; whether all had been collected before."""
        if op_id in self._met:
            return True
        if weight.mask is None and self._threshold is not None:
            scores = np.abs(arithmetic_of(value).numpy(value))
            weight.set(scores > self._threshold, None)
            return False
        self._met.add(op_id)
        if weight not in self._scores:
            self._scores[weight] = np.abs(arithmetic_of(value).numpy(value))
            self.step = weight.step
        return False

    def masks(self, sparsity: float) -> list[tuple[PrunedWeight, Array]]:
        """The masks of the weights that were collected, which are forgotten."""
        scores = list(self._scores.items())
        flat = np.concatenate([part.ravel() for _, part in scores])
        mask = without_smallest(flat, round(sparsity * flat.size))
        self._threshold = float(flat[~mask].max(initial=0.0))
        self._met.clear()
        self._scores.clear()
        parts = np.split(mask, np.cumsum([part.size for _, part in scores])[:-1])
        return [
            (weight, part.reshape(weight.shape))
            for (weight, _), part in zip(scores, parts, strict=True)
        ]
