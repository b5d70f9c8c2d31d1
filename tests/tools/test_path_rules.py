"""The extraction rules of ``path`` on PyTorch, against loops over neurons."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from amanda_tools.path import PathTool, similarity
from tests.tools import path_oracle as oracle
from tests.tools.path_oracle import applied, places


def assert_equal(
    tool: PathTool, layers: list[dict[str, oracle.Layer]], ops: dict[str, str], source: str
) -> None:
    """Of each input of the batch the tool's masks are those of the loops."""
    assert tool.summary()["unknown_ops"] == {}
    assert len(tool.paths) == len(layers)
    for path, expected in zip(tool.paths, layers, strict=True):
        found = oracle.extract(expected, tool.options.theta)
        for op_id, name in ops.items():
            part = path.ops[op_id]
            assert part.neurons is not None
            assert places(part.neurons) == found.neurons.get(name, set()), op_id
            if name in expected:
                assert part.critical == found.synapses[name], op_id
                assert part.synapses is not None
                assert len(part.synapses) == part.critical
            if part.weights is not None:
                assert places(part.weights) == found.weights[name], op_id
        [mask] = path.inputs.values()
        assert places(mask) == found.neurons[source]


def dense(tensor: str, x: Any, layer: nn.Linear) -> oracle.Layer:
    """A linear layer on a tensor."""
    with torch.no_grad():
        value = layer(torch.tensor(x)).numpy()
    return oracle.linear(tensor, x, layer.weight.detach().numpy(), value)


# -- against loops -----------------------------------------------------------------

CONVOLUTIONS = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "same": {"padding": "same", "kernel_size": 4},
    "no bias": {"bias": False, "padding": 1},
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("rank", [1, 2])
def test_convolutions(name: str, rank: int) -> None:
    """With a ReLU and a linear layer behind, two images."""
    options: dict[str, Any] = {"kernel_size": 3, **CONVOLUTIONS[name]}
    torch.manual_seed(0)
    conv = [nn.Conv1d, nn.Conv2d][rank - 1](4, 8, **options).double()
    x = torch.rand(2, 4, *[7, 6][:rank]).double()
    head = nn.Linear(conv(x)[0].numel(), 3).double()
    tool = applied(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head), x, theta=0.6)
    kernel = options["kernel_size"]
    same = (kernel - 1) // 2
    padding = [same if options.get("padding") == "same" else options.get("padding", 0)] * rank
    layers = []
    for one in x:
        made = conv(one[None])[0].detach().numpy()
        active = np.maximum(made, 0)
        flat = active.reshape(-1)
        layers.append(
            {
                "conv": oracle.convolution(
                    "x", one.numpy(), conv.weight.detach().numpy(), made,
                    options.get("stride", 1), padding, options.get("dilation", 1),
                    options.get("groups", 1),
                ),
                "relu": oracle.relu("conv", active),
                "flat": oracle.moved("relu", flat, lambda p: _unravel(p, active.shape)),  # noqa: B023
                "head": dense("flat", flat, head),
            }
        )  # fmt: skip
    names = {f"0/conv{rank}d:0": "conv", "1/relu:0": "relu", "2/flatten:0": "flat"}
    ops = {f"Sequential.{key}": value for key, value in names.items()}
    assert_equal(tool, layers, {**ops, "Sequential.3/linear:0": "head"}, "x")


def _unravel(place: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(place[0], shape))


@torch.no_grad()
def by_hand(norm: nn.BatchNorm2d, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of each channel, and the output."""
    mean, var = norm.running_mean, norm.running_var
    if norm.training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    scale = norm.weight / (var + norm.eps).sqrt()
    return scale, (x - mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_is_folded(training: bool) -> None:
    """A convolution, a batch norm with scales of both signs, a ReLU: as one convolution."""
    torch.manual_seed(1)
    conv, norm = nn.Conv2d(3, 6, 3).double(), nn.BatchNorm2d(6).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    norm.train(training)
    head = nn.Linear(6 * 9, 4).double()
    x = torch.rand(3, 3, 5, 5).double()
    scale, normed = by_hand(norm, conv(x).detach())
    tool = applied(nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), head), x)
    layers = []
    for one, value in zip(x, normed.numpy(), strict=True):
        flat = np.maximum(value, 0).reshape(-1)
        layers.append(
            {
                "conv": oracle.convolution(
                    "x", one.numpy(), conv.weight.detach().numpy(), value, 1, (0, 0), 1, 1,
                    scale.detach().numpy(),
                ),
                "relu": oracle.relu("conv", np.maximum(value, 0)),
                "flat": oracle.moved("relu", flat, lambda p: _unravel(p, (6, 3, 3))),
                "head": dense("flat", flat, head),
            }
        )  # fmt: skip
    ops = {"0/conv2d:0": "conv", "2/relu:0": "relu", "4/linear:0": "head"}
    assert_equal(tool, layers, {f"Sequential.{k}": v for k, v in ops.items()}, "x")
    for path in tool.paths:
        conv_mask, norm_mask = (
            path.ops[f"Sequential.{name}"].neurons for name in ("0/conv2d:0", "1/batch_norm:0")
        )
        assert conv_mask is not None
        assert norm_mask is not None
        np.testing.assert_array_equal(conv_mask.array, norm_mask.array)


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 0)])
def test_pooling(kind: str, size: int, stride: int, padding: int) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 3, 6, 6).double()
    layer = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}[kind](size, stride, padding)
    head = nn.Linear(layer(x)[0].numel(), 4).double()
    tool = applied(nn.Sequential(layer, nn.Flatten(), head), x)
    layers = []
    for one in x:
        value = layer(one[None])[0].numpy()
        flat = value.reshape(-1)
        layers.append(
            {
                "pool": oracle.pooling(
                    "x", one.numpy(), value, size, stride, padding, largest=kind == "max"
                ),
                "flat": oracle.moved("pool", flat, lambda p: _unravel(p, value.shape)),  # noqa: B023
                "head": dense("flat", flat, head),
            }
        )  # fmt: skip
    name = {"max": "max_pool2d", "average": "avg_pool2d"}[kind]
    ops = {f"Sequential.0/{name}:0": "pool", "Sequential.2/linear:0": "head"}
    assert_equal(tool, layers, ops, "x")


def test_adaptive_pooling_with_overlapping_windows() -> None:
    """From 5 to 3 places: windows of 2 to 3, which share places."""
    torch.manual_seed(3)
    x = torch.randn(1, 2, 5, 5).double()
    head = nn.Linear(18, 3).double()
    tool = applied(nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), head), x)
    value = functional.adaptive_avg_pool2d(x, 3)[0].numpy()
    edges = [(i * 5 // 3, -(-(i + 1) * 5 // 3)) for i in range(3)]
    synapses: dict[tuple[int, ...], list[oracle.Synapse]] = {}
    for c, i, j in itertools.product(range(2), range(3), range(3)):
        inside = itertools.product(range(*edges[i]), range(*edges[j]))
        picked = [(c, u, v) for u, v in inside]
        synapses[c, i, j] = [
            oracle.Synapse("x", p, None, float(x[0][p]) / len(picked)) for p in picked
        ]
    flat = value.reshape(-1)
    layers = {
        "pool": oracle.Layer(value, synapses),
        "flat": oracle.moved("pool", flat, lambda p: _unravel(p, (2, 3, 3))),
        "head": dense("flat", flat, head),
    }
    ops = {"Sequential.0/adaptive_avg_pool2d:0": "pool", "Sequential.2/linear:0": "head"}
    assert_equal(tool, [layers], ops, "x")


class Branches(nn.Module):
    """Two branches of linear layers that meet, moved about on the way."""

    def __init__(self, meet: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(5, 6)
        self.head = nn.Linear(24 if meet == "cat" else 12, 3)
        self.meet = meet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.left(x), self.right(x)
        if self.meet == "cat":
            y = torch.cat([a, b], dim=-1)
        else:
            y = {"add": torch.add, "sub": torch.sub}[self.meet](a, b)
        return self.head(y.transpose(1, 2).reshape(len(x), -1))


def met_by_hand(meet: str, a: Any, b: Any) -> oracle.Layer:
    """Where two branches meet."""
    if meet != "cat":
        sign = 1 if meet == "add" else -1
        return oracle.total({"a": a, "b": b}, a + sign * b, [1, sign])
    synapses = {
        (i, j): [oracle.Synapse("a" if j < 6 else "b", (i, j % 6), None, 1.0)]
        for i, j in itertools.product(range(2), range(12))
    }
    return oracle.Layer(np.concatenate([a, b], axis=-1), synapses, takes_all=True)


@pytest.mark.parametrize("meet", ["add", "sub", "cat"])
def test_branches(meet: str) -> None:
    """Residual sums sort both branches; concatenation, transposition and reshaping move."""
    torch.manual_seed(4)
    net = Branches(meet).double()
    x = torch.randn(3, 2, 5).double()
    tool = applied(net, x, theta=0.7)
    assert tool.summary()["unknown_ops"] == {}
    for one, path in zip(x, tool.paths, strict=True):
        a, b = (dense("x", one.numpy(), layer) for layer in (net.left, net.right))
        meeting = met_by_hand(meet, a.values, b.values)
        flat, shape = meeting.values.T.reshape(-1), meeting.values.T.shape
        moved = oracle.moved("met", flat, lambda p: _unravel(p, shape)[::-1])  # noqa: B023
        layers = {"a": a, "b": b, "met": meeting, "flat": moved}
        found = oracle.extract({**layers, "head": dense("flat", flat, net.head)}, 0.7)
        ops = {"left/linear:0": "a", "right/linear:0": "b", f"/{meet}:0": "met"}
        for key, name in {**ops, "head/linear:0": "head"}.items():
            part = path.ops[f"Branches{'' if key[0] == '/' else '.'}{key}"]
            assert part.neurons is not None
            assert places(part.neurons) == found.neurons[name], key
            assert part.critical == found.synapses[name], key
        # Each branch reads the input for itself.
        read_by = set.union(*(places(mask) for mask in path.inputs.values()))
        assert read_by == found.neurons["x"]


class Product(nn.Module):
    """The product of two activations, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) @ self.right(x).transpose(-1, -2)


def test_products_of_activations() -> None:
    """Both factors of a critical product are critical."""
    torch.manual_seed(5)
    net = Product().double()
    x = torch.randn(1, 5, 4).double()
    # With one row of scores after another, each has its own class.
    tool = applied(net, x)
    [path] = tool.paths
    assert path.label is None
    a, b = (m(x[0]).detach().numpy() for m in (net.left, net.right))
    layer = oracle.matmul("a", a, "b", b.T, a @ b.T)
    wanted_a, wanted_b = set(), set()
    for i, j in enumerate((a @ b.T).argmax(axis=1)):
        for synapse in oracle.greedy(layer.synapses[i, int(j)], float(layer.values[i, j]), 0.5):
            assert synapse.weight is not None
            wanted_a.add(synapse.place)
            wanted_b.add(synapse.weight[::-1])
    left, right = (path.ops[f"Product.{side}/linear:0"].neurons for side in ("left", "right"))
    assert left is not None
    assert right is not None
    assert places(left) == wanted_a
    assert places(right) == wanted_b


def test_fused_attention_is_what_its_parts_are() -> None:
    """Causal attention in one operator, against product, mask, softmax and product."""
    torch.manual_seed(6)
    qkv, head = nn.Linear(8, 24).double(), nn.Linear(8, 3).double()

    class Attention(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.qkv, self.head, self.fused = qkv, head, fused

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(len(x), 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            if self.fused:
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
                scores = q @ k.transpose(-1, -2) / 2
                y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            return self.head(y.transpose(1, 2).reshape(len(x), 5, 8)[:, -1])

    x = torch.randn(2, 5, 8).double()
    one, other = (applied(Attention(fused), x) for fused in (True, False))
    assert one.summary()["unknown_ops"] == other.summary()["unknown_ops"] == {}
    for a, b in zip(one.paths, other.paths, strict=True):
        ops = ("Attention.qkv/linear:0", "Attention.head/linear:0")
        for kind in ("neurons", "weights", "synapses"):
            assert similarity(a, b, kind, ops) == 1
        assert 0 < a.density("weights") < 1


def test_fused_attention_of_a_position_that_sees_nothing() -> None:
    """A row that the mask hides as a whole gives zeros, and nothing is critical for it."""
    torch.manual_seed(6)
    project, head = nn.Linear(8, 8).double(), nn.Linear(8, 3).double()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False

    class Attention(nn.Module):
        def __init__(self, rows: list[int]) -> None:
            super().__init__()
            self.project, self.head, self.rows = project, head, rows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values = self.project(x)
            shown = functional.scaled_dot_product_attention(values, values, values, mask)
            return self.head(shown[:, self.rows].sum(1))

    x = torch.randn(2, 5, 8).double()
    one, other = (applied(Attention(rows), x) for rows in ([0, 1, 2, 3, 4], [0, 1, 3, 4]))
    assert one.summary()["unknown_ops"] == other.summary()["unknown_ops"] == {}
    for a, b in zip(one.paths, other.paths, strict=True):
        op = "Attention.project/linear:0"
        for kind in ("neurons", "weights", "synapses"):
            assert similarity(a, b, kind, (op,)) == 1
        assert 0 < a.density("weights") < 1


class TwoReaders(nn.Module):
    """One sum that two batch norms read, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        for norm, scale, bias in zip(self.norms, (1.0, -2.0), (1.0, -1.5), strict=True):
            nn.init.constant_(norm.weight, scale)
            nn.init.constant_(norm.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.norms[0](x) - self.norms[1](x))


def test_what_two_readers_demand_is_explained_by_its_own_value() -> None:
    """A batch norm is folded where it is the only one; else the neuron has to explain itself."""
    torch.manual_seed(14)
    net = TwoReaders().double().eval()
    x = torch.randn(6, 6).double()
    kinds = set()
    tool = applied(net, x, theta=0.9)
    for one, path in zip(x, tool.paths, strict=True):
        value = net.first(one).detach().numpy()
        demands = {}
        for i, norm in enumerate(net.norms):
            after = norm(torch.tensor(value)[None])[0].detach().numpy()
            mask = path.ops[f"TwoReaders.norms.{i}/batch_norm:0"].neurons
            assert mask is not None
            slope = norm.weight[0].item() / (1 + norm.eps) ** 0.5
            for (place,) in places(mask):
                demands.setdefault(place, []).append(after[place] / slope)
        kinds |= {len(wanted) for wanted in demands.values()}
        layer = dense("x", one.numpy(), net.first)
        expected = set()
        for place, wanted in demands.items():
            target = wanted[0] if len(wanted) == 1 else value[place]
            picked = oracle.greedy(layer.synapses[place,], float(target), 0.9)
            expected |= {synapse.weight for synapse in picked}
        weights = path.ops["TwoReaders.first/linear:0"].weights
        assert weights is not None
        assert places(weights) == expected
    assert kinds == {1, 2}
