"""Products of PyTorch of which one factor is a parameter, against weights changed by hand."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.prune import PruneTool
from amanda_tools.quantize import QuantizeTool
from tests import models
from tests.running import applied

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
    tool = applied(PruneTool(method="nm", ops=["einsum", "matmul"]), lambda: Products()(X))
    assert len(tool.masks) == 3
    reasons = {row["id"]: row["reason"] for row in tool.result()["summary"]["skipped"]}
    assert reasons == {
        "Products/einsum:1": "none of its inputs is known as its weight",
        "Products/matmul:1": "none of its inputs is known as its weight",
    }


@pytest.mark.parametrize("ops", [(), ("linear",)])
def test_products_are_no_linear_to_those_who_ask_for_it(ops: tuple[str, ...]) -> None:
    tool = applied(PruneTool(ops=ops), lambda: Products()(X))
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
    tool = applied(PruneTool(method="nm"), lambda: torch.bmm(torch.ones(2, 3, 4), experts))
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


RECURRENT = [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell]


@pytest.mark.parametrize("make", RECURRENT)
def test_pruning_lists_a_recurrent_layer_as_skipped(make: type[nn.Module]) -> None:
    """Its several weights have no mask: it stays exact, and the result says why."""
    layer, x = make(4, 4), torch.rand(3, 4)
    exact, tool = layer(x), PruneTool()
    with amanda.apply(tool):
        found = layer(x)
    pairs = zip(models.tensors(found), models.tensors(exact), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    reasons = {row["reason"] for row in tool.summary()["skipped"]}
    assert reasons == {"none of its inputs is known as its weight"}


@pytest.mark.parametrize("make", RECURRENT)
@pytest.mark.parametrize("options", [{}, {"ops": ["lstm", "gru", "rnn", *RECURRENT_CELLS]}])
def test_each_weight_of_a_recurrent_layer_has_a_scale_per_output(
    make: type[nn.Module], options: dict[str, Any]
) -> None:
    """The layer computes as one whose matrices were rounded by hand; its biases stay."""
    torch.manual_seed(0)
    layer, x = make(4, 6), torch.rand(3, 4)
    tool = QuantizeTool(weight_bits=4, activation_bits=0, **options)
    with amanda.apply(tool):
        found = [*models.tensors(layer(x))]
    by_hand = copy.deepcopy(layer)
    for weight in by_hand.parameters():
        if weight.dim() == 2:
            scale = weight.detach().abs().amax(1, keepdim=True) / 7
            weight.data = (weight / scale).round() * scale
    torch.testing.assert_close(found, [*models.tensors(by_hand(x))])
    assert not torch.equal(found[0], next(models.tensors(layer(x))))
    shapes = [tuple(whole.shape) for whole in tool.integer_weights(lambda: layer(x)).values()]
    assert shapes == [tuple(p.shape) for p in layer.parameters() if p.dim() == 2]


@pytest.mark.parametrize("make", RECURRENT)
def test_what_a_recurrent_layer_multiplies_is_rounded(make: type[nn.Module]) -> None:
    """Data and hidden state with ``activation_bits``, weights with ``weight_bits``, biases and the
    state of cells not; files and the export to torchao name each input alike."""
    layer, x = make(4, 6), torch.rand(3, 4)
    tool = QuantizeTool(weight_bits=4, activation_bits=6, method="dynamic")
    with amanda.apply(tool):
        layer(x)
    [(op_id, found)] = tool.quantizers.items()
    states = 2 if "LSTM" in make.__name__ else 1
    kinds = [(quantizer.role, quantizer.bits) for quantizer in found]
    assert kinds == [("activation", 6)] * 2 + [("weight", 4)] * 2
    with tempfile.TemporaryDirectory() as folder:
        path = tool.export(Path(folder) / "net.safetensors", lambda: layer(x))
        with safe_open(path, "numpy") as file:
            names = {name for name in file.keys() if name.endswith("integers")}  # noqa: SIM118
    assert names == {f"{op_id}|{index}|integers" for index in (1 + states, 2 + states)}
    with pytest.raises(AmandaError, match="with a quantized weight"):
        tool.to_torchao(layer, lambda: layer(x))


@pytest.mark.parametrize("options", [{}, {"learning_rate": 0.01}])
def test_ranges_of_a_recurrent_layer_are_learned(options: dict[str, float]) -> None:
    """Quantization-aware training learns a range for each weight and activation of it."""
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 6, num_layers=2, bidirectional=True), torch.rand(5, 2, 4)
    tool = QuantizeTool(method="qat", weight_bits=4, **options)
    with amanda.apply(tool):
        layer(x)
        before = [value.clone() for value in tool.parameters()]
        optimizer = torch.optim.SGD(tool.parameters(), 0.0 if options else 0.01)
        for _ in range(2):
            layer(x)[0].square().sum().backward()
            optimizer.step()
    learned = [not torch.equal(*pair) for pair in zip(before, tool.parameters(), strict=True)]
    assert (len(learned), all(learned[2:])) == (2 + 8, True)


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
