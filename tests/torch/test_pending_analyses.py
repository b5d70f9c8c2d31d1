"""Forward passes that record gradients, and of which no backward pass comes: what follows them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_torch import _internals
from tests.counting import no_collection
from tests.torch.support import applied


class Tied(nn.Module):
    """An embedding that is used again at the end, views, several outputs and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.layer = nn.Linear(4, 4)
        self.bare = nn.Linear(4, 4, bias=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(numbers))
        x = self.layer(x).relu() + self.layer(x).view(-1, 4)
        first, second = self.bare(x).chunk(2, dim=-1)
        x = torch.cat([first * second, second.tanh()], dim=-1)
        return torch.nn.functional.linear(x, self.embedding.weight)


class Told(amanda.Tool):
    """What analyses of backward operators are told."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)
        self.add_inst_for_op(self.backward, backward=True, require_outputs=True)

    def forward(self, context: amanda.OpContext) -> None:
        pass

    def backward(self, context: amanda.OpContext) -> None:
        with torch.no_grad():
            self.log.append(
                (
                    context.get_op_id(),
                    context.get_backward_op_id(),
                    context.get_module(),
                    tuple(context.get_grad_input_names()),
                    *map(_read, (context.get_inputs(), context.get_outputs())),
                    *map(_read, (context.get_grad_outputs(), context.get_grad_inputs())),
                    _read(context.get_value(0)) if context.get_inputs() else None,
                )
            )


def _read(value: Any) -> Any:
    """Tensors as numbers: they are the program's, and may be gone later."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.detach().flatten().tolist()
    if isinstance(value, (list, tuple)):
        return [_read(one) for one in value]
    return type(value).__name__


NUMBERS = torch.tensor([0, 3, 1])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients of a model's parameters."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def told(model: nn.Module, before: int, passes: int = 1) -> tuple[list[Any], list[torch.Tensor]]:
    """What analyses are told in backward passes after some forward passes without one."""
    tool = Told()
    model.zero_grad()
    with applied(tool):
        for _ in range(before):
            model(NUMBERS)
        for _ in range(passes):
            model(NUMBERS).square().sum().backward()
    return tool.log, gradients(model)


def test_forward_passes_before_change_nothing_that_analyses_are_told(
    monkeypatch: pytest.MonkeyPatch, interceptor: str
) -> None:
    """An analysis gets the tensors of the execution that the first backward pass comes to."""
    torch.manual_seed(0)
    model = Tied()
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "mode")
    expected = told(model, 0)
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
    for before in (0, 1, 6):
        log, found = told(model, before)
        assert log == expected[0]
        assert all(map(torch.equal, found, expected[1]))
    log, _ = told(model, 6, passes=3)
    assert log == expected[0]


@pytest.mark.usefixtures("interceptor")
def test_analyses_follow_the_first_pass_that_comes() -> None:
    """A pass through one of many graphs, and through a part of it: the rest stays pending."""
    torch.manual_seed(0)
    model, tool = Tied(), Told()
    with applied(tool):
        kept = [model(NUMBERS) for _ in range(5)]
        bias = torch.autograd.grad(kept[2].sum(), [model.norm.bias], retain_graph=True)
        first = {entry[1] for entry in tool.log}
        assert not any("embedding" in name and "AccumulateGrad" in name for name in first)
        kept[3].sum().backward()
        named = {entry[1] for entry in tool.log}
        assert named > first
        assert any(name == "Tied.embedding/embedding:0/grad/AccumulateGrad:0" for name in named)
        count = len(tool.log)
        kept[1].sum().backward()
        kept[2].sum().backward()
        assert len(tool.log) == count
    assert torch.equal(bias[0], torch.autograd.grad(model(NUMBERS).sum(), [model.norm.bias])[0])


class Doubled(amanda.Tool):
    """A routine that doubles all gradients of parameters, inserted where a pass comes first."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if "AccumulateGrad" in str(context.get_backward_op_id()):
            context.insert_before_backward_op(lambda gradient: gradient * 2)


@pytest.mark.usefixtures("interceptor")
def test_routines_act_in_the_first_pass_after_others_without_one() -> None:
    """Also on a parameter that two operators use; and once, whichever graphs are alive."""
    torch.manual_seed(0)
    model = Tied()
    model(NUMBERS).square().sum().backward()
    expected = [2 * gradient for gradient in gradients(model)]
    for keeps in (False, True):
        with applied(Doubled()):
            earlier = [model(NUMBERS) for _ in range(5)]
            if not keeps:
                earlier.clear()
            for result in (None, None, None, *earlier):
                model.zero_grad()
                output = model(NUMBERS) if result is None else result
                output.square().sum().backward()
                assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.usefixtures("interceptor")
def test_nothing_is_kept_of_passes_without_a_backward_pass() -> None:
    """Graphs, their tensors and at last the model go within the scope, as soon as they are let go
    of: without the garbage collector, but for what PyTorch's compiler makes."""
    model = Tied()
    with applied(Told()):
        for _ in range(6):
            model(NUMBERS)
        with no_collection():
            x = torch.ones(3, 4, requires_grad=True)
            result = model.layer(x).tanh()
            gone = [weakref.ref(x), weakref.ref(result)]
            del x, result
            assert not any(one() for one in gone)
        owner = weakref.ref(model)
        del model
        gc.collect()
        assert owner() is None


def test_a_pass_in_which_an_analysis_raises_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of an analysis reaches the program from a graph that the gate has noted."""
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "gate")
    model, raised = Tied(), []

    class Raising(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            if "tanh" in context.get_op_id() and not raised:
                raised.append(context.get_backward_op_id())
                raise ValueError("once")

    with applied(Raising()):
        for _ in range(4):
            model(NUMBERS)
        with pytest.raises(ValueError, match="once"):
            model(NUMBERS).sum().backward()
        model(NUMBERS).sum().backward()
    assert len(raised) == 1
    assert _internals.is_plain()
