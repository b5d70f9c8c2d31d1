"""Shapes, element types and devices of the gradients of backward operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from tests.torch.support import applied


class Specs(amanda.Tool):
    """What is told of each backward operator, by an analysis before it or after it."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}
        self.add_inst_for_op(self.note, backward=True, require_outputs=after)

    def note(self, context: amanda.OpContext) -> None:
        self.found[str(context.get_backward_op_id())] = context.get_tensor_specs()

    def outputs(self) -> dict[str, list[Any]]:
        return {
            op_id: [None if spec is None else spec.row() for spec in tensors.outputs or ()]
            for op_id, tensors in self.found.items()
        }


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: int) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> Any:
        return grad[0] * 2, None


def layers() -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    )
    return nn.functional.cross_entropy(net(torch.rand(2, 3, 4, 4)), torch.tensor([0, 1]))


def recurrent() -> torch.Tensor:
    return nn.LSTM(3, 4, num_layers=2)(torch.rand(5, 2, 3))[0].sum()


def functions() -> torch.Tensor:
    x = torch.rand(3, 4, requires_grad=True)
    parts = Double.apply(x, 2).double().chunk(2, 1)
    return (
        torch.cat([parts[0], parts[1] @ torch.rand(2, 2).double()])
        .index_fill(0, torch.tensor([1]), 0.0)
        .sum()
    )


@pytest.mark.parametrize("program", [layers, recurrent, functions])
def test_gradients_are_described_before_the_operator_runs(program: Any) -> None:
    """A tool that looks only before a backward operator is told what it is to produce."""
    before, after = Specs(after=False), Specs(after=True)
    with applied(before, after):
        program().backward()
    found = before.outputs()
    assert found == after.outputs()
    assert all(specs for op_id, specs in found.items() if "AccumulateGrad" not in op_id)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_gradient_has_no_shape() -> None:
    """Its element type is known, as after the operator."""
    with applied(tool := Specs(after=False)):
        nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])
        values = nested.requires_grad_() * 2
        torch.nested.to_padded_tensor(values, 0.0).sum().backward()
    [(_, found)] = [item for item in tool.outputs().items() if "Mul" in item[0]]
    assert found[0] == {"shape": None, "dtype": "float32", "device": "cpu"}
