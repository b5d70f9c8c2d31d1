"""The networks of the accuracy benchmark in PyTorch, and how they are trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.benchmarks.digits import digits


class ResidualBlock(nn.Module):
    """Two normalized convolutions, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(inner)))


class ResidualNet(nn.Module):
    """A stem, two residual blocks, and a classifier."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[ResidualBlock(channels) for _ in range(2)])
        self.head = nn.Linear(channels * 16, 10)

    def forward(self, x: Any) -> Any:
        x = self.blocks(F.relu(self.stem(x[:, None])))
        return self.head(F.max_pool2d(x, 2).flatten(1))


class Layer(nn.Module):
    """Attention and a feed-forward net, with the norms before them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.mixed(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.other_norm(x))))


class Transformer(nn.Module):
    """A classifier whose tokens are the rows of an image."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(8, width) / 8)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(self.embedding(x) + self.places).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual net": ResidualNet,
    "transformer": Transformer,
}


class Network:
    """A network with its training and its test.

    Args:
        name: of the model.
        model: a trained one; None for a new one.
    """

    framework = "PyTorch"

    def __init__(self, name: str, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = MODELS[name]() if model is None else model

    def copy(self) -> Network:
        """Another one with the same weights."""
        return Network(self.name, copy.deepcopy(self.model))

    def warm_up(self) -> None:
        """Run once without training, so that a tool calibrates and creates its parameters."""
        self.model.eval()
        with torch.no_grad():
            self.model(torch.tensor(digits().train[:256]))

    def train(self, epochs: int, rate: float, more: Callable[[], Iterable[Any]] = list) -> None:
        """Train with Adam.

        Args:
            epochs: over all training images.
            rate: the learning rate.
            more: returns parameters to train beside the model's, such as a tool's.
        """
        optimizer = torch.optim.Adam([*self.model.parameters(), *more()], lr=rate)
        self.model.train()
        for epoch in range(epochs):
            for images, labels in digits().batches(epoch):
                optimizer.zero_grad()
                output = self.model(torch.tensor(images))
                F.cross_entropy(output, torch.tensor(labels)).backward()
                optimizer.step()

    def accuracy(self) -> float:
        """The share of the test images that are classified correctly."""
        self.model.eval()
        with torch.no_grad():
            found = self.model(torch.tensor(digits().test)).argmax(1).numpy()
        return float((found == digits().test_labels).mean())
