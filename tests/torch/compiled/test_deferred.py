"""Routines that are called when compiled code has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import InPlaceWarning
from amanda.state import STATE, TOOL_LOCK
from tests.torch.compiled.support import Counting, X
from tests.torch.support import applied


class Chain(nn.Module):
    """So many operators in as many modules, with tensors of one shape."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Tanh() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class Returning(amanda.Tool):
    """A deferrable routine at each operator, one of which breaks its promise."""

    def __init__(self, broken: Callable[..., Any]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.is_broken = False
        self.broken = broken
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.note, op_id=context.get_op_id())

    @amanda.deferrable
    def note(self, tensor: Any, op_id: str) -> Any:
        self.seen.append(op_id)
        return self.broken(tensor) if self.is_broken and op_id.endswith(".2/tanh:0") else None


def _raise(_: Any) -> None:
    raise ValueError("broken")


def _write(tensor: Any) -> None:
    tensor.zero_()


def test_a_deferrable_routine_that_raises_ends_the_run_and_leaves_nothing() -> None:
    """An error of a routine that is called when the code has run names it, those after it are not
    called, and neither the lock of tools nor the thread's state is left changed."""
    tool = Returning(_raise)
    compiled = torch.compile(Chain(4), backend="aot_eager")
    x = X.clone().requires_grad_()
    with applied(tool):
        for _ in range(3):
            compiled(x)
        known = [*dict.fromkeys(tool.seen)]
        tool.seen.clear()
        tool.is_broken = True
        with pytest.raises(ValueError, match="broken") as caught:
            compiled(x)
        assert any("Returning.note" in text for text in caught.value.__notes__)
        assert tool.seen == known[:3]
        assert torch.is_grad_enabled()
        assert not STATE.paused
        assert not TOOL_LOCK.is_owned()
        tool.is_broken = False
        tool.seen.clear()
        compiled(x).sum().backward()
        assert tool.seen[:4] == known


def test_a_deferrable_routine_that_writes_is_warned_of() -> None:
    """A tensor that a deferrable routine writes into is one without values, and a warning names the
    routine each time; the others are called all the same."""
    tool = Returning(_write)
    compiled = torch.compile(Chain(4), backend="aot_eager")
    with torch.no_grad(), applied(tool):
        for _ in range(3):
            wanted = compiled(X)
        tool.is_broken = True
        for _ in range(2):
            tool.seen.clear()
            with pytest.warns(InPlaceWarning, match="Returning.note.*layers.2/tanh"):
                found = compiled(X)
            assert len(tool.seen) == 4
    assert torch.equal(found, wanted)


def test_the_eager_compiler_has_graphs_without_gradients_as_they_are() -> None:
    """Deferrable routines and counters follow each run after the first, once per operator; where
    gradients are recorded they run at the operators, with values."""
    devices: list[str] = []

    @amanda.deferrable
    def note(y: torch.Tensor) -> None:
        devices.append(y.device.type)

    tool = Counting()
    tool.add_inst_for_op(lambda context: context.insert_after_op(note))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        expected = model(X)
    compiled = torch.compile(model, backend="eager")
    with applied(tool):
        with torch.no_grad():
            results = [compiled(X) for _ in range(3)]
        assert devices == ["cpu"] * 2 + ["meta"] * 4
        assert {counter.count for counter in tool.counters.values()} == {3}
        devices.clear()
        for _ in range(3):
            compiled(X).sum().backward()
        assert "meta" not in devices
    assert all(torch.equal(result, expected) for result in results)


def test_a_first_run_that_is_undone_leaves_the_sign_of_zeros() -> None:
    """What the first run has written into a buffer is put back bit by bit, also ``-0.0``."""

    def negate(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.mul_(-1.0) + 1.0

    buffer = torch.zeros(2)
    compiled = torch.compile(negate, backend="aot_eager")
    with torch.no_grad(), applied(Counting()):
        compiled(buffer)
    assert torch.signbit(buffer).all()
