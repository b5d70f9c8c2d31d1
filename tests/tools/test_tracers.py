"""PyTorch's tracers record a model alone, whichever tool watches or changes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import explain
from torch.fx.experimental.proxy_tensor import make_fx

import amanda
from tests.tools.phase_support import make

TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "jit.trace": lambda model, x: torch.jit.trace(model, x).inlined_graph,
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model).graph,
    "make_fx": lambda model, x: make_fx(model)(x).graph,
    "export": lambda model, x: torch.export.export(model, (x,), strict=True).graph,
    "explain": lambda model, x: [graph.graph for graph in explain(model)(x).graphs],
}
"""Give a graph of the model."""


def recorded(model: nn.Module, x: torch.Tensor, way: str) -> str:
    """The graph of a model as text, without what differs from one recording to the next."""
    torch.compiler.reset()
    graph = TRACERS[way](model, x)
    return re.sub(r"___torch_mangle_\d+\.|0x[0-9a-f]+", "", str(graph))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:the model is saved without the changes")
@pytest.mark.parametrize("name", amanda.tools.available())
def test_tracers_record_the_model_alone_under_every_tool(name: str) -> None:
    """The graphs are those without a scope, also of a model that has run in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).eval()
    x = torch.randn(3, 4)
    vanilla = {way: recorded(model, x, way) for way in TRACERS}
    with amanda.apply(make(name)):
        model(x)
        under = {way: recorded(model, x, way) for way in TRACERS}
        model(x)
    assert under == vanilla
