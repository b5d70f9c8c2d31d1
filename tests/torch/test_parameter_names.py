"""``context.get_parameter_name()``: the paths of parameters, as the program knows them."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from tests.torch.support import applied


@pytest.fixture(params=["mode", "gate"], autouse=True)
def interceptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to notice operators."""
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", request.param)


class Names(amanda.Tool):
    """Asks for the names of all inputs, and of the gradients that backward operators produce.

    Attributes:
        forward, backward: by operator id; those without a name are left out.
        models: by operator id the models that hold the parameters; None for other inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward: dict[str, list[str]] = {}
        self.models: dict[str, list[str | None]] = {}
        self.backward: dict[str, list[str]] = {}
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    def _analyse(self, context: amanda.OpContext) -> None:
        found = (context.get_parameter_name(i) for i in range(len(context.get_inputs())))
        self.forward[context.get_op_id()] = [name for name in found if name]
        count = len(context.get_inputs())
        self.models[context.get_op_id()] = [context.get_parameter_model(i) for i in range(count)]

    def _analyse_backward(self, context: amanda.OpContext) -> None:
        count = max(1, len(context.get_grad_input_names()))
        found = (context.get_parameter_name(i) for i in range(count))
        key = str(context.get_backward_op_id())
        self.backward[key] = [name for name in found if name]
        self.models[key] = [context.get_parameter_model(i) for i in range(count)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x)) @ self.scale.t()


def seen(model: nn.Module, *, backward: bool = True) -> Names:
    tool = Names()
    with applied(tool):
        y = model(torch.rand(3, 4))
        if backward:
            y.sum().backward()
    return tool


def test_a_parameter_has_its_name_in_the_root_module() -> None:
    """Inputs have the names of named_parameters(), a transposed view that of its parameter, data
    and buffers none."""
    model = nn.Sequential(Block())
    names = seen(model).forward
    assert names["Sequential.0.fc/linear:0"] == ["0.fc.weight", "0.fc.bias"]
    assert names["Sequential.0.norm/batch_norm:0"] == ["0.norm.weight", "0.norm.bias"]
    assert names["Sequential.0/t:0"] == names["Sequential.0/matmul:0"] == ["0.scale"]
    assert names["/sum:0"] == []
    assert {n for of in names.values() for n in of} == dict(model.named_parameters()).keys()


def test_a_gradient_has_the_name_of_its_parameter() -> None:
    """It is where a backward operator gives the gradient of the parameter itself, and where it is
    accumulated."""
    found = {key: names for key, names in seen(nn.Sequential(Block())).backward.items() if names}
    fc, norm = "Sequential.0.fc/linear:0/grad", "Sequential.0.norm/batch_norm:0/grad"
    assert found == {
        f"{fc}/AddmmBackward0:0": ["0.fc.bias"],
        f"{fc}/TBackward0:0": ["0.fc.weight"],
        f"{fc}/AccumulateGrad:0": ["0.fc.bias"],
        f"{fc}/AccumulateGrad:1": ["0.fc.weight"],
        f"{norm}/NativeBatchNormBackward0:0": ["0.norm.weight", "0.norm.bias"],
        f"{norm}/AccumulateGrad:0": ["0.norm.weight"],
        f"{norm}/AccumulateGrad:1": ["0.norm.bias"],
        "Sequential.0/t:0/grad/TBackward0:0": ["0.scale"],
        "Sequential.0/t:0/grad/AccumulateGrad:0": ["0.scale"],
    }


def test_tied_parameters_have_the_first_name() -> None:
    """That of named_parameters()."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    names = seen(model)
    assert set(map(tuple, names.forward.values())) == {("0.weight",), ()}
    assert {n for of in names.backward.values() for n in of} == {"0.weight"}


@pytest.mark.parametrize("requires_grad", [True, False])
def test_swapped_parameters_have_the_names_that_they_stand_for(requires_grad: bool) -> None:
    """``torch.func.functional_call`` and transforms of functions."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, tool = torch.rand(2, 4), Names()

    def loss(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    with applied(tool):
        if requires_grad:
            parameters = {name: p.requires_grad_() for name, p in own.items()}
            torch.autograd.grad(loss(parameters), list(parameters.values()))
        else:
            torch.func.grad(loss)(own)
    assert {n for of in tool.forward.values() for n in of} == set(own)
    assert {n for of in tool.backward.values() for n in of} == set(own)


def test_a_parameter_is_one_of_the_model_that_holds_it() -> None:
    """In operators within models and outside of them, and where its gradient is accumulated."""
    models, tool = [nn.Linear(4, 4, bias=False) for _ in range(2)], Names()
    x = torch.rand(2, 4)
    with applied(tool):
        for model in models * 2:
            model(x)
        (x @ models[1].weight).sum().backward()
    assert tool.models["Linear/linear:0"] == [None, "Linear", None]
    assert tool.models["Linear@1/linear:0"] == [None, "Linear@1", None]
    assert tool.models["/matmul:0"] == [None, "Linear@1"]
    gradients = [found for key, found in tool.models.items() if "/AccumulateGrad" in key]
    assert gradients == [["Linear@1"]]


def test_a_parameter_of_no_module_has_no_name() -> None:
    """Nor has one that a module uses and does not hold."""
    free, tool = nn.Parameter(torch.ones(4, 4)), Names()

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ free

    with applied(tool):
        (Net()(torch.rand(2, 4)) @ free).sum().backward()
    assert not any((*tool.forward.values(), *tool.backward.values()))


def test_wrappers_and_compiled_modules_are_left_out() -> None:
    """The names are those of the wrapped model."""
    expected = [names for names in seen(nn.Sequential(Block())).forward.values() if names]
    for wrap in _wrappers():
        found = seen(wrap(nn.Sequential(Block())), backward=False).forward.values()
        assert [names for names in found if names] == expected


def _wrappers() -> Iterator[Any]:
    yield nn.DataParallel
    yield lambda model: torch.compile(model, backend="eager")


def test_a_renamed_parameter_has_its_new_name() -> None:
    """A model that is changed between two calls, and a part that runs alone."""
    part = nn.Linear(4, 4, bias=False)
    assert ["weight"] in seen(part).forward.values()
    model = nn.Sequential(collections.OrderedDict(body=part))
    assert ["body.weight"] in seen(model).forward.values()
    model.head = model.body
    del model.body
    assert ["head.weight"] in seen(model).forward.values()


def test_an_optimizer_writes_into_named_parameters() -> None:
    """Its operators run outside of modules."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer, tool = torch.optim.SGD(model.parameters(), 0.1, fused=True), Names()
    with applied(tool):
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
    assert tool.forward["/optimizer/_fused_sgd_:0"] == ["0.weight", "0.bias"]
