"""The samples of a pass, and its tokens, whatever the order of the data of a module of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.flops import FlopsTool

BATCH, STEPS, WIDTH = 3, 5, 8


class Embedded(nn.Module):
    """Tokens into a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(10, WIDTH), inner

    def forward(self, x: Any) -> Any:
        return self.inner(self.words(x))


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def tokens(*sizes: int) -> Any:
    return torch.randint(0, 10, sizes)


def packed() -> Any:
    return nn.utils.rnn.pack_sequence([torch.randn(n, WIDTH) for n in (4, 2, 1)])


def samples_of(model: nn.Module, x: Any) -> tuple[Any, Any]:
    """The batch, and the samples of two passes."""
    tool = FlopsTool()
    with amanda.apply(tool):
        model(x)
        model(x)
    return tool.result()["summary"]["batch"], tool.running_figures().get("samples")


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_alone_has_the_samples_of_its_batch(cls: Any) -> None:
    """In either order of its data, of packed sequences, and of one sequence without a batch."""
    positions_first = torch.randn(STEPS, BATCH, WIDTH)
    assert samples_of(cls(WIDTH, 4), positions_first) == (BATCH, 2 * BATCH)
    batch_first = cls(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True)
    assert samples_of(batch_first, torch.randn(BATCH, STEPS, WIDTH)) == (BATCH, 2 * BATCH)
    assert samples_of(cls(WIDTH, 4), packed()) == (3, 6)
    assert samples_of(cls(WIDTH, 4), torch.randn(STEPS, WIDTH)) == (1, 2)


@pytest.mark.parametrize("cls", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_cell_alone_has_the_samples_of_its_batch(cls: Any) -> None:
    """Of one call."""
    assert samples_of(cls(WIDTH, 4), torch.randn(BATCH, WIDTH)) == (BATCH, 2 * BATCH)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "lstm"])
def test_samples_of_data_with_positions_first_are_those_of_the_batch(
    kind: str, batch_first: bool
) -> None:
    """Attention and recurrent layers tell which size of their model's data is the batch."""
    inner = (
        encoder(batch_first) if kind == "encoder" else nn.LSTM(WIDTH, 4, batch_first=batch_first)
    )
    sizes = (BATCH, STEPS) if batch_first else (STEPS, BATCH)
    assert samples_of(Embedded(inner), tokens(*sizes)) == (BATCH, 2 * BATCH)
    if kind == "encoder":
        assert samples_of(inner, torch.randn(*sizes, WIDTH)) == (BATCH, 2 * BATCH)


@pytest.mark.parametrize(
    ("model", "x"),
    [(nn.Linear(WIDTH, 2), torch.randn(WIDTH)), (nn.Conv2d(3, 4, 3), torch.randn(3, 8, 8))],
)
def test_data_without_a_batch_are_one_sample(model: nn.Module, x: Any) -> None:
    """A vector, and an image by itself; their first size is not that of a batch."""
    assert samples_of(model, x) == (1, 2)
    assert samples_of(model, torch.stack([x, x])) == (2, 4)
