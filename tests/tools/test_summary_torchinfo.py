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
from tests.tools import odd_modules

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
    **odd_modules.AGREED,
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
    # Modules that are not called are listed here only, if torchinfo leaves them out.
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


def both(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[Any, list[dict[str, Any]]]:
    """What torchinfo 1.8.0 and ``summary`` tell of a model."""
    expected = torchinfo.summary(model.eval(), input_data=inputs, verbose=0, mode="eval")
    return expected, list(amanda.summary(model, inputs).modules)


@pytest.mark.parametrize(
    ("build", "inputs", "parameters"),
    [(odd_modules.Shared, odd_modules.ROWS, 20), (odd_modules.Tied, odd_modules.TOKENS, 88)],
    ids=["module", "weight"],
)
def test_what_is_shared_counts_once(
    build: Callable[[], torch.nn.Module], inputs: torch.Tensor, parameters: int
) -> None:
    """As in ``model.parameters()``; torchinfo counts it in each module that has it."""
    model = build()
    expected, found = both(model, inputs)
    assert found[0]["parameters"] == sum(p.numel() for p in model.parameters()) == parameters
    assert expected.total_params == 2 * parameters


def test_a_shared_module_has_its_calls_where_they_are_made() -> None:
    """torchinfo lists all of them under the last name."""
    expected, found = both(odd_modules.Shared(), odd_modules.ROWS)
    calls = {row["path"]: row["calls"] for row in found}
    assert (calls["a"], calls["b"], calls["c.0"]) == (2, 0, 1)
    linear = [path_of(layer) for layer in expected.summary_list if layer.class_name == "Linear"]
    assert linear == ["c.0"] * 3


def test_a_dictionary_of_outputs_is_shown_by_its_first_tensor() -> None:
    """torchinfo takes the last one."""
    expected, [root, *_] = both(odd_modules.Named(), odd_modules.ROWS)
    assert root["output"] == [3, 3]
    assert expected.summary_list[0].output_size == [3, 5]


def test_a_fused_layer_runs_fused() -> None:
    """PyTorch's fast path calls no part of the layer; torchinfo's hooks switch it off."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    expected, found = both(layer, odd_modules.WORDS)
    calls = {row["path"]: row["calls"] for row in found}
    assert calls.pop("") == 1
    assert set(calls.values()) == {0}
    assert found[0]["parameters"] == expected.total_params == 600
    assert {path_of(one) for one in expected.summary_list if one.executed} > {"", "linear1"}
