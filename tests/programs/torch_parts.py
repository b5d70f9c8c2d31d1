"""What the programs of PyTorch share: data, a loop of training, and what is compared after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tests.torchvision_ops  # noqa: F401 - before whatever imports torchvision


def tokens(batch: int, length: int, vocabulary: int = 100) -> torch.Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, vocabulary, (batch, length))


def digits(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: images of shape (count, 1, 8, 8), and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = torch.tensor(images[:count] / 16, dtype=torch.float32)
    return scaled.reshape(-1, 1, 8, 8), torch.tensor(labels[:count])


def trained(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    steps: int = 3,
    clip: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Train for some steps, with AdamW unless told; losses, gradients, weights, buffers, state."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(wanted, lr=1e-2)
    model.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(wanted, clip)
        optimizer.step()
        losses.append(value.detach().clone())
    return losses, grown(model), list(optimizer.state_dict()["state"].values())


def grown(model: nn.Module) -> dict[str, Any]:
    """The gradients, weights and buffers that a model has now."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"gradients": gradients, "weights": dict(model.state_dict())}
