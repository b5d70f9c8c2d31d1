"""Gradients of gradients under tools that change nothing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import functional, grad
from torch.nn import functional as F  # noqa: N812

import amanda
from amanda.errors import CoverageWarning
from tests.torch.support import Counter, Identity, On, WholeIdentity, applied, same

TOOLS = (Identity, WholeIdentity)
BOTH = [combination for n in (1, 2) for combination in itertools.combinations(TOOLS, n)]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def hessian_vector_product() -> Sequence[Any]:
    net, x = _net(), torch.rand(5, 4)
    weights = list(net.parameters())
    gradients = grad(net(x).pow(2).mean(), weights, create_graph=True)
    products = [(g * torch.rand_like(g)).sum() for g in gradients]
    return grad(sum(products[1:], products[0]), weights)


def gradient_penalty() -> Sequence[Any]:
    """Of a critic with convolutions, one of them without a batch."""
    torch.manual_seed(1)
    conv, layer = nn.Conv1d(2, 3, 3, padding="valid"), nn.Linear(3, 1)
    x = torch.rand(4, 2, 6, requires_grad=True)
    score = layer(torch.tanh(conv(x)).transpose(1, 2)).sum() + conv(torch.sin(x[0])).tanh().sum()
    (gradient,) = grad(score, x, create_graph=True)
    ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean().backward()
    return [p.grad for p in (*conv.parameters(), layer.weight, x)]


def meta_learning() -> Sequence[Any]:
    torch.manual_seed(2)
    first = weight = torch.rand(4, 4, requires_grad=True)
    bias, x = torch.rand(4, requires_grad=True), torch.rand(3, 4)
    for _ in range(3):
        loss = F.linear(torch.tanh(F.linear(x, weight, bias)), weight).square().mean()
        weight = weight - 0.1 * grad(loss, weight, create_graph=True)[0]
    return grad(F.linear(x, weight, bias).tanh().sum(), (first, bias))


def forces() -> Sequence[Any]:
    """Forces are gradients of an energy by positions, and are fitted."""
    net, positions = _net(), torch.rand(6, 4, requires_grad=True)
    energy = net(torch.sin(positions @ positions.T @ positions)).sum()
    (force,) = grad(-energy, positions, create_graph=True)
    (force.square().mean() + energy).backward()
    return [p.grad for p in (*net.parameters(), positions) if p.grad is not None]


def of_functions() -> Sequence[Any]:
    net, x, v = _net(), torch.rand(4), torch.rand(4)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return (net(x.sin()) * net(x.tanh())).sum()

    one = functional.hvp(energy, x, v)[1], functional.vhp(energy, x, v)[1]
    return [*one, functional.hessian(energy, x)]


def attention() -> Sequence[Any]:
    torch.manual_seed(3)
    x = torch.rand(2, 3, 4, requires_grad=True)
    weight = torch.rand(4, 4, requires_grad=True)
    states = torch.tanh(x)
    attended = (states @ weight @ states.mT).softmax(-1) @ states
    (gradient,) = grad((attended * states).sum(), x, create_graph=True)
    return grad((gradient * torch.rand_like(gradient)).sum(), (x, weight))


PROGRAMS = [
    hessian_vector_product,
    gradient_penalty,
    meta_learning,
    forces,
    of_functions,
    attention,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("tools", BOTH, ids=lambda tools: "+".join(t.__name__ for t in tools))
def test_gradients_of_gradients_are_bit_identical(
    program: Callable[[], Sequence[Any]], tools: Sequence[Callable[[], amanda.Tool]]
) -> None:
    """Routines at whole operators and at their nodes, alone or together, leave the order in which
    autograd adds the parts of a gradient of a gradient."""
    expected = program()
    with warnings.catch_warnings(), applied(*(tool() for tool in tools)):
        # Operators on 4-d tensors, softmax: not known to have one node, and no sum here is of them.
        warnings.simplefilter("ignore", CoverageWarning)
        found = program()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_kernels_written_in_python_are_no_operators() -> None:
    """PyTorch adds the zero gradient of a sign by a kernel in Python: the program has called none
    of that kernel's operators."""
    x, counter = torch.tensor([-1.0, 2.0], requires_grad=True), Counter()
    with applied(counter):
        (gradient,) = grad((x.abs() ** 2).sum(), x, create_graph=True)
        gradient.sum().backward()
    assert sorted(counter.ops) == ["abs", "ones_like", "pow", "sum"]


def test_sums_in_another_order_are_reported() -> None:
    """Where an operator's input gradients leave it through several nodes, gradients of gradients
    under routines on them may be summed in another order: a warning names the first operator."""
    layer, x = nn.Bilinear(3, 3, 2), torch.rand(4, 3, requires_grad=True)
    with applied(On(bilinear=lambda c: c.insert_after_backward_op(same))):
        layer(x, x).sum().backward()
        with pytest.warns(CoverageWarning, match="last bits .* first at op Bilinear/bilinear:0"):
            grad(layer(x, x).sum(), x, create_graph=True)


@pytest.mark.parametrize("whole", [False, True])
def test_names_of_gradients_do_not_depend_on_other_tools(whole: bool) -> None:
    """A node's outputs have the names of the inputs whose gradients they are, also where routines
    are on the gradients of the whole operator."""
    names: dict[str, Sequence[str]] = {}

    def look(context: amanda.OpContext) -> None:
        names[context.get_backward_op().__name__] = context.get_grad_input_names()

    tool = amanda.Tool()
    tool.add_inst_for_op(look, backward=True)
    with applied(*[WholeIdentity()][: int(whole)], tool):
        F.bilinear(*(torch.rand(4, 3, requires_grad=True) for _ in range(2)), torch.rand(2, 3, 3))
        nn.Linear(3, 2)(torch.rand(4, 3, requires_grad=True)).sum().backward()
    assert names["AddmmBackward0"] == ["bias", "input", ""]
    assert names["TBackward0"] == ["weight"]
