"""Activation checkpointing: the recomputation is the same operators again."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import amanda
from tests.torch.support import (
    TRANSPARENT,
    Counter,
    ForwardCounter,
    On,
    applied,
    before,
    fingerprint,
)

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["not", "reentrant"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.two(torch.tanh(self.one(x))), 0.3, True)


class Net(nn.Module):
    """Two blocks, recomputed in the backward pass or not; bound before any scope."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Function(Net):
    """Checkpoints a function with operators of its own, outside of any inner module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.blocks[0](torch.cos(x))) * torch.sin(x)

        if self.reentrant is None:
            return torch.sin(run(x))
        return torch.sin(checkpoint(run, x, use_reentrant=self.reentrant))


def _trained(cls: type[Net], reentrant: bool | None, *tools: amanda.Tool) -> list[Any]:
    torch.manual_seed(0)
    model, x = cls(reentrant), torch.rand(3, 4, requires_grad=True)
    torch.manual_seed(1)
    with applied(*tools) if tools else contextlib.nullcontext():
        model(x).sum().backward()
    return fingerprint([x.grad, *(p.grad for p in model.parameters())])


def _masking() -> amanda.Tool:
    """Zeroes a part of each weight: a part that depends on the operator's id."""

    def act(context: amanda.OpContext) -> None:
        seed = sum(context.get_op_id().encode())

        def mask(weight: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            return weight * (torch.rand(weight.shape, generator=generator) > 0.5)

        context.insert_before_op(mask, [1])

    return On(linear=act)


@REENTRANT
@pytest.mark.parametrize("cls", [Net, Function])
def test_ids_of_the_recomputation_are_those_of_the_forward_pass(
    cls: type[Net], reentrant: bool
) -> None:
    """Each operator of a checkpointed region runs twice under one id, the others once."""
    plain, counter = ForwardCounter(), ForwardCounter()
    _trained(cls, None, plain)
    _trained(cls, reentrant, counter)
    runs = collections.Counter(counter.ids)
    # A reentrant checkpoint itself detaches its inputs, in the backward pass.
    assert {i for i in runs if "detach" not in i} == set(plain.ids)
    inside = {i for i in runs if "blocks" in i or i in ("Function/cos:0", "Function/mul:0")}
    if cls is Function:
        inside |= {"Function/sin:0", "Function/sin:1"}
    again = {i: n for i, n in runs.items() if i in inside}
    # A recomputation that is not reentrant stops where nothing more is needed.
    assert all(count <= 2 for count in again.values())
    assert sum(count == 2 for count in again.values()) >= len(again) - 2
    assert all(runs[i] == 1 for i in set(plain.ids) - inside)


@REENTRANT
@pytest.mark.parametrize("cls", [Net, Function])
def test_masked_weights_give_the_gradients_of_no_checkpoint(
    cls: type[Net], reentrant: bool
) -> None:
    """An action acts on the recomputation as on the forward pass: gradients are right."""
    wanted = _trained(cls, None, _masking())
    assert _trained(cls, reentrant, _masking()) == wanted
    assert _trained(cls, reentrant) != wanted


@REENTRANT
@pytest.mark.parametrize("make", TRANSPARENT)
@pytest.mark.parametrize("cls", [Net, Function])
def test_checkpointing_stays_bit_identical(
    cls: type[Net], make: Callable[[], amanda.Tool], reentrant: bool
) -> None:
    """Tools that change nothing leave the gradients of a checkpointed model as they are."""
    assert _trained(cls, reentrant, make()) == _trained(cls, reentrant)


@REENTRANT
def test_second_iteration_meets_no_new_operator(reentrant: bool) -> None:
    """Iterations of a checkpointed model have the same ids."""
    counter = ForwardCounter()
    model, x = Net(reentrant), torch.rand(3, 4, requires_grad=True)
    with applied(counter):
        steps = []
        for _ in range(3):
            counter.ids.clear()
            model(x).sum().backward()
            steps.append(list(counter.ids))
    assert steps[0] == steps[1] == steps[2]


@REENTRANT
def test_backward_operators_of_a_recomputation(reentrant: bool) -> None:
    """The nodes of recomputed operators are backward operators of those, once each."""
    plain, counter = Counter(), Counter()
    _trained(Net, None, plain)
    _trained(Net, reentrant, counter)
    wanted = {i for i in plain.backward_ids if "AccumulateGrad" in i or "Addmm" in i}
    if reentrant:
        # A reentrant checkpoint accumulates the gradient of its detached input.
        wanted.add("Net.blocks.1.one/linear:0/grad/AccumulateGrad:2")
    found = collections.Counter(
        i for i in counter.backward_ids if "AccumulateGrad" in i or "Addmm" in i
    )
    assert set(found) >= {i for i in wanted if "AccumulateGrad" in i}
    assert set(found) <= wanted
    assert all(count == 1 for count in found.values())


@REENTRANT
def test_checkpoint_of_a_bare_function(reentrant: bool) -> None:
    """Outside of all modules the recomputed operators have the ids of the forward pass too."""
    counter = ForwardCounter()
    x = torch.rand(3, requires_grad=True)
    with applied(counter):
        torch.sin(x).sum()
        checkpoint(lambda x: x.sin().cos().exp(), x, use_reentrant=reentrant).sum().backward()
    runs = collections.Counter(i for i in counter.ids if "detach" not in i)
    assert runs.pop("/ones_like:0") == 1
    again = {"/sin:1", "/cos:0"}
    assert set(runs) == again | {"/sin:0", "/exp:0", "/sum:0", "/sum:1"}
    assert all(runs[op_id] == 2 for op_id in again)
    assert runs["/sin:0"] == runs["/sum:0"] == runs["/sum:1"] == 1


def test_checkpoint_sequential() -> None:
    """Segments of a sequential model are recomputed under the ids of their first run."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    counter = ForwardCounter()
    with applied(counter):
        x = torch.rand(2, 4, requires_grad=True)
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    # It calls the children itself: they are outermost modules.
    runs = collections.Counter(i for i in counter.ids if "linear" in i)
    assert set(runs) == {f"Linear{n}/linear:0" for n in ("", "@1", "@2", "@3")}
    assert sorted(runs.values()) == [1, 1, 2, 2]


def test_nested_checkpoints() -> None:
    """A checkpoint inside a checkpoint gives the gradients of no checkpoint."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return layer(checkpoint(inner, x, use_reentrant=False))

    tools = [_masking(), _masking()]
    with applied(tools[0]):
        (wanted,) = torch.autograd.grad(layer(inner(x)).sum(), x)
    with applied(tools[1]):
        result = checkpoint(outer, x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, wanted)


@REENTRANT
def test_recomputation_after_the_scope_is_vanilla(reentrant: bool) -> None:
    """A backward pass after the scope recomputes without routines."""
    counter = ForwardCounter()
    x = torch.rand(3, requires_grad=True)
    with applied(counter):
        y = checkpoint(torch.sin, x, use_reentrant=reentrant).sum()
        seen = len(counter.ids)
    y.backward()
    assert len(counter.ids) == seen
    assert torch.equal(x.grad, x.detach().cos())


def test_failing_recomputation_leaves_nothing() -> None:
    """An exception in the backward pass leaves the next iteration's ids alone."""
    fail = [False]

    def run(x: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise ValueError("on purpose")
        return x.sin()

    counter = ForwardCounter()
    x = torch.rand(3, requires_grad=True)
    with applied(counter, On(sin=before(lambda x: None))):
        y = checkpoint(run, x, use_reentrant=False).sum()
        fail[0] = True
        with pytest.raises(ValueError, match="on purpose"):
            y.backward()
        counter.ids.clear()
        torch.sin(x).sum().backward()
    assert counter.ids == ["/sin:0", "/sum:0", "/ones_like:0"]
