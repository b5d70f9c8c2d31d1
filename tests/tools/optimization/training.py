"""A short training run that the tests of the optimization tools share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def trained(model: nn.Module, parameters: Any, x: Any, *, steps: int, lr: float) -> list[Any]:
    """The output of each step of SGD on the model's and further parameters."""
    optimizer = torch.optim.SGD([*model.parameters(), *parameters], lr=lr)
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        output.square().sum().backward()
        optimizer.step()
        outputs.append(output.detach().clone())
    return outputs
