"""``prune``'s dynamic methods on PyTorch, against modules written by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda_tools.prune import PruneTool
from tests import models
from tests.running import applied
from tests.tools.optimization.training import trained


class ChannelGatedConv(nn.Module):
    """Feature boosting and suppression around a convolution, after the paper."""

    def __init__(self, conv: nn.Conv2d, keep: int) -> None:
        super().__init__()
        self.conv, self.keep = conv, keep
        phi = conv.weight.detach().abs().sum((2, 3)).T.double()
        phi = phi / (phi.sum() / phi.shape[1])
        self.phi = nn.Parameter(phi.float())
        self.rho = nn.Parameter(torch.ones(conv.out_channels))

    def forward(self, x: Any) -> Any:
        saliency = F.relu(x.abs().mean((2, 3)) @ self.phi + self.rho)
        winners = saliency.topk(self.keep, dim=1).indices
        gate = torch.zeros_like(saliency).scatter(1, winners, 1.0)
        return self.conv(x) * (gate * saliency)[:, :, None, None]


class PositionGatedConv(nn.Module):
    """A convolution that has outputs at the most salient positions only."""

    def __init__(self, conv: nn.Conv2d, sparsity: float) -> None:
        super().__init__()
        self.conv, self.sparsity = conv, sparsity
        self.weight = nn.Parameter(torch.full((1, conv.in_channels, 1, 1), 1 / conv.in_channels))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        saliency = F.conv2d(x.abs(), self.weight, self.bias)
        saliency = F.interpolate(saliency, y.shape[2:], mode="nearest").flatten(1)
        soft = saliency.sigmoid()
        count = saliency.shape[1]
        order = saliency.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : count - round(self.sparsity * count)]
        hard = torch.zeros_like(soft).scatter(1, kept, 1.0)
        return y * (hard + (soft - soft.detach())).view(len(x), 1, *y.shape[2:])


class Net(nn.Module):
    """Convolutions of two sizes, a depthwise one, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 12, 3, stride=2)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Any) -> Any:
        return self.fc(self.two(self.one(x).relu()).relu().mean((2, 3)))


def pair(wrap: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A net, its twin with convolutions wrapped by hand, and an input."""
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    twin.one, twin.two = wrap(twin.one), wrap(twin.two)
    return net, twin, torch.randn(5, 4, 11, 11)


def assert_equal_training(tool: PruneTool, net: nn.Module, twin: nn.Module, x: Any) -> None:
    """The same outputs, weights and gates, within rounding, and gates that have learned."""
    with amanda.apply(tool):
        net(x)  # to know the gates
        before = [value.detach().clone() for value in tool.parameters()]
        outputs = trained(net, tool.parameters(), x, steps=4, lr=0.1)
    expected = trained(twin, [], x, steps=4, lr=0.1)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-5)
    own = [*net.one.parameters(), *net.two.parameters(), *net.fc.parameters()]
    theirs = [*twin.one.conv.parameters(), *twin.two.conv.parameters(), *twin.fc.parameters()]
    for a, b in zip(own, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(before, tool.parameters(), strict=True))


def test_channel_gates_train_as_a_model_written_by_hand() -> None:
    def wrap(conv: nn.Conv2d) -> nn.Module:
        return ChannelGatedConv(conv, conv.out_channels - round(0.4 * conv.out_channels))

    net, twin, x = pair(wrap)
    tool = PruneTool(method="channel", sparsity=0.4)
    assert_equal_training(tool, net, twin, x)
    expected = [twin.one.phi, twin.one.rho, twin.two.phi, twin.two.rho]
    for gate, value in zip(tool.parameters(), expected, strict=True):
        assert torch.allclose(gate, value, atol=1e-6)


def test_rows_of_channel_gates_have_the_channels_that_are_kept() -> None:
    net, _, x = pair(lambda conv: ChannelGatedConv(conv, conv.out_channels // 2))
    tool = applied(PruneTool(method="channel"), lambda: net(x))
    assert [row["channels_kept"] for row in tool.result()["ops"]] == [4, 6]
    # No weight is zero, and what is zero of the outputs differs by sample: no figure is made up.
    assert tool.summary()["sparsity"] is None


def test_channel_gates_of_a_depthwise_convolution_look_at_its_own_channels() -> None:
    """The initial saliency of a channel comes from the inputs of its group."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(6, 6, 3, groups=6), torch.rand(2, 6, 8, 8)
    x[0, :3] = 0
    x[1, 3:] = 0
    with amanda.apply(PruneTool(method="channel")):
        y = conv(x)
    assert y[0, :3].count_nonzero() == y[1, 3:].count_nonzero() == 0
    assert y[0, 3:].count_nonzero() == y[1, :3].count_nonzero() == 3 * 36


def test_spatial_gates_train_as_a_model_written_by_hand() -> None:
    """Also where a stride makes the output smaller than the input."""
    net, twin, x = pair(lambda conv: PositionGatedConv(conv, 0.3))
    tool = PruneTool(method="activation", sparsity=0.3)
    assert_equal_training(tool, net, twin, x)
    expected = [twin.one.weight, twin.one.bias, twin.two.weight, twin.two.bias]
    for gate, value in zip(tool.parameters(), expected, strict=True):
        assert torch.allclose(gate.flatten(), value.flatten(), atol=1e-6)


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.9])
def test_each_sample_keeps_exactly_the_share_of_positions(sparsity: float) -> None:
    """Also where most positions are equal, as in a picture of a digit."""
    conv, x = nn.Conv2d(3, 5, 3, padding=1), torch.zeros(4, 3, 10, 10)
    x[:, :, 4:6, 4:6] = torch.rand(4, 3, 2, 2)
    nn.init.constant_(conv.bias, 1.0)
    with amanda.apply(PruneTool(method="activation", sparsity=sparsity)):
        y = conv(x)
    positions = (y != 0).all(1).sum((1, 2))
    assert positions.tolist() == [100 - round(100 * sparsity)] * 4


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("resnet18", "channel"),
        ("resnet18", "activation"),
        ("vit_timm", "channel"),
        ("bert", "activation"),
    ],
)
def test_gates_fit_models_that_nobody_prepared(name: str, method: str) -> None:
    """Finite outputs, gradients for every gate that has an effect."""
    model, inputs = models.build(name)
    tool = PruneTool(method=method, ops=("conv2d", "linear"), sparsity=0.25)
    with amanda.apply(tool):
        models.loss(model(**inputs)).backward()
    rows = tool.result()["ops"]
    assert rows
    for value in tool.parameters():
        assert torch.isfinite(value.grad).all()


def test_saved_gates_are_loaded_into_a_new_tool(tmp_path: Path) -> None:
    net, _, x = pair(lambda conv: conv)
    tool = PruneTool(method="channel")
    with amanda.apply(tool):
        net(x)
        with torch.no_grad():
            for value in tool.parameters():
                value.uniform_()
        expected = net(x)
    path = tool.save(tmp_path / "gates.safetensors")
    again = PruneTool(method="channel")
    with amanda.apply(again):
        net(x)
        again.load(path)
        assert torch.equal(net(x), expected)


def test_what_has_no_channels_or_positions_is_skipped() -> None:
    tool = PruneTool(method="activation", ops=("conv2d", "linear"))
    conv, fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
    with amanda.apply(tool):
        conv(torch.rand(3, 8, 8))
        fc(torch.rand(2, 4))
    reasons = [row["reason"] for row in tool.result()["summary"]["skipped"]]
    assert reasons == [
        "its input has 3 axes, without one of samples",
        "its input has one position only",
    ]


# -- attention -------------------------------------------------------------


def pruned_attention(q: Any, k: Any, v: Any, mask: Any, share: float, block: int) -> Any:
    """Attention over the blocks of keys that get most of it, sample by sample."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    outputs = []
    for i in range(len(q)):
        scores = q[i] @ k[i].mT / q.shape[-1] ** 0.5
        if mask is not None:
            visible = mask.expand(len(q), q.shape[1], *scores.shape[1:])[i]
            scores = scores.masked_fill(~visible, float("-inf"))
        weights = scores.softmax(-1)
        keys = weights.shape[-1]
        attention = weights.sum((0, 1))
        blocks = [list(range(j, min(j + block, keys))) for j in range(0, keys, block)]
        strength = torch.stack([attention[b].sum() for b in blocks])
        best = strength.topk(max(1, len(blocks) - round(share * len(blocks)))).indices.tolist()
        kept = sorted(key for b in best for key in blocks[b])
        outputs.append(scores[..., kept].softmax(-1) @ v[i][:, kept])
    return torch.stack(outputs)


def operands(heads: int = 4, key_heads: int = 4) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    q = torch.randn(3, heads, 7, 8, requires_grad=True)
    k, v = (torch.randn(3, key_heads, 10, 8, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("masked", ["none", "bool", "float"])
def test_fused_attention_over_the_strongest_blocks(block: int, masked: str) -> None:
    q, k, v = operands()
    visible = None if masked == "none" else (torch.arange(10) < torch.tensor([[9], [10], [8]]))
    visible = None if visible is None else visible[:, None, None, :]
    mask = visible
    if masked == "float":
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = pruned_attention(q, k, v, visible, 0.5, block)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    tool = PruneTool(method="attention", block=block)
    with amanda.apply(tool):
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(output.square().sum(), (q, k, v))
    assert torch.allclose(output, expected, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, wanted, strict=True))


def test_fused_attention_with_fewer_heads_of_keys() -> None:
    q, k, v = operands(4, 2)
    expected = pruned_attention(q, k, v, None, 0.3, 1)
    with amanda.apply(PruneTool(method="attention", sparsity=0.3)):
        output = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(output, expected, atol=1e-6)


def test_attention_as_product_softmax_product() -> None:
    """What a model computes itself is pruned like the fused operator, with its gradient."""
    q, k, v = operands()
    expected = pruned_attention(q, k, v, None, 0.5, 2)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    tool = PruneTool(method="attention", block=2)
    with amanda.apply(tool):
        # Products: a parameter on one side would be no attention.
        output = torch.softmax((q * 1) @ (k * 1).transpose(-1, -2) / 8**0.5, dim=-1) @ v
        gradients = torch.autograd.grad(output.square().sum(), (q, k, v))
    assert [row["id"] for row in tool.result()["ops"]] == ["/softmax:0"]
    assert torch.allclose(output, expected, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, wanted, strict=True))


def test_a_query_without_any_key_left_keeps_its_own() -> None:
    """A window: each query sees two keys, which may both be pruned."""
    q, k, v = operands()
    visible = torch.zeros(7, 10, dtype=torch.bool)
    for row in range(7):
        visible[row, row : row + 2] = True
    for mask in visible, torch.zeros(7, 10).masked_fill(~visible, float("-inf")):
        with amanda.apply(PruneTool(method="attention", sparsity=0.9)):
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert torch.isfinite(output).all()
        # One key of ten stays; it is in the window of two queries at most.
        same = (output - dense).abs().amax((1, 3)) < 1e-6
        assert (same.sum(1) >= 5).all()
        assert not same.all()


@pytest.mark.parametrize("name", ["bert", "vit_timm", "vit"])
def test_attention_of_real_models_is_pruned(name: str) -> None:
    model, inputs = models.build(name)
    tool = PruneTool(method="attention", sparsity=0.5)
    with amanda.apply(tool):
        models.loss(model(**inputs)).backward()
    assert len(tool.result()["ops"]) == 2
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_attention_written_out_in_a_real_model_agrees_with_the_fused_one() -> None:
    fused, inputs = models.build("bert", training=False)
    plain = copy.deepcopy(fused)
    plain.set_attn_implementation("eager")
    outputs = []
    for model in fused, plain:
        tool = PruneTool(method="attention", sparsity=0.5)
        with amanda.apply(tool), torch.no_grad():
            outputs.append(model(**inputs).logits)
        assert len(tool.result()["ops"]) == 2
    assert torch.allclose(*outputs, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(outputs[0], fused(**inputs).logits, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_that_is_causal_by_its_mask_is_left_alone(fused: bool) -> None:
    """It runs as it is, and is listed."""
    q, k, v = (t[:, :, :7].detach() for t in operands())
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -3e38)

    def run() -> Any:
        if fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (q @ k.mT / 8**0.5 + mask).softmax(-1) @ v

    expected, tool = run(), PruneTool(method="attention")
    with amanda.apply(tool):
        assert torch.equal(run(), expected)
    result = tool.result()
    assert result["ops"] == []
    assert result["summary"]["ops"] == 0
    assert "it is causal" in result["summary"]["skipped"][0]["reason"]


def test_what_is_no_attention_is_skipped_with_the_reason() -> None:
    tool = PruneTool(method="attention")
    q, k, v = operands()
    with amanda.apply(tool), torch.no_grad():
        F.scaled_dot_product_attention(q, k[:, :, :7], v[:, :, :7], is_causal=True)
        nn.Linear(8, 3)(torch.rand(2, 8)).softmax(-1)
        nn.Linear(8, 3)(torch.rand(2, 5, 8)).softmax(-1)
    reasons = [row["reason"] for row in tool.result()["summary"]["skipped"]]
    assert reasons == [
        "it is causal: the choice of keys would depend on later queries",
        "it is not a softmax over keys",
        "its input is not a product of queries and keys",
    ]


def test_attention_with_a_native_fast_path_is_pruned_in_inference() -> None:
    """``nn.MultiheadAttention`` runs unfused where the tool prunes its attention weights."""
    tool, x = PruneTool(method="attention"), torch.rand(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        vanilla = attention(x, x, x)[0]
        with amanda.apply(tool):
            assert not torch.equal(attention(x, x, x)[0], vanilla)
    result = tool.result()
    assert [row["id"] for row in result["ops"]] == ["MultiheadAttention/softmax:0"]
    assert result["summary"]["skipped"] == []
