"""What the tests of ``remat`` share: models, and what is alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda_tools.remat import RematTool


class Block(nn.Module):
    """A residual block, with an activation in place as everybody has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.other_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        found = self.relu(self.norm(self.first(x)))
        return F.relu(self.other_norm(self.second(found)) + x)


def mlp(depth: int = 12) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[Block(8) for _ in range(4)])


def normalized() -> nn.Module:
    parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *[module for part in parts for module in part])


class Transformer(nn.Module):
    """Attention written out, with views, tied weights and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout, "gelu", batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: torch.randn(64, 32)),
    "resnet": (resnet, lambda: torch.randn(4, 3, 12, 12)),
    "transformer": (Transformer, lambda: torch.randint(50, (4, 24))),
}


class Alive(TorchDispatchMode):
    """The memory of what was computed, independently of hooks: every storage, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(item, torch.Tensor):
                self._storages.append(weakref.ref(item.untyped_storage()))
        return result

    def bytes(self, but: Any) -> int:
        """What is alive of it, parameters aside."""
        known = {id(tensor.untyped_storage()) for tensor in but}
        found = {id(s): s for ref in self._storages if (s := ref()) is not None}
        return sum(s.nbytes() for key, s in found.items() if key not in known)


def step(model: Any, x: Any) -> tuple[Any, list[Any]]:
    """Output and gradients of a training step, without its update."""
    model.zero_grad()
    output = model(x)
    output.float().square().mean().backward()
    return output.detach(), [p.grad.clone() for p in model.parameters()]


def held(model: Any, x: Any) -> int:
    """Bytes that are alive after the forward pass for the backward pass, the loss aside."""
    with Alive() as alive:
        loss = model(x).float().square().mean()
    found = alive.bytes([*model.parameters(), *model.buffers(), loss, x])
    loss.backward()
    return found


def same(a: tuple[Any, list[Any]], b: tuple[Any, list[Any]]) -> bool:
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


@contextmanager
def rematerialized(model: Any, x: Any, **options: Any) -> Iterator[RematTool]:
    """After the iteration that is measured."""
    tool = amanda.tools.load("remat")(**options)
    with amanda.apply(tool):
        step(model, x)
        yield tool
