"""Accumulations of gradients behind a compiled backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from tests.torch.compiled.support import Counting, Net, X
from tests.torch.support import applied, fingerprint


def plain_step(step: int, run: Any, model: nn.Module) -> None:
    run(X).square().sum().backward()


def decayed_step(step: int, run: Any, model: nn.Module) -> None:
    """The loss uses a parameter as well, in some steps before the model does."""
    first = next(model.parameters())
    decay = first.square().sum() if step % 3 == 1 else 0
    loss = run(X).square().sum()
    if step % 3 == 2:
        decay = first.square().sum()
    (loss + decay).backward()


def chosen_step(step: int, run: Any, model: nn.Module) -> None:
    """In some steps the pass is for chosen inputs, or runs twice over one graph."""
    loss = run(X).square().sum()
    first, *others = model.parameters()
    if step % 4 == 1:
        torch.autograd.grad(loss, [first])
    elif step % 4 == 2:
        loss.backward(retain_graph=True)
        loss.backward()
    elif step % 4 == 3:
        loss.backward(inputs=others)
    else:
        loss.backward()


def added_step(step: int, run: Any, model: nn.Module) -> None:
    """Two calls before one pass, and two passes without an end of the iteration between them."""
    if step % 2:
        (run(X).sum() + run(X + 1).square().sum()).backward()
    else:
        run(X).sum().backward()
        run(X + 1).sum().backward()


def muted_step(step: int, run: Any, model: nn.Module) -> None:
    """In some steps the backward pass, or the forward pass, runs without tools."""
    with amanda.disabled() if step % 4 == 1 else contextlib.nullcontext():
        loss = run(X).square().sum()
    with amanda.disabled() if step % 4 == 3 else contextlib.nullcontext():
        loss.backward()


def exchanged_step(step: int, run: Any, model: Any) -> None:
    """Parameters are replaced, frozen and used again."""
    if step == 6:
        model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    if step in (9, 11):
        model.last.weight.requires_grad_(step == 11)
    run(X).square().sum().backward()


def unused_step(step: int, run: Any, model: Any) -> None:
    """An output without parameters behind it, of which the gradient alone is wanted in a step."""
    x = X.clone().requires_grad_(step % 2 == 0)
    loss = run(x).sum() if step % 3 else run(x)[:1].sum() * 0
    loss.backward()


STEPS = [plain_step, decayed_step, chosen_step, added_step, muted_step, exchanged_step, unused_step]


def _counts_by_step(step: Callable[[int, Any, nn.Module], None], backend: str) -> Any:
    """Counts after each step, of accumulations alone where passes are for chosen inputs: a compiled
    backward pass runs as a whole."""
    torch.compiler.reset()
    tool, model = Counting(), Net().eval()
    run = torch.compile(model, backend=backend)
    counts, gradients = [], []
    with applied(tool):
        for number in range(14):
            model.zero_grad()
            step(number, run, model)
            every = {op_id: count for op_id, count in tool.counts().items() if count}
            if step is chosen_step:
                every = {op_id: n for op_id, n in every.items() if "AccumulateGrad" in op_id}
            counts.append(every)
            gradients.append([p.grad for p in model.parameters()])
    return counts, fingerprint(gradients)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_accumulations_are_counted_in_every_pass(step: Callable[..., None]) -> None:
    """Whoever else uses the parameters of a compiled function, and whichever passes come to it,
    each step counts what it counts operator by operator."""
    with torch._functorch.config.patch(donated_buffer=False):  # noqa: SLF001 - for two passes
        counts, gradients = _counts_by_step(step, "aot_eager")
    reference, wanted = _counts_by_step(step, "eager")
    assert gradients == wanted
    for number, (found, expected) in enumerate(zip(counts, reference, strict=True)):
        differing = {
            k: (found.get(k), expected.get(k))
            for k in found.keys() | expected.keys()
            if found.get(k) != expected.get(k)
        }
        assert not differing, number
