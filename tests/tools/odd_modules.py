"""Small models with parts that are hard for a summary: shared, repeated, nested, lazy, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.norm(self.layer(x)))


class Nested(nn.Module):
    """Containers within containers, called by themselves nowhere."""

    def __init__(self) -> None:
        super().__init__()
        chain = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.parts = nn.ModuleDict({"chain": chain, "ends": nn.ModuleDict({"a": nn.Linear(4, 2)})})

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.parts["chain"]:  # type: ignore[attr-defined]
            x = layer(x)
        return self.parts["ends"]["a"](x)  # type: ignore[index]


class Functional(nn.Module):
    """A parameter of its own, and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.rand(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.gelu(self.layer(x) @ self.weight)


class Recurrent(nn.Module):
    """A module with several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(x)[0])


class Attention(nn.Module):
    """Its projection is not a module that is called: its weight is read by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)[0]


class Frozen(nn.Module):
    """A weight that is not trained, beside a bias that is; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.first.weight.requires_grad_(False)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.first(x)) * self.scale


class Lazy(nn.Module):
    """A layer without a shape before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Inner(nn.Module):
    """Takes a tuple and a dictionary, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pair: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> Any:
        return self.layer(pair[0] + pair[1] + named["x"]), pair


class Structures(nn.Module):
    """Its part is given tensors in structures."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner((x, x), {"x": x})


class Parametrized(nn.Module):
    """A weight that a module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class Lists(nn.Module):
    """Parameters in containers of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(4, 4)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weights[0] @ self.weights[1]


class Unused(nn.Module):
    """A layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


class Shared(nn.Module):
    """One layer under three names, in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Sequential(self.a, nn.ReLU())

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.b(self.a(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embedding(x))


class Named(nn.Module):
    """Returns a dictionary of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return {"first": self.first(x), "second": (self.second(x), None)}


ROWS, WORDS, TOKENS = torch.ones(3, 4), torch.ones(2, 5, 8), torch.arange(6).reshape(2, 3)

AGREED: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "called twice": (Twice, ROWS),
    "nested containers": (Nested, ROWS),
    "functions": (Functional, ROWS),
    "LSTM": (Recurrent, WORDS),
    "attention": (Attention, WORDS),
    "frozen parameters and buffers": (Frozen, ROWS),
    "lazy": (Lazy, ROWS),
    "structures": (Structures, ROWS),
    "parametrized": (Parametrized, ROWS),
    "lists of parameters": (Lists, ROWS),
    "unused": (Unused, ROWS),
}
"""Models of which torchinfo tells the same, modules aside that are not called."""
