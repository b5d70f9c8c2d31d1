"""Subgraph rewriting on PyTorch."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.subgraph_rewriting import Op, SubgraphRewritingTool
from tests import models


class Slow(torch.autograd.Function):
    """An operator that counts how often it is executed."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Slow.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


class Net(nn.Module):
    """Slow, plus one, relu."""

    def forward(self, x: Any) -> Any:
        return (Slow.apply(x) + 1).relu()


def test_the_first_iteration_is_traced_and_the_second_rewritten() -> None:
    """What was replaced runs no more; gradients are the replacement's."""
    net, x = Net(), torch.tensor([1.0, -3.0], requires_grad=True)
    tool = SubgraphRewritingTool(Op("relu", Op("add", Op("Slow", "x"))), lambda x: x * 10)
    Slow.calls = 0
    with amanda.apply(tool):
        assert net(x).tolist() == [3, 0]
        for _ in range(3):
            y = net(x)
            assert y.tolist() == [10, -30]
        y.sum().backward()
    assert Slow.calls == 1
    assert x.grad.tolist() == [10, 10]
    assert [match.ids for match in tool.matches] == [["Net/Slow:0", "Net/add:0", "Net/relu:0"]]
    assert net(x).tolist() == [3, 0]


def test_removing_is_the_first_tensor_from_outside() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    x = torch.rand(4, 3)
    tool = SubgraphRewritingTool(["dropout"])
    with amanda.apply(tool):
        net(x)
        y = net(x)
        y.sum().backward()
    gradient = net[0].weight.grad.clone()
    net.zero_grad()
    net.eval()
    assert torch.equal(net(x), y)
    net(x).sum().backward()
    assert torch.equal(net[0].weight.grad, gradient)


FOLDING = Op("batch_norm", Op("conv2d", "x", "weight", "bias"), "gamma", "beta", "mean", "variance")


def folded(
    x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, variance: Any, match: Any
) -> Any:
    """A convolution with the normalization in its weights."""
    factor = gamma / (variance + match.attributes("batch_norm")["eps"]) ** 0.5
    shift = beta - mean * factor if bias is None else beta + (bias - mean) * factor
    return match.run("conv2d", x, weight * factor[:, None, None, None], shift)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_convolution_and_batch_normalization_become_one(name: str) -> None:
    model, inputs = models.build(name, training=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 2)
    tool = SubgraphRewritingTool(FOLDING, folded)
    with torch.no_grad():
        expected = model(**inputs)
        with amanda.apply(tool):
            assert torch.equal(model(**inputs), expected)
            found = model(**inputs)
    assert len(tool.matches) == sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_attention_becomes_the_fused_operator() -> None:
    """BERT's own product, softmax and product, with the same gradients."""
    model, inputs = models.build("bert")
    model.set_attn_implementation("eager")
    model.eval()
    scores = Op("mul", Op("matmul", "q", "kt"), None)
    pattern = Op("matmul", Op("dropout", Op("softmax", scores)), "v")

    def fused(q: Any, kt: Any, v: Any, match: Any) -> Any:
        return F.scaled_dot_product_attention(q, kt.mT, v, scale=q.shape[-1] ** -0.5)

    tool = SubgraphRewritingTool(pattern, fused)
    twin = copy.deepcopy(model)
    with amanda.apply(tool):
        model(**inputs)
        output = model(**inputs)
        models.loss(output).backward()
    assert len(tool.matches) == 2, tool.rejected
    expected = twin(**inputs)
    models.loss(expected).backward()
    assert torch.allclose(output.logits, expected.logits, atol=1e-5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-5)


# -- patterns ---------------------------------------------------------------------


def matches(pattern: Any, run: Any) -> SubgraphRewritingTool:
    tool = SubgraphRewritingTool(pattern, lambda **tensors: next(iter(tensors.values())))
    with amanda.apply(tool):
        for _ in range(2):
            run()
            amanda.new_iteration()
    return tool


X = torch.rand(3, 3)


@pytest.mark.parametrize(
    ("pattern", "run", "count"),
    [
        (Op("relu", Op("mul", "x")), lambda: (X * 2).relu(), 1),
        (Op("relu", Op(("mul", "add"), "x")), lambda: (X + 2).relu(), 1),
        (Op("relu", Op("*", "x")), lambda: X.sin().relu(), 1),
        (Op("relu", Op("mul", "x")), lambda: (X + 2).relu(), 0),
        (Op("relu", Op("mul", "x")), lambda: [(X * 2).relu(), (X * 3).relu()], 2),
        # The order of inputs.
        (Op("add", Op("sin", "x"), "y"), lambda: X + X.sin(), 0),
        (Op("add", Op("sin", "x"), "y", any_order=True), lambda: X + X.sin(), 1),
        # One name is one tensor.
        (Op("add", Op("sin", "x"), "x"), lambda: X.sin() + X, 1),
        (Op("add", Op("sin", "x"), "x"), lambda: X.sin() + X.cos(), 0),
        # More inputs than the operator has.
        (Op("sin", "x", "y"), lambda: X.sin(), 0),
        # Predicates.
        (Op("mul", "x", where=lambda op, _: op.module == "m"), lambda: X * 2, 0),
        (
            Op("softmax", "x", where=lambda op, _: op.attributes["dim"] == 1),
            lambda: X.softmax(1),
            1,
        ),
        # A branch that nobody reads.
        (
            Op("exp", "x", where=lambda op, graph: not graph.consumers(op.id)),
            lambda: (X.exp(), X.exp().sin()),
            1,
        ),
    ],
)
def test_what_a_pattern_matches(pattern: Op, run: Any, count: int) -> None:
    assert len(matches(pattern, run).matches) == count


def test_a_part_that_is_read_twice_is_one_operator() -> None:
    shared = Op("sin", "x")
    pattern = Op("add", Op("exp", shared), Op("cos", shared))

    def diamond(x: Any) -> Any:
        y = x.sin()
        return y.exp() + y.cos()

    found = matches(pattern, lambda: diamond(X))
    assert [match.ids for match in found.matches] == [["/sin:0", "/exp:0", "/cos:0", "/add:0"]]
    assert not matches(pattern, lambda: X.sin().exp() + X.sin().cos()).matches


# -- what is not rewritten -----------------------------------------------------------


def test_what_is_changed_in_place_is_a_reason() -> None:
    def inside() -> Any:
        x = X.clone()
        return x.add_(1).relu()

    found = matches(Op("relu", Op("add", "x")), inside)
    assert [reason for _, reason in found.rejected] == [
        "op /add_:0 changes a tensor from outside in place"
    ]

    def between() -> Any:
        x = X.clone()
        y = x * 2
        x.add_(1)
        return y.relu()

    found = matches(Op("relu", Op("mul", "x")), between)
    assert [reason for _, reason in found.rejected] == [
        "op /add_:0 changes a tensor in place that the match reads"
    ]


def test_an_in_place_root_is_rewritten() -> None:
    """ReLU in place, as in most convolutional networks."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    tool = SubgraphRewritingTool(["linear", "relu"], lambda input: input * 7)
    with amanda.apply(tool):
        net(X)
        assert torch.equal(net(X), X * 7)


def test_an_operator_that_comes_later_and_reads_what_is_gone_is_an_error() -> None:
    class Late(nn.Module):
        def forward(self, x: Any, also: bool) -> Any:
            y = x * 2
            z = y.relu()
            return z + y.sin() if also else z

    net = Late()
    tool = SubgraphRewritingTool(Op("relu", Op("mul", "x")), lambda x: x)
    with amanda.apply(tool):
        net(X, False)
        net(X, False)
        with pytest.raises(AmandaError, match=r"op Late/sin:0 reads the output of op Late/mul:0"):
            net(X, True)


def test_a_root_that_reads_something_else_runs_as_it_is() -> None:
    class Other(nn.Module):
        def forward(self, x: Any, other: bool) -> Any:
            y = x * 2
            return (x if other else y).relu()

    net = Other()
    tool = SubgraphRewritingTool(Op("relu", Op("mul", "x")), lambda x: x * 100)
    with amanda.apply(tool):
        net(X, False)
        assert torch.equal(net(X, False), X * 100)
        assert torch.equal(net(X, True), X.relu())


def test_another_size_is_no_obstacle() -> None:
    net = Net()
    tool = SubgraphRewritingTool(Op("relu", Op("add", Op("Slow", "x"))), lambda x: x * 10)
    with amanda.apply(tool):
        net(torch.ones(2))
        net(torch.ones(2))
        assert net(torch.ones(3, 2)).tolist() == [[10, 10]] * 3


def test_no_tensor_is_kept() -> None:
    net, x = Net(), torch.rand(3)
    tool = SubgraphRewritingTool(Op("relu", Op("add", Op("Slow", "x"))), lambda x: x * 10)
    with amanda.apply(tool):
        for _ in range(3):
            y = net(x)
    references = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [reference() for reference in references] == [None, None]
