"""Twenty-five architectures of timm and Transformers, with random weights, for the benchmarks.

Sizes are small, so that an operator costs about as much as its launch: the hard case for whoever
stands between a program and its operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.models import VOCABULARY, Built

# isort: split
import timm
import transformers

IMAGE_MODELS: Mapping[str, int] = {
    "resnet18": 32, "resnet50": 64, "densenet121": 64, "mobilenetv3_small_050": 64,
    "efficientnet_b0": 64, "regnety_002": 64, "ghostnet_100": 64, "convnext_atto": 64,
    "vit_tiny_patch16_224": 224, "deit3_small_patch16_224": 224, "mixer_s32_224": 224,
    "levit_128s": 224, "poolformer_s12": 64,
}  # fmt: skip
"""Models of timm, and the height and width of their images in pixels."""

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip

LANGUAGE_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertForMaskedLM", _SMALL),
    "roberta": ("RobertaForMaskedLM", _SMALL | {"pad_token_id": 1}),
    "electra": ("ElectraForMaskedLM", _SMALL | {"embedding_size": 64}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    "albert": ("AlbertForMaskedLM", _SMALL | {"embedding_size": 32}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL),
    "opt": ("OPTForCausalLM", _SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "llama": ("LlamaForCausalLM", _SMALL),
    "mistral": ("MistralForCausalLM", _SMALL),
    "qwen2": ("Qwen2ForCausalLM", _SMALL),
    "phi": ("PhiForCausalLM", _SMALL),
}
"""Models of Transformers: their classes, and what differs from the default configuration."""


def _image_model(name: str, size: int) -> Built:
    return timm.create_model(name, num_classes=10), {"x": torch.rand(2, 3, size, size)}


def _language_model(name: str, config: Mapping[str, Any]) -> Built:
    cls = getattr(transformers, name)
    tokens = torch.randint(2, VOCABULARY, (2, 8))
    return cls(cls.config_class(**config)), {"input_ids": tokens}


ARCHITECTURES: Mapping[str, Callable[[], Built]] = {
    **{name: functools.partial(_image_model, name, size) for name, size in IMAGE_MODELS.items()},
    **{name: functools.partial(_language_model, *made) for name, made in LANGUAGE_MODELS.items()},
}
"""Every architecture by name."""
