"""The samples of a pass, and its tokens: the first size of what a module of PyTorch is given."""

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


def lstm(batch_first: bool) -> nn.Module:
    return nn.LSTM(WIDTH, 4, batch_first=batch_first)


def tokens(*sizes: int) -> Any:
    return torch.randint(0, 10, sizes)


def passes(model: Any, *inputs: Any, **options: Any) -> dict[str, Any]:
    """The summary of two passes."""
    tool = FlopsTool(**options)
    with amanda.apply(tool), torch.no_grad():
        model(*inputs)
        model(*inputs)
    summary: dict[str, Any] = tool.result()["summary"]
    return summary


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(WIDTH, 2), torch.rand(BATCH, WIDTH)),
        (nn.Conv2d(3, 4, 3), torch.rand(BATCH, 3, 6, 6)),
        (nn.LSTMCell(WIDTH, 4), torch.rand(BATCH, WIDTH)),
        (lstm(batch_first=True), torch.rand(BATCH, STEPS, WIDTH)),
        (encoder(batch_first=True), torch.rand(BATCH, STEPS, WIDTH)),
    ],
)
def test_samples_are_the_first_size_of_the_input(model: nn.Module, x: Any) -> None:
    """Of each pass, with operations of one sample; there are no tokens without integers."""
    found = passes(model, x)
    assert found["batch"] == found["per_step"]["samples"] == BATCH
    assert found["per_sample"]["flops"] == found["per_step"]["flops"] / BATCH
    assert found["per_token"] is None


def test_a_packed_sequence_has_unknown_samples() -> None:
    """Its first size is the sum of the lengths."""
    packed = nn.utils.rnn.pack_sequence([torch.rand(length, WIDTH) for length in (4, 2)])
    assert "samples" not in passes(lstm(batch_first=True), packed)["per_step"]


def test_tokens_are_the_integers_of_the_input() -> None:
    """Of an input of two axes."""
    found = passes(Embedded(encoder(batch_first=True)), tokens(BATCH, STEPS))
    assert found["per_step"]["samples"] == BATCH
    assert found["per_step"]["tokens"] == BATCH * STEPS
    assert found["per_token"]["flops"] == found["per_sample"]["flops"] / STEPS


@pytest.mark.parametrize("layer", [lstm, encoder])
def test_data_with_positions_first_have_unknown_samples(layer: Any) -> None:
    """A part of the model says so; the figure is left out, and the option gives it."""
    model, x = Embedded(layer(batch_first=False)), tokens(STEPS, BATCH)
    found = passes(model, x)
    assert found["batch"] is found["per_sample"] is found["per_token"] is None
    assert not {"samples", "tokens"} & found["per_step"].keys()
    given = passes(model, x, samples=BATCH)
    assert given["per_step"]["samples"] == BATCH
    assert given["per_sample"]["flops"] == given["per_step"]["flops"] / BATCH


def test_rows_that_are_no_samples_leave_the_figure_out() -> None:
    """No output of the pass has a size that is a multiple of their number."""
    for begins, samples in (torch.arange(12), 12), (torch.tensor([0, 3, 7]), None):
        found = passes(nn.EmbeddingBag(10, WIDTH), tokens(12), begins)
        assert found["batch"] == found["per_step"].get("samples") == samples


def test_one_pass_of_unknown_samples_leaves_the_figure_out() -> None:
    """A number that holds for some of the passes only is not shown."""
    tool, model = FlopsTool(), nn.Linear(WIDTH, 2)
    with amanda.apply(tool), torch.no_grad():
        model(torch.rand(BATCH, WIDTH))
        lstm(batch_first=False)(torch.rand(STEPS, BATCH, WIDTH))
    assert tool.result()["summary"]["batch"] is None
    assert "samples" not in tool.running_figures()


def test_modules_that_are_dropped_are_given_the_same_samples() -> None:
    """As modules that the program keeps: the next one may be an object with the same ``id()``."""
    tool, x = FlopsTool(), torch.rand(BATCH, WIDTH)
    with amanda.apply(tool), torch.no_grad():
        for _ in range(8):
            nn.Linear(WIDTH, 2)(x)
    assert tool.result()["summary"]["per_sample"]["flops"] == 8 * 2 * WIDTH * 2


def test_a_recomputed_pass_has_no_samples_of_its_own() -> None:
    """What a checkpoint runs again in the backward pass is the same data."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    tool, x = FlopsTool(), torch.rand(BATCH, WIDTH, requires_grad=True)
    with amanda.apply(tool):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert tool.running_figures()["samples"] == BATCH
