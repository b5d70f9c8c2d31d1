"""A ViT, a Llama and ResNet-50, built inside of a script that trains them: operations and bytes of
activations of a step by a count by hand, and the same in ``summary``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import amanda
from amanda_tools.flops import FlopsTool
from tests import torchvision_ops  # noqa: F401 - before torchvision

# isort: split
import torchvision
from torchvision.models.resnet import Bottleneck

BATCH, WIDTH, HEADS, INNER, LAYERS, CLASSES = 2, 16, 4, 32, 2, 5
PATCH, IMAGE, TOKENS = 4, 8, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*qkv.unbind())
        return self.out(x.transpose(1, 2).reshape(batch, length, WIDTH))


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        count = (IMAGE // PATCH) ** 2 + 1
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, count, WIDTH))
        self.blocks = nn.Sequential(*(ViTBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Any) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def rotated(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        normed, size = self.first(x), WIDTH // HEADS
        q, k, v = (
            part(normed).view(len(x), -1, heads, size).transpose(1, 2)
            for part, heads in ((self.q, HEADS), (self.k, HEADS // 2), (self.v, HEADS // 2))
        )
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(read.transpose(1, 2).reshape(x.shape))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        angles = torch.arange(TOKENS)[:, None] * torch.ones(WIDTH // HEADS)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)).flatten(0, 1)


def vit_by_hand() -> tuple[int, int, int]:
    """Multiply-accumulates forward and backward, and elements of activations, of a batch."""
    patches = (IMAGE // PATCH) ** 2
    length = patches + 1
    stem = patches * 3 * PATCH**2 * WIDTH
    attention = 2 * length**2 * WIDTH
    dense = LAYERS * length * (4 * WIDTH**2 + 2 * WIDTH * INNER) + WIDTH * CLASSES
    forward = stem + dense + LAYERS * attention
    # No gradient of the images; the scores are computed again.
    backward = stem + 2 * dense + LAYERS * attention * 5 // 2
    block = length * (3 * WIDTH + 7 * WIDTH + 2 * INNER)
    elements = (patches + 2 * length) * WIDTH + LAYERS * block + length * WIDTH + CLASSES
    return BATCH * forward, BATCH * backward, BATCH * elements


def llama_by_hand() -> tuple[int, int, int]:
    """The same."""
    attention = 2 * TOKENS**2 * WIDTH
    dense = LAYERS * TOKENS * (3 * WIDTH**2 + 3 * WIDTH * INNER) + TOKENS * WIDTH * CLASSES
    forward, backward = dense + LAYERS * attention, 2 * dense + LAYERS * attention * 5 // 2
    # Of each rotation two products, a sum, a part that is negated, and what is put together.
    rotations = (WIDTH + WIDTH // 2) * 9 // 2
    block = (
        2 * WIDTH + 2 * WIDTH + rotations + 2 * WIDTH + WIDTH + 2 * WIDTH + 4 * INNER + 2 * WIDTH
    )
    elements = TOKENS * (WIDTH + LAYERS * block + WIDTH + CLASSES)
    return BATCH * forward, BATCH * backward, BATCH * elements


def resnet_by_hand() -> tuple[int, int, int]:
    """The same, from the shapes of the modules' outputs; sums and rectifiers write in place."""
    net, macs, elements = torchvision.models.resnet50(num_classes=CLASSES), 0, 0
    stem = 0

    def see(module: Any, _: Any, output: Any) -> None:
        nonlocal macs, elements, stem
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            added = output.numel() * module.weight[0].numel()
            macs, stem = macs + added, stem or added
        elements += output.numel()

    for module in net.modules():
        # A block ends with the sum, before its last rectifier.
        if not list(module.children()) or isinstance(module, Bottleneck):
            module.register_forward_hook(see)
    with torch.no_grad():
        net(torch.rand(BATCH, 3, 32, 32))
    return macs, 2 * macs - stem, elements


def images(size: int) -> Callable[[], Any]:
    return lambda: torch.rand(BATCH, 3, size, size)


MODELS: dict[str, tuple[Any, Any, int, Any]] = {
    "vit": (ViT, images(IMAGE), BATCH, vit_by_hand),
    "llama": (
        Llama,
        lambda: torch.randint(CLASSES, (BATCH, TOKENS)),
        BATCH * TOKENS,
        llama_by_hand,
    ),
    "resnet50": (
        lambda: torchvision.models.resnet50(num_classes=CLASSES),
        images(32),
        BATCH,
        resnet_by_hand,
    ),
}
"""What builds the model, its data, how many labels it has, and the count."""


def train(name: str, steps: int) -> None:
    build, data, labels, _ = MODELS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data()), torch.zeros(labels, dtype=torch.long)).backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_figures_of_a_count_by_hand(name: str, steps: int) -> None:
    """However many steps there are; building is not part of them."""
    forward, backward, elements = MODELS[name][3]()
    flops, summary = FlopsTool(), amanda.tools.load("summary")()
    with amanda.apply(flops, summary):
        train(name, steps)
    found = flops.result()["summary"]
    step = found["per_step"]
    assert (step["flops"], step["flops_backward"]) == (2 * forward, 2 * backward)
    assert not {"min", "max"} & step.keys()
    # The loss is one number, outside of the model.
    assert found["activation_bytes"] == 4 * (elements + 1)
    (model,) = summary.summary()["models"].values()
    assert (model["flops"], model["activation_bytes"]) == (2 * forward, 4 * elements)
    assert model["passes"] == steps
