"""``flops`` of solvers and decompositions: the same figures of both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from amanda_tools.flops import FlopsTool
from tests.running import applied

TALL = np.random.default_rng(0).random((2, 7, 4))
SQUARE = np.einsum("bij,bik->bjk", TALL, TALL) + np.eye(4)
RIGHT = TALL[:, :4, :3]

PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any], float]] = {
    "qr": (lambda: torch.linalg.qr(torch.tensor(TALL)), lambda: tf.linalg.qr(TALL), 725),
    "solve": (
        lambda: torch.linalg.solve(torch.tensor(SQUARE), torch.tensor(RIGHT)),
        lambda: tf.linalg.solve(SQUARE, RIGHT),
        2 * (2 * 64 / 3 + 2 * 16 * 3),
    ),
    "cholesky": (
        lambda: torch.linalg.cholesky(torch.tensor(SQUARE)),
        lambda: tf.linalg.cholesky(SQUARE),
        2 * 64 / 3,
    ),
    "lu": (
        lambda: torch.linalg.lu_factor(torch.tensor(SQUARE)),
        lambda: tf.linalg.lu(SQUARE),
        2 * 2 * 64 / 3,
    ),
    "inverse": (
        lambda: torch.linalg.inv(torch.tensor(SQUARE)),
        lambda: tf.linalg.inv(SQUARE),
        2 * 2 * 64,
    ),
    "determinant": (
        lambda: torch.linalg.det(torch.tensor(SQUARE)),
        lambda: tf.linalg.det(SQUARE),
        2 * 2 * 64 / 3,
    ),
    "least squares": (
        lambda: torch.linalg.lstsq(torch.tensor(TALL), torch.tensor(TALL[..., :1])),
        lambda: tf.linalg.lstsq(TALL, TALL[..., :1], fast=False),
        2 * (2 * 16 * (7 - 4 / 3) + 4 * 7 * 4 - 2 * 16 + 16),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_decompositions_cost_the_same_on_both_frameworks(name: str) -> None:
    """The published count, of each matrix of the batch."""
    *programs, expected = PAIRS[name]
    for run in programs:
        tool = applied(FlopsTool(), run)
        result = tool.result()
        # Half of it is rounded, for each matrix.
        assert result["summary"]["flops"] == pytest.approx(expected, abs=2), result
        assert not result["summary"]["unknown_ops"]
