"""Products of PyTorch of which one factor is a parameter, against weights changed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.prune import PruneTool
from amanda_tools.quantize import QuantizeTool
from tests import models

RECURRENT_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell")


class Products(nn.Module):
    """Projections to heads and back, and a product of activations between them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"heads": (8, 2, 4), "matrix": (4, 4), "output": (2, 4, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: Any) -> Any:
        h = torch.einsum("abc,cde->abde", x, self.heads) @ self.matrix
        h = torch.einsum("abde,acde->adbc", h, h).softmax(-1) @ h.transpose(1, 2)
        return torch.einsum("cde,bcad->bae", self.output, h)


X = torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> Any:
    y = model(X)
    y.square().sum().backward()
    return y.detach()


def test_products_with_a_parameter_are_pruned_by_default() -> None:
    model, by_hand, tool = Products(), Products(), PruneTool()
    with amanda.apply(tool):
        output = step(model)
    masks = [torch.from_numpy(mask) for mask in tool.masks.values()]
    assert [mask.shape for mask in masks] == [w.shape for w in model.parameters()]
    for weight, mask in zip(by_hand.parameters(), masks, strict=True):
        order = weight.detach().abs().flatten().argsort()
        wanted = torch.ones(weight.numel(), dtype=torch.bool)
        wanted[order[: weight.numel() // 2]] = False
        assert torch.equal(mask, wanted.view(weight.shape))
        weight.data *= mask
    assert torch.equal(output, step(by_hand))
    for weight, other, mask in zip(model.parameters(), by_hand.parameters(), masks, strict=True):
        assert torch.equal(weight.grad, other.grad * mask)
    summary = tool.result()["summary"]
    # Products of activations are neither treated nor missed.
    assert (summary["skipped"], summary["ops_never_met"]) == ([], [])


def test_types_that_are_asked_for_list_products_of_activations() -> None:
    tool = PruneTool(method="nm", ops=["einsum", "matmul"])
    with amanda.apply(tool):
        Products()(X)
    assert len(tool.masks) == 3
    reasons = {row["id"]: row["reason"] for row in tool.result()["summary"]["skipped"]}
    assert reasons == {
        "Products/einsum:1": "none of its inputs is known as its weight",
        "Products/matmul:1": "none of its inputs is known as its weight",
    }


@pytest.mark.parametrize("ops", [(), ("linear",)])
def test_products_are_no_linear_to_those_who_ask_for_it(ops: tuple[str, ...]) -> None:
    tool = PruneTool(ops=ops)
    with amanda.apply(tool):
        Products()(X)
    assert len(tool.masks) == (0 if ops else 3)


def test_weights_are_rounded_per_output() -> None:
    model, tool = Products(), QuantizeTool(activation_bits=0)
    with amanda.apply(tool), torch.no_grad():
        output = model(X)
        for weight, summed in ((model.heads, 0), (model.matrix, 0), (model.output, (0, 1))):
            scale = weight.abs().amax(summed, keepdim=True) / 127
            weight.data = (weight * (1 / scale)).round() * scale
    with torch.no_grad():
        assert torch.allclose(output, model(X), atol=1e-6)
    rows = [row["quantizers"][0]["axis"] for row in tool.op_rows()]
    assert rows == [[1, 2], 1, 2]


def test_a_batch_of_matrices_is_pruned_one_by_one() -> None:
    experts = nn.Parameter(torch.tensor([[1.0, -2.0, 3.0, 0.5], [4.0, 3.0, -2.0, 1.0]])[..., None])
    tool = PruneTool(method="nm")
    with amanda.apply(tool):
        torch.bmm(torch.ones(2, 3, 4), experts)
    (mask,) = tool.masks.values()
    assert mask[..., 0].tolist() == [[False, True, True, False], [True, True, False, False]]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 8, 3), (2, 4, 9)),
        (nn.Conv3d(4, 8, 3), (2, 4, 5, 5, 5)),
        (nn.ConvTranspose1d(4, 8, 3), (2, 4, 9)),
        (nn.ConvTranspose2d(4, 8, 3), (2, 4, 5, 5)),
        (nn.ConvTranspose3d(4, 8, 3), (2, 4, 3, 3, 3)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_every_convolution_is_treated_by_default(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Convolutions of all numbers of axes, and transposed ones, are among the default types."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    exact = layer(x)
    for tool in (PruneTool(), PruneTool(method="nm"), QuantizeTool(method="dynamic")):
        with amanda.apply(tool):
            found = layer(x)
        assert not torch.equal(found, exact)
        assert (len(tool.ops), tool.summary()["skipped"]) == (1, [])


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_layer_is_listed_as_skipped(make: type[nn.Module]) -> None:
    """Its several weights have no rule: it stays exact, and the result says why."""
    layer, x = make(4, 4), torch.rand(3, 4)
    exact = layer(x)
    named = QuantizeTool(ops=["lstm", "gru", "rnn", *RECURRENT_CELLS], weight_bits=4)
    for tool in (PruneTool(), QuantizeTool(), named):
        with amanda.apply(tool):
            layer(x)
            found = layer(x)
        pairs = zip(models.tensors(found), models.tensors(exact), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        reasons = {row["reason"] for row in tool.summary()["skipped"]}
        assert reasons == {"none of its inputs is known as its weight"}


def test_a_parameter_without_a_rule_is_no_activation() -> None:
    """An operator that reads a parameter which no rule names is skipped: the parameter would be
    rounded as an activation, whatever ``weight_bits`` says."""
    scale, x = nn.Parameter(torch.rand(4)), torch.rand(3, 4)
    tool = QuantizeTool(method="dynamic", ops=["mul"], weight_bits=4)
    with amanda.apply(tool):
        found, rounded = x * scale, x * x
    assert torch.equal(found, x * scale)
    assert not torch.equal(rounded, x * x)
    assert [row["reason"] for row in tool.summary()["skipped"]] == [
        "none of its inputs is known as its weight"
    ]
