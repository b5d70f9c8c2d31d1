"""The models that tests and benchmarks run: real architectures with random weights.

Sizes are small where the architecture allows it; nothing is downloaded::

    model, inputs = models.build("bert")
    models.loss(model(**inputs)).backward()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

import tests.torchvision_ops  # noqa: F401 - before whatever imports torchvision

# isort: split
import timm
import torchvision
import transformers

Inputs = dict[str, Any]
Built = tuple[nn.Module, Inputs]

VOCABULARY = 200


def resnet18(size: int = 32, batch: int = 2) -> Built:
    """torchvision's ResNet-18."""
    return torchvision.models.resnet18(num_classes=10), {"x": torch.rand(batch, 3, size, size)}


def resnet50(size: int = 64, batch: int = 2) -> Built:
    """torchvision's ResNet-50."""
    return torchvision.models.resnet50(num_classes=10), {"x": torch.rand(batch, 3, size, size)}


def vit() -> Built:
    """torchvision's ViT, built from ``nn.MultiheadAttention``."""
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128
    )
    # Its last weight starts at zero, which would make every gradient zero.
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model, {"x": torch.rand(2, 3, 32, 32)}


def vit_timm() -> Built:
    """timm's ViT, with an attention of its own."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10
    )
    return model, {"x": torch.rand(2, 3, 32, 32)}


def bert() -> Built:
    """BERT with two layers and a classifier."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    return transformers.BertForSequenceClassification(config), _tokens()


def bert_base(batch: int = 2, length: int = 8) -> Built:
    """BERT-base, the default configuration: 110 million weights."""
    return transformers.BertModel(transformers.BertConfig()), _tokens(batch, length)


def gpt2(batch: int = 2, tokens: int = 8, layers: int = 4) -> Built:
    """GPT-2 with layers of width 64: bound by launches, not by arithmetic."""
    config = transformers.GPT2Config(
        n_layer=layers, n_head=4, n_embd=64, vocab_size=VOCABULARY, n_positions=128, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens(batch, tokens)


def gpt2_base(batch: int = 1, tokens: int = 64) -> Built:
    """GPT-2, the default configuration: 124 million weights."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()), _tokens(batch, tokens)


def llama() -> Built:
    """Llama with two layers and grouped-query attention."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens()


def lstm() -> Built:
    """A two-layer bidirectional LSTM with dropout."""
    model = nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
    return model, {"input": torch.rand(2, 5, 16)}


def encoder() -> Built:
    """``nn.TransformerEncoder``, which has a native fast path in eval mode."""
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
    return nn.TransformerEncoder(layer, 2), {"src": torch.rand(2, 6, 32)}


def attention() -> Built:
    """``nn.MultiheadAttention``, which has a native fast path in eval mode."""
    x = torch.rand(2, 6, 32)
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    return model, {"query": x, "key": x, "value": x, "need_weights": False}


def _tokens(batch: int = 2, length: int = 8) -> Inputs:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length))}


ZOO: Mapping[str, Callable[[], Built]] = {
    "resnet18": resnet18, "resnet50": resnet50, "vit": vit, "vit_timm": vit_timm, "bert": bert,
    "gpt2": gpt2, "llama": llama, "lstm": lstm, "encoder": encoder, "attention": attention,
}  # fmt: skip
"""Every model by name, in sizes that train one step in a second or two."""

FAST_PATH = ("vit", "encoder", "attention")
"""Models that leave Python for a fused operator in eval mode without gradients."""


def build(name: str, seed: int = 0, *, training: bool = True) -> Built:
    """The model `name` and one batch for it, the same for the same seed."""
    torch.manual_seed(seed)
    model, inputs = ZOO[name]()
    return model.train(training), inputs


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in whatever a model returns, depth first."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)


def loss(output: Any) -> torch.Tensor:
    """A scalar that depends on every differentiable output of a model."""
    parts = [t.float().sin().mean() for t in tensors(output) if t.requires_grad]
    return torch.stack(parts).sum()


def train(build: Callable[[], Built], steps: int) -> None:
    """What a script does: it builds a model, and trains it."""
    torch.manual_seed(0)
    model, inputs = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(**inputs)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
