"""Four models whose forward passes have side effects, each called 3,200 times in inference.

Prints what each has computed and left, and whether the compiler was imported.
"""

from __future__ import annotations

import collections
import functools
import sys
from typing import Any

import torch
from torch import nn

CALLS = 3200


class Layers(nn.Module):
    """Eighteen small operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x * 0.5
        return x


class Window(Layers):
    """Keeps its last numbers, and computes with their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.window = collections.deque([0.0], maxlen=3)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        self.window.append(1.0)
        return super().forward(x, number) * sum(self.window)

    def left(self) -> Any:
        return list(self.window)


@functools.lru_cache
def scale(rows: int) -> float:
    """Made once for a number of rows, and kept."""
    Cached.made.append(rows)
    return float(len(Cached.made))


class Cached(Layers):
    """Computes with the result of a cached function."""

    made: list[int] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return super().forward(x, number) * scale(len(x))

    def left(self) -> Any:
        return self.made


class Token:
    """Counts how many were destroyed."""

    destroyed = 0

    def __del__(self) -> None:
        Token.destroyed += 1


class Destroys(Layers):
    """Makes an object in each call, which ends with it."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        token = Token()
        x = super().forward(x, number)
        del token
        return x

    def left(self) -> Any:
        return Token.destroyed


class Annealed(Layers):
    """Divides by an attribute that changes in each of the last calls."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = super().forward(x, number)
        if number < CALLS - 20:
            return x
        self.temperature *= 0.999
        return x / self.temperature

    def left(self) -> Any:
        return self.temperature


def main() -> None:
    torch.manual_seed(0)
    x = torch.ones(2, 4)
    for model in (Window(), Cached(), Destroys(), Annealed()):
        with torch.no_grad():
            sums = [float(model(x, number).sum()) for number in range(CALLS)]
        print(type(model).__name__, collections.Counter(sums), model.left())
    print("imported:", "torch._dynamo" in sys.modules)


main()
