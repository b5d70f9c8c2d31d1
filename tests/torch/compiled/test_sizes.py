"""Compiled functions of tensors whose sizes change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amanda.errors import CoverageWarning
from tests.torch.compiled.support import (
    Counting,
    Elements,
    Net,
    Program,
    Shapes,
    shifting,
    vanilla,
    watched,
)


def _sizes(backend: Any) -> Any:
    model = Net().eval()
    run = torch.compile(model, backend=backend, dynamic=None) if backend else model
    return [run(torch.ones(n, 4) * n) for n in (2, 3, 5, 7, 3)]


def _reshaped(backend: Any) -> Any:
    """Sizes that are computed, and one that is passed."""

    def both(x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.cat([x, x[: n // 2]]).reshape(-1, 2)
        return torch.relu(y @ y.transpose(0, 1)).sum(0)[None].expand(n + 1, -1) * 2

    run = torch.compile(both, backend=backend, dynamic=True) if backend else both
    return [run(torch.ones(n, 4) * n, n) for n in (4, 6, 10, 6)]


@pytest.mark.parametrize("program", [_sizes, _reshaped], ids=["sizes", "reshaped"])
def test_sizes_that_change(program: Program) -> None:
    """A graph of symbolic sizes runs by its compiler where counters, sums and deferrable routines
    are on it, and these add and see what they do operator by operator."""
    with torch.no_grad():
        wanted = vanilla(program, shifting)
        tool, elements, shapes = Counting(), Elements(), Shapes()
        found, ways = watched(program, shifting, tool, elements, shapes)
        assert found == wanted
    assert all(way.startswith("by ") for way in ways)
    assert ways
    counting, adding, noting = Counting(), Elements(), Shapes()
    with torch.no_grad():
        watched(program, None, counting, adding, noting)
    executed = {op_id: n for op_id, n in tool.counts().items() if n}
    assert executed == counting.counts()
    amounts = {op_id: (one.amount, one.executions) for op_id, one in elements.sums.items()}
    assert amounts == {op_id: (one.amount, one.executions) for op_id, one in adding.sums.items()}
    assert shapes.seen == noting.seen


def test_sizes_that_change_in_training() -> None:
    """Sums over gradients of symbolic sizes keep a graph operator by operator; counters do not."""

    def program(backend: Any) -> Any:
        model = Net().eval()
        run = torch.compile(model, backend=backend, dynamic=True) if backend else model
        found = [run(torch.ones(n, 4) * n).sum() for n in (2, 3, 5, 7, 3)]
        for loss in found:
            loss.backward()
        return [*found, *(p.grad for p in model.parameters())]

    wanted = vanilla(program, shifting)
    found, ways = watched(program, shifting, Counting())
    assert found == wanted
    assert all(way.startswith("by ") for way in ways)
    with pytest.warns(CoverageWarning, match="sizes that do not follow from those of the graph"):
        found, ways = watched(program, shifting, Shapes())
    assert found == vanilla(program, None)
    assert ways == ["operator by operator"]


def test_a_size_that_only_the_graph_knows() -> None:
    """Where a routine gets a tensor whose size depends on values, the graph runs operator by
    operator, and the routine sees the sizes that there are."""

    def program(backend: Any) -> Any:
        run = torch.compile(lambda x: torch.relu(x[x > 2]) * 2, backend=backend, fullgraph=True)
        return [run(torch.arange(float(n))) for n in (4, 6, 5)]

    shapes, eager = Shapes(), Shapes()
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(  # noqa: SLF001 - captures such sizes
            capture_dynamic_output_shape_ops=True
        ),
    ):
        with pytest.warns(CoverageWarning, match="sizes that do not follow"):
            watched(program, "aot_eager", shapes)
        watched(program, "eager", eager)
    assert shapes.seen == eager.seen
