"""Programs of PyTorch of which the first step is measured (first_steps.py)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import nn

from tests.benchmarks.timing import Step


class _Deep(nn.Module):
    """A module that calls one module, to the given depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = _Deep(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if self.inner is None else self.inner(x)


def _forward(model: nn.Module) -> Step:
    torch.set_num_threads(1)
    x = torch.ones(2, 8)
    return lambda: model(x)


def pairs() -> Step:
    """800 linear layers, each with a relu."""
    return _forward(nn.Sequential(*[m for _ in range(800) for m in (nn.Linear(8, 8), nn.ReLU())]))


def children() -> Step:
    """4,000 modules of one."""
    return _forward(nn.Sequential(*[nn.ReLU() for _ in range(4_000)]))


def depth() -> Step:
    """800 modules, each in the one before."""
    sys.setrecursionlimit(20_000)
    return _forward(_Deep(800))


def densenet() -> Step:
    """A training step of densenet121 on one image of 64 pixels."""
    import tests.torchvision_ops  # noqa: F401 - timm needs it, and before it is imported

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = importlib.import_module("timm").create_model("densenet121")
    x = torch.rand(1, 3, 64, 64)

    def step() -> None:
        loss: Any = model(x).sum()
        loss.backward()

    return step


def cells_infer() -> Step:
    """A loop of 300 calls of an LSTMCell."""
    return _cells(training=False)


def cells_train() -> Step:
    """The same with gradients."""
    return _cells(training=True)


def _cells(*, training: bool) -> Step:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(32, 32), torch.rand(4, 32)

    def step() -> None:
        state: Any = (torch.zeros(4, 32), torch.zeros(4, 32))
        with torch.set_grad_enabled(training):
            for _ in range(300):
                state = cell(x, state)
            if training:
                state[0].sum().backward()

    return step
