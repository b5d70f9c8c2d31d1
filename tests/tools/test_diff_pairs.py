"""``diff`` between what is not alike: compiled code, another precision, a port with its ResNet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
import torch
from torch import nn

import amanda
from amanda_tools.diff import DiffTool
from amanda_tools.stats import StatsTool
from tests import models


def recorded(run: Callable[[], Any], *drivers: str, **options: Any) -> DiffTool:
    tool = DiffTool(**options)
    with amanda.apply(tool, **({"drivers": drivers} if drivers else {})):
        run()
    return tool


class Net(nn.Module):
    """A few layers, one of which can be detuned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))) * self.factor).softmax(-1)


# -- compiled -----------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The compiler that needs no C++ compiler, and none of what was compiled before."""
    monkeypatch.setenv("AMANDA_TORCH_COMPILER", "aot_eager")
    torch.compiler.reset()
    yield "aot_eager"
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_eager_against_compiled(compiler: str) -> None:
    """The values inside of the compiled code, which is run; a planted difference is found there."""
    torch.manual_seed(0)
    net, x = Net().eval(), torch.rand(3, 4)
    reference = recorded(lambda: net(x))
    plain = torch.compile(net, backend=compiler)(x)
    torch.compiler.reset()
    results: list[torch.Tensor] = []
    compiled = torch.compile(net)
    only = {"reference": reference, "tensors": ["activations"]}
    tool = recorded(lambda: results.extend([compiled(x), compiled(x)]), "torch-graph", **only)
    summary = tool.summary()
    assert (summary["compared"], summary["agreeing"], summary["first"]) == (6, 6, None)
    assert {record.id.partition("/")[0] for record in (p.record for p in tool.pairs())} == {
        "Net", "Net.first", "Net.norm", "Net.second",
    }  # fmt: skip
    # The first run is that of eager mode, in which the graph's operators are met.
    assert torch.equal(results[1], plain)
    net.factor = 2.02
    torch.compiler.reset()
    changed = recorded(lambda: torch.compile(net)(x), "torch-graph", **only)
    assert changed.summary()["first"]["reference"] == "Net/mul:0"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_gradients_pass_what_looks_at_compiled_code(compiler: str) -> None:
    """They are those of the compiled code without the tool, to the last bit."""
    torch.manual_seed(0)
    net, x = Net(), torch.rand(3, 4)
    other = copy.deepcopy(net)
    torch.compile(other, backend=compiler)(x)[:, 0].sum().backward()
    torch.compiler.reset()
    tool = StatsTool(tensors=("activations", "weights"))
    compiled = torch.compile(net)
    with amanda.apply(tool, drivers=["torch-graph"]):
        compiled(x)
        compiled(x)[:, 0].sum().backward()
    assert tool.summary()["tensors"] == {"activations": 9, "weights": 6, "gradients": 0}
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


@pytest.mark.filterwarnings("ignore:a compiled function runs operator by operator")
def test_what_looks_at_compiled_code_changes_no_stride(compiler: str) -> None:
    """Code that runs operator by operator has its own results, to the last bit."""
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(2, 8, 16).mT
    model = torch.compile(lambda: net(x, x, x, need_weights=False)[0], backend=compiler)
    with torch.no_grad():
        wanted = model()
        with amanda.apply(StatsTool(), drivers=["torch-graph"]):
            found = [model(), model()]
    assert [torch.equal(each, wanted) for each in found] == [True, True]


# -- precision ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["converted", "autocast"])
def test_one_precision_against_another(how: str) -> None:
    """Every operator has its like; the error is that of bfloat16, and is not hidden."""
    model, inputs = models.build("bert", training=False)

    def run() -> Any:
        with torch.no_grad():
            return model(**inputs)

    reference = recorded(run)
    if how == "converted":
        model.bfloat16()
        tool = recorded(run, reference=reference, tolerance=0.05)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            tool = recorded(run, reference=reference, tolerance=0.05)
    found = tool.summary()
    assert found["only_here"] == found["only_in_reference"] == []
    assert found["agreeing"] == found["compared"] > 50
    assert 1e-4 < max(pair.relative for pair in tool.pairs()) < 0.05


# -- a port -------------------------------------------------------------------


class Block(nn.Module):
    """A strided residual block as torchvision has it: no biases, padding of one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(3, 8, 1, stride=2, bias=False)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)) + self.down(x))
        return self.fc(y.mean((2, 3)))


def keras_block(net: Block) -> Any:
    """The same variant: padding by hand, PyTorch's epsilon; with the same weights."""
    layers = tf.keras.layers
    entry = tf.keras.Input((9, 9, 3))
    conv1 = layers.Conv2D(8, 3, 2, use_bias=False)
    conv2 = layers.Conv2D(8, 3, padding="same", use_bias=False)
    bn1, bn2 = layers.BatchNormalization(epsilon=1e-5), layers.BatchNormalization(epsilon=1e-5)
    down, head = layers.Conv2D(8, 1, 2, use_bias=False), layers.Dense(5)
    y = layers.ReLU()(bn1(conv1(layers.ZeroPadding2D(1)(entry))))
    y = layers.ReLU()(layers.Add()([bn2(conv2(y)), down(entry)]))
    model = tf.keras.Model(entry, head(layers.GlobalAveragePooling2D()(y)))
    for layer, module in ((conv1, net.conv1), (conv2, net.conv2), (down, net.down)):
        layer.set_weights([module.weight.detach().numpy().transpose(2, 3, 1, 0)])
    for layer, norm in ((bn1, net.bn1), (bn2, net.bn2)):
        found = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        layer.set_weights([tensor.detach().numpy() for tensor in found if tensor is not None])
    head.set_weights([net.fc.weight.detach().numpy().T, net.fc.bias.detach().numpy()])
    return model


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_residual_network_against_its_port(mode: str) -> None:
    """Convolutions, activations, the sum and the head, channels last against channels first."""
    torch.manual_seed(0)
    net = Block().eval()
    for norm in (net.bn1, net.bn2):
        norm.running_mean = torch.rand(8)
        norm.running_var = torch.rand(8) + 0.5
    image = torch.rand(2, 3, 9, 9)
    port = keras_block(net)
    data = tf.constant(image.permute(0, 2, 3, 1).numpy())
    run = tf.function(lambda x: port(x, training=False)) if mode == "function" else port
    options = {"tensors": "activations", "ops": ("conv2d", "relu", "linear")}
    reference = recorded(lambda: net(image), **options)
    found = recorded(lambda: run(data), reference=reference, tolerance=1e-5, **options)
    assert {pair.record.type for pair in found.pairs()} == {"conv2d", "relu", "linear"}
    # TensorFlow adds a bias in an operator of its own.
    head = next(pair for pair in found.pairs() if pair.record.type == "linear")
    others = [pair for pair in found.pairs() if pair is not head]
    assert len(others) == 5
    assert all(pair.agrees for pair in others)
    assert {pair.note for pair in others} == {"channels last here"}
