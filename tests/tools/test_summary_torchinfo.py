"""``summary`` beside torchinfo, of real architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import torchvision_ops  # noqa: F401 - timm imports torchvision

# isort: split
import timm
import torchinfo
import transformers

import amanda

LLAMA = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor]] = {
    "ResNet-50": (lambda: timm.create_model("resnet50"), torch.zeros(1, 3, 32, 32)),
    "ViT": (
        lambda: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32),
        torch.zeros(2, 3, 32, 32),
    ),
    "Llama": (lambda: transformers.LlamaForCausalLM(LLAMA), torch.arange(18).reshape(2, 9)),
}


def path_of(layer: Any) -> str:
    """The path of a module in torchinfo's list."""
    names = []
    while layer.parent_info is not None:
        names.append(layer.var_name)
        layer = layer.parent_info
    return ".".join(reversed(names))


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_parameters_are_those_of_torchinfo(name: str) -> None:
    """Module by module, with types and depths. torchinfo 1.8.0 knows no data classes as outputs."""
    build, inputs = MODELS[name]
    model = build().eval()
    expected = torchinfo.summary(model, input_data=inputs, verbose=0)
    found = amanda.summary(model, inputs).modules
    rows = {row["path"]: row for row in found}
    listed = {path_of(layer): layer for layer in expected.summary_list}
    # Modules that have no parameters and are not called are listed here only.
    assert {path for path in rows if path in listed or rows[path]["calls"]} == set(listed)
    for path, layer in listed.items():
        row = rows[path]
        assert (row["type"], row["depth"]) == (layer.class_name, layer.depth)
        assert row["parameters"] == layer.num_params
        if layer.executed and layer.output_size:
            assert row["output"] == list(layer.output_size)
    total = found[0]
    assert total["parameters"] == expected.total_params
    assert total["trainable"] == expected.trainable_params
