"""The data of the accuracy benchmark: scikit-learn's handwritten digits, 8 x 8 pixels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class Digits:
    """Images, float32 in [0, 1] of shape (n, 8, 8), and labels; the same split in every run."""

    train: Array
    train_labels: Array
    test: Array
    test_labels: Array

    def batches(self, seed: int, size: int = 128) -> Iterator[tuple[Array, Array]]:
        """Iterate over one epoch in a random order; an incomplete last batch is left out."""
        order = np.random.default_rng(seed).permutation(len(self.train))
        for start in range(0, len(order) - size + 1, size):
            part = order[start : start + size]
            yield self.train[part], self.train_labels[part]


@functools.cache
def digits() -> Digits:
    """Load the data: 1347 images to train with, 450 to test with."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    parts = train_test_split(images, labels.astype(np.int64), random_state=0, stratify=labels)
    train, test, train_labels, test_labels = parts
    return Digits(train, train_labels, test, test_labels)
