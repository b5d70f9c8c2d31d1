"""``flops`` on PyTorch, against published figures, definitions and torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from amanda_tools.flops import FlopsTool
from tests import models

# isort: split
import torchvision
import transformers

from tests.running import applied


def torch_counts(run: Callable[[], Any]) -> int:
    """What PyTorch's own counter says, which knows matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def inference(model: nn.Module, *inputs: Any, **named: Any) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(*inputs, **named)

    return run


# -- published figures ------------------------------------------------------


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("with_gradients", [False, True])
def test_vit_b16_is_the_same_with_and_without_the_native_fast_path(with_gradients: bool) -> None:
    """ViT-B/16 has 35.128 GFLOP; without gradients it runs one fused attention operator."""
    model = torchvision.models.vit_b_16().eval()
    image = torch.rand(1, 3, 224, 224)
    run = (lambda: model(image)) if with_gradients else inference(model, image)
    found = applied(FlopsTool(), run).summary()
    assert round(found["flops"] / 1e9, 3) == 35.128
    assert found["params"] == parameters_of(model)
    assert found["unknown_ops"] == {}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2_is_the_same_with_every_attention(attention: str) -> None:
    """GPT-2 small, one sequence of 128 tokens: 32.228 GFLOP; its tied weight counts once."""
    config = transformers.GPT2Config(attn_implementation=attention)
    model = transformers.GPT2LMHeadModel(config).eval()
    found = applied(FlopsTool(), inference(model, torch.randint(0, 5000, (1, 128)))).summary()
    assert round(found["flops"] / 1e9, 3) == 32.228
    assert found["params"] == parameters_of(model) == 124_439_808
    assert found["unknown_ops"] == {}


def test_resnet50() -> None:
    """torchvision's ResNet-50 (v1.5): 8.178 GFLOP, 25.6 million parameters, no buffers."""
    model = torchvision.models.resnet50().eval()
    found = applied(FlopsTool(), inference(model, torch.rand(1, 3, 224, 224))).summary()
    assert round(found["flops"] / 1e9, 3) == 8.178
    assert found["macs"] * 2 == found["flops"]
    assert found["params"] == parameters_of(model) == 25_557_032
    assert found["weight_bytes"] == 4 * found["params"]


# -- PyTorch's counter as the oracle -----------------------------------------

COUNTED_BY_TORCH = [name for name in models.ZOO if name != "lstm"]


@pytest.mark.parametrize("name", COUNTED_BY_TORCH)
def test_a_training_step_is_what_torch_counts(name: str) -> None:
    """Forward and backward, operator by operator, with attention as matrix products."""
    model, inputs = models.build(name)

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            models.loss(model(**inputs)).backward()

    found = applied(FlopsTool(), step).summary()
    assert found["flops"] + found["flops_backward"] == torch_counts(step) > 0
    assert found["unknown_ops"] == {}
    assert found["params"] == parameters_of(model)


X = {"requires_grad": True}
OPERATORS: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(torch.rand(3, 4, **X), torch.rand(4, 5, **X)),
    "mm, one gradient": lambda: torch.mm(torch.rand(3, 4, **X), torch.rand(4, 5)),
    "bmm": lambda: torch.bmm(torch.rand(2, 3, 4, **X), torch.rand(2, 4, 5, **X)),
    "addmm": lambda: torch.addmm(
        torch.rand(5, **X), torch.rand(3, 4, **X), torch.rand(4, 5, **X)
    ),
    "baddbmm": lambda: torch.baddbmm(
        torch.rand(2, 3, 5, **X), torch.rand(2, 3, 4, **X), torch.rand(2, 4, 5, **X)
    ),
    "matmul, batch": lambda: torch.rand(2, 3, 4, 5, **X) @ torch.rand(5, 6, **X),
    "matmul, broadcast": lambda: torch.rand(2, 1, 4, 5, **X) @ torch.rand(3, 5, 6, **X),
    "linear, 3 axes": lambda: functional.linear(torch.rand(2, 3, 4, **X), torch.rand(5, 4, **X)),
    "conv1d": lambda: functional.conv1d(
        torch.rand(2, 4, 9, **X), torch.rand(6, 4, 3, **X), padding=1
    ),
    "conv2d, groups": lambda: functional.conv2d(
        torch.rand(2, 4, 9, 9), torch.rand(6, 2, 3, 3), groups=2, stride=2
    ),
    "conv2d, depthwise": lambda: functional.conv2d(
        torch.rand(2, 4, 9, 9), torch.rand(8, 1, 3, 3), groups=4
    ),
    "conv2d, dilated, padding": lambda: functional.conv2d(
        torch.rand(2, 4, 9, 9), torch.rand(6, 4, 3, 3, **X), dilation=2, padding="same"
    ),
    "conv2d, channels last": lambda: functional.conv2d(
        torch.rand(2, 4, 9, 9).to(memory_format=torch.channels_last), torch.rand(6, 4, 3, 3, **X)
    ),
    "conv2d, no batch": lambda: functional.conv2d(torch.rand(4, 9, 9), torch.rand(6, 4, 3, 3)),
    "conv3d": lambda: functional.conv3d(torch.rand(1, 2, 5, 6, 7), torch.rand(3, 2, 2, 2, 2, **X)),
    "conv_transpose2d": lambda: functional.conv_transpose2d(
        torch.rand(2, 4, 5, 5), torch.rand(4, 6, 3, 3), stride=2, output_padding=1
    ),
    "convolution": lambda: torch.convolution(
        torch.rand(2, 4, 9, 9), torch.rand(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False,
        [0, 0], 2,
    ),
    "einsum, matmul": lambda: torch.einsum(
        "bij,bjk->bik", torch.rand(2, 3, 4), torch.rand(2, 4, 5)
    ),
    "einsum, attention": lambda: torch.einsum(
        "bqhd,bkhd->bhqk", torch.rand(2, 3, 4, 5, **X), torch.rand(2, 6, 4, 5, **X)
    ),
    "einsum, ellipsis": lambda: torch.einsum(
        "...ij,jk->...ik", torch.rand(2, 3, 4), torch.rand(4, 5)
    ),
    "einsum, implicit": lambda: torch.einsum("ij,jk", torch.rand(3, 4), torch.rand(4, 5)),
    "einsum, summed before": lambda: torch.einsum(
        "ijl,jk->ik", torch.rand(3, 4, 7), torch.rand(4, 5)
    ),
    "einsum, three factors": lambda: torch.einsum(
        "ij,jk,kl->il", torch.rand(2, 30), torch.rand(30, 3), torch.rand(3, 40)
    ),
    "tensordot": lambda: torch.tensordot(
        torch.rand(3, 4, 5), torch.rand(5, 4, 6), ([1, 2], [1, 0])
    ),
    "inner": lambda: torch.inner(torch.rand(2, 3, 4, **X), torch.rand(5, 4, **X)),
    "multi_dot": lambda: torch.linalg.multi_dot(
        [torch.rand(m, n, **X) for m, n in ((2, 3), (3, 4), (4, 5), (5, 1))]
    ),
    "multi_dot, vectors": lambda: torch.linalg.multi_dot(
        [torch.rand(3, **X), torch.rand(3, 4), torch.rand(4)]
    ),
    **{
        f"matrix_power {n}": lambda n=n: torch.linalg.matrix_power(torch.rand(2, 3, 3, **X), n)
        for n in (2, 3, 5, 7, 8)
    },
    "cov": lambda: torch.cov(torch.rand(3, 10, **X)),
    "corrcoef": lambda: torch.corrcoef(torch.rand(3, 10, **X)),
    "operator sign": lambda: torch.rand(3, 4) @ torch.rand(4, 5),
    "aten": lambda: torch.ops.aten.mm.default(torch.rand(3, 4), torch.rand(4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_what_torch_counts(name: str) -> None:
    """Shapes, layouts, groups, broadcasting and gradients of single operators."""

    def run() -> None:
        result = OPERATORS[name]()
        if result.requires_grad:
            result.sum().backward()

    found = applied(FlopsTool(), run).summary()
    assert found["flops"] + found["flops_backward"] == torch_counts(run) > 0
    assert found["unknown_ops"] == {}


# -- definitions, where PyTorch's counter has none ----------------------------


def _quantized(kind: str, *inputs: Any) -> Any:
    """An operator of ``torch.ops.quantized`` with a weight of ones, packed."""
    ops = torch.ops.quantized
    x, weight = (
        torch.quantize_per_tensor(torch.ones(shape), 1.0, 0, dtype)
        for shape, dtype in zip(inputs, (torch.quint8, torch.qint8), strict=True)
    )
    if kind == "linear":
        return ops.linear(x, ops.linear_prepack(weight, None), 1.0, 0)
    packed = ops.conv2d_prepack(weight, None, [1, 1], [0, 0], [1, 1], 2)
    return ops.conv2d(x, packed, 1.0, 0)


EIGHT_BITS: dict[str, tuple[Callable[[], Any], int]] = {
    "_int_mm": (
        lambda: torch._int_mm(  # noqa: SLF001
            torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
        ),
        2 * 32 * 16 * 8,
    ),
    "_weight_int8pack_mm": (
        lambda: torch._weight_int8pack_mm(  # noqa: SLF001
            torch.ones(32, 16).bfloat16(), torch.ones(8, 16, dtype=torch.int8),
            torch.ones(8).bfloat16(),
        ),
        2 * 32 * 16 * 8,
    ),
    "packed_linear": (lambda: _quantized("linear", (4, 16), (8, 16)), 2 * 4 * 16 * 8),
    "packed_conv2d": (
        lambda: _quantized("conv2d", (2, 4, 8, 8), (6, 2, 3, 3)), 2 * 2 * 6 * 6 * 6 * 2 * 3 * 3,
    ),
    "affine_grid_generator": (
        lambda: functional.affine_grid(torch.ones(2, 2, 3), [2, 1, 4, 5], False), 2 * 40 * 2 * 3,
    ),
    "linalg_vecdot": (lambda: torch.linalg.vecdot(torch.ones(3, 10), torch.ones(10)), 2 * 30),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_products_that_torch_does_not_count(name: str) -> None:
    """Products of integers, with packed weights and of vectors in pairs."""
    run, expected = EIGHT_BITS[name]
    found = applied(FlopsTool(), run).summary()
    assert found["flops"] == found["by_type"][name]["flops"] == expected
    assert name not in found["unknown_ops"]


def test_the_fused_attention_of_a_cpu() -> None:
    """Two products forward; backward five, as the scores are computed anew."""
    q, k, v = (torch.rand(2, 3, n, d, requires_grad=True) for n, d in ((7, 8), (9, 8), (9, 8)))

    def run() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            functional.scaled_dot_product_attention(q, k, v).sum().backward()

    found = applied(FlopsTool(), run).summary()
    product = 2 * 3 * 7 * 9 * 8
    assert found["flops"] == 2 * 2 * product
    assert found["flops_backward"] == 2 * 5 * product


def test_gradients_of_grouped_and_transposed_convolutions() -> None:
    """Each costs what the convolution costs; torch's counter forgets the groups of the weight's."""
    data, weight, other = (torch.rand(*s, 3, 3, **X) for s in ((2, 4), (6, 2), (4, 6)))
    for convolve, count in (
        (lambda: functional.conv2d(data, weight, padding=1, groups=2), 2 * 6 * 9 * 2),
        (lambda: functional.conv_transpose2d(data, other, stride=2), 2 * 4 * 9 * 6),
    ):
        found = applied(FlopsTool(), lambda convolve=convolve: convolve().sum().backward())
        assert found.summary()["flops"] == 2 * count * 3 * 3
        assert found.summary()["flops_backward"] == 2 * found.summary()["flops"]


def test_products_of_groups_and_their_gradients() -> None:
    """The experts of a mixture: each row meets the matrix of its group, forward and backward."""
    rows, weight = (torch.rand(*size, dtype=torch.bfloat16) for size in ((6, 16), (2, 16, 8)))
    rows.requires_grad_()
    weight.requires_grad_()
    ends = torch.tensor([2, 6], dtype=torch.int32)
    # The gradient of a sum has no strides, which the operator refuses (PyTorch 2.13).
    found = applied(
        FlopsTool(),
        lambda: functional.grouped_mm(rows, weight, offs=ends).square().sum().backward(),
    ).summary()
    assert found["flops"] == 2 * 6 * 16 * 8
    assert found["flops_backward"] == 2 * found["flops"]
    assert found["unknown_ops"] == {}


def test_grouped_query_attention_counts_all_queries() -> None:
    """Keys and values that several heads share are met by each of them."""
    q, k = torch.rand(1, 8, 5, 4), torch.rand(1, 2, 6, 4)
    found = applied(
        FlopsTool(), lambda: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    ).summary()
    assert found["flops"] == 2 * 8 * 5 * 6 * (4 + 4)


def test_recurrent_networks_apply_each_matrix_once_per_step() -> None:
    """LSTM, GRU and RNN, two layers and both directions; gradients of data and weights."""
    for cls, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        net = cls(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        data = torch.rand(2, 5, 16, requires_grad=True)
        weights = 2 * gates * 24 * ((16 + 24) + (48 + 24))
        assert applied(FlopsTool(), inference(net, data)).summary()["flops"] == 2 * 2 * 5 * weights
    lstm = nn.LSTM(16, 24)
    step = applied(FlopsTool(), lambda: lstm(torch.rand(5, 2, 16))[0].sum().backward()).summary()
    # The data needs no gradient.
    assert step["flops_backward"] == 2 * 10 * 96 * (16 + 2 * 24)


def test_a_packed_sequence_counts_its_steps_only() -> None:
    """Padding is no work."""
    net = nn.LSTM(3, 4)
    packed = nn.utils.rnn.pack_sequence([torch.rand(5, 3), torch.rand(2, 3)])
    assert applied(FlopsTool(), inference(net, packed)).summary()["flops"] == 2 * 7 * 16 * (3 + 4)


def test_cells_and_bilinear() -> None:
    """One step of a cell; ``x1 @ W`` and its product with ``x2``."""
    cell = applied(FlopsTool(), lambda: nn.LSTMCell(3, 4)(torch.rand(2, 3))).summary()
    assert cell["flops"] == 2 * 2 * 16 * (3 + 4)
    both = applied(
        FlopsTool(), lambda: nn.Bilinear(3, 4, 5)(torch.rand(2, 3), torch.rand(2, 4))
    ).summary()
    assert both["flops"] == 2 * 2 * (3 * 4 * 5 + 4 * 5)


@pytest.mark.parametrize("name", models.FAST_PATH)
def test_the_native_fast_paths_count_as_the_slow_ones(name: str) -> None:
    """In eval mode without gradients one operator does the work of many."""
    model, inputs = models.build(name, training=False)
    slow = applied(FlopsTool(), lambda: model(**inputs)).summary()
    fast = applied(FlopsTool(), inference(model, **inputs)).summary()
    assert fast["flops"] == slow["flops"] > 0
    assert set(fast["by_type"]) != set(slow["by_type"])


def test_parameters_of_lazy_modules_have_no_size_before_the_first_call() -> None:
    """An operator on such a parameter raises the error that it raises without a tool."""

    def run() -> None:
        layer = nn.LazyLinear(3)
        with pytest.raises(ValueError, match="uninitialized parameter"):
            layer.weight.sum()
        layer(torch.rand(2, 4))

    assert applied(FlopsTool(), run).summary()["params"] == 15
