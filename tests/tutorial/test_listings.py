"""The tutorial's cells and the paper's listings, as they are printed there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import amanda
from tests import torchvision_ops  # noqa: F401 - cells import torchvision

_PRINTED = (Path(__file__).parent / "seed_cells.txt").read_text(encoding="utf-8")
_PARTS = re.split(r"^# %% In \[(\d+)\]\n", _PRINTED, flags=re.MULTILINE)
CELLS = {int(number): code for number, code in zip(_PARTS[1::2], _PARTS[2::2], strict=True)}


def run_cells(*numbers: int, namespace: dict[str, Any] | None = None) -> list[str]:
    """Run cells in one namespace; the lines that the last of them has printed."""
    namespace = {} if namespace is None else namespace
    for number in numbers:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(CELLS[number], f"cell {number}", "exec"), namespace)
    return printed.getvalue().splitlines()


# -- the tutorial's cells ---------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "printed"),
    [
        ((1, 2, 3, 4), "Calls of conv2d op: 4"),
        ((1, 3, 5, 6), "Calls of conv2d op: 4, backward op: 4"),
        ((1, 3, 5, 7), "Calls of conv2d op: 53, backward op: 53"),
        ((1, 3, 5, 8), "Calls of linear op: 73, backward op: 72"),
        ((1, 3, 11, 12, 13), "Execution time of conv2d op: 53, backward op: 53"),
        ((1, 17), "hooking relu"),
        ((1, 3, 11, 12, 17, 18, 19), "Calls of relu op: 1, backward op: 1"),
        ((1, 3, 11, 12, 27), "Call of rnn op: 1, backward op: 16"),
    ],
)
def test_cell_prints(cells: tuple[int, ...], printed: str) -> None:
    """The last of the cells prints what the tutorial says."""
    assert run_cells(*cells) == [printed]


def test_module_hook_misses_the_functional_relu() -> None:
    """Cell 18 prints nothing: a function has no module to hook."""
    assert run_cells(1, 17, 18) == []


@pytest.fixture
def pruning_cells() -> dict[str, Any]:
    """What cells 1, 3, 15 and 16 define."""
    namespace: dict[str, Any] = {}
    run_cells(1, 3, 15, 16, namespace=namespace)
    return namespace


def test_cell_16_as_printed_lacks_an_argument(pruning_cells: dict[str, Any]) -> None:
    """Its tool calls compute_mask without the sparsity; the error says where."""
    model = pruning_cells["ConvNeuralNet"](10)
    with (
        pytest.raises(TypeError, match="sparsity") as raised,
        amanda.apply(pruning_cells["PruningTool"]()),
    ):
        model(torch.rand(1, 3, 32, 32))
    (note,) = raised.value.__notes__
    assert "PruningTool.callback" in note
    assert "ConvNeuralNet.conv_layer1/conv2d:0" in note


# -- Listing 1 --------------------------------------------------------------


def torch_type(context: amanda.OpContext) -> None:
    """A mapping rule as the listings assume it, for PyTorch."""
    context["type"] = context.get_op().__name__
    if context.is_backward():
        backward_type = context.get_backward_op().__name__
        context["backward_type"] = {"ConvolutionBackward0": "conv2d_backward"}.get(
            backward_type, backward_type
        )


def magnitude_mask(tensor: torch.Tensor, sparsity: float = 0.5) -> torch.Tensor:
    """Zero where the smallest magnitudes are, one elsewhere."""
    flat = tensor.abs().flatten()
    mask = torch.ones_like(flat)
    mask[flat.topk(int(sparsity * flat.numel()), largest=False).indices] = 0
    return mask.view_as(tensor)


class Listing1(amanda.Tool):
    """Listing 1, with a body for get_mask, and the gradient of the weight by role.

    As there, ``super().__init__()`` is not called.
    """

    grad_inputs: ClassVar[list[int | str]] = ["weight"]

    def __init__(self) -> None:
        self.depends_on(amanda.tools.mapping.MappingTool(rules=[["pytorch", torch_type]]))
        self.add_inst_for_op(self.instrumentation)
        self.add_inst_for_op(self.backward_instrumentation, backward=True, require_outputs=True)

    def get_mask(self, tensor: torch.Tensor) -> torch.Tensor:
        return magnitude_mask(tensor)

    def instrumentation(self, context: amanda.OpContext) -> None:
        if context["type"] in ["conv2d"]:
            weight = context.get_inputs()[1]
            mask = self.get_mask(weight)
            context["mask"] = mask
            context.insert_before_op(self.mask_forward_weight, inputs=[1], mask=mask)

    def backward_instrumentation(self, context: amanda.OpContext) -> None:
        if context["backward_type"] in ["conv2d_backward"]:
            mask = context["mask"]
            context.insert_after_backward_op(
                self.mask_backward_gradient, grad_inputs=self.grad_inputs, mask=mask
            )

    def mask_forward_weight(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask

    def mask_backward_gradient(self, weight_grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight_grad * mask


class Network(nn.Module):
    """Convolutions with and without bias and stride, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.down = nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(16 * 7 * 7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.twice(torch.relu(self.twice(x))) + x)
        return self.head(self.down(x).flatten(1))


class HandPruned(Network):
    """The same, pruned in its source."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[nn.Conv2d, torch.Tensor] = {}

    def make_masks(self) -> None:
        """Fix the masks, from the weights as they are now."""
        for conv in (self.stem, self.twice, self.down):
            self.masks[conv] = magnitude_mask(conv.weight.detach())

    def convolve(self, conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        """A convolution with the masked weight."""
        weight = conv.weight * self.masks[conv]
        return nn.functional.conv2d(x, weight, conv.bias, conv.stride, conv.padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.convolve(self.stem, x)))
        inner = torch.relu(self.convolve(self.twice, x))
        x = torch.relu(self.convolve(self.twice, inner) + x)
        return self.head(self.convolve(self.down, x).flatten(1))


def train(model: nn.Module, steps: int = 4) -> list[float]:
    """Several steps of SGD on fixed data; the losses."""
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    losses = []
    for _ in range(steps):
        images = torch.rand(3, 3, 16, 16, generator=generator)
        labels = torch.randint(0, 5, (3,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def pair() -> tuple[Network, HandPruned]:
    """A network, and its copy that is pruned in its source."""
    torch.manual_seed(3)
    model, by_hand = Network(), HandPruned()
    by_hand.load_state_dict(model.state_dict())
    by_hand.make_masks()
    return model, by_hand


def test_listing_1_equals_pruning_by_hand(pair: tuple[Network, HandPruned]) -> None:
    """After several SGD steps every weight, buffer and loss is bit-identical."""
    model, by_hand = pair
    with amanda.apply(Listing1()):
        losses = train(model)
    assert losses == train(by_hand)
    state, expected = model.state_dict(), by_hand.state_dict()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def test_listing_1_changes_the_training(pair: tuple[Network, HandPruned]) -> None:
    """The comparison above would notice a tool that does nothing."""
    model, by_hand = pair
    assert train(model) != train(by_hand)


def test_listing_1_as_printed_masks_another_gradient(pair: tuple[Network, HandPruned]) -> None:
    """Position 0 of ConvolutionBackward0 is the gradient of its input, not of the weight.

    The paper's position is right for TensorFlow's Conv2DBackpropFilter. Here the
    first convolution's input has no gradient, and that of the last has another
    shape than the mask.
    """

    class AsPrinted(Listing1):
        grad_inputs: ClassVar[list[int | str]] = [0]

    model, _ = pair
    with (
        pytest.raises((RuntimeError, TypeError, amanda.errors.AmandaError)),
        amanda.apply(AsPrinted()),
    ):
        train(model, steps=1)
