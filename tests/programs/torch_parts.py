"""What the programs of PyTorch share: data, a loop of training, and what is compared after it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tests.torchvision_ops  # noqa: F401 - before whatever imports torchvision


def tokens(batch: int, length: int, vocabulary: int = 100) -> torch.Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, vocabulary, (batch, length))


def digits(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: images of shape (count, 1, 8, 8), and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = torch.tensor(images[:count] / 16, dtype=torch.float32)
    return scaled.reshape(-1, 1, 8, 8), torch.tensor(labels[:count])


def trained(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    steps: int = 3,
    clip: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Train for some steps, with AdamW unless told; losses, gradients, weights, buffers, state."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(wanted, lr=1e-2)
    model.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(wanted, clip)
        optimizer.step()
        losses.append(value.detach().clone())
    return losses, grown(model), list(optimizer.state_dict()["state"].values())


def grown(model: nn.Module) -> dict[str, Any]:
    """The gradients, weights and buffers that a model has now."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"gradients": gradients, "weights": dict(model.state_dict())}


@contextlib.contextmanager
def saved_bert(model: Any, config: Any, tokenizer: Any) -> Iterator[Path]:
    """A folder with a small BERT of random weights, and a tokenizer of the words w0 to w49."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(50))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        tokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model(config(vocab_size=len(words), intermediate_size=64, **size)).save_pretrained(folder)
        yield folder
