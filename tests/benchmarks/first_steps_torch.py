"""Programs of PyTorch of which the first step is measured (first_steps.py)."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.benchmarks.timing import Step


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
