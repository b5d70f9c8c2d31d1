"""Tables and charts of all tools show the model's operators, and a line for each other phase."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch import nn

from amanda.tools.reporting import ReportingTool
from tests import models
from tests.tools.phase_support import check, names, run_all

# isort: split
import timm
import torchvision


def vit() -> models.Built:
    """timm's ViT; what draws its weights has operators of a type that the model has, too."""
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3
    )
    with torch.no_grad():
        model.head.weight.copy_(nn.functional.linear(torch.rand(3, 4), torch.rand(16, 4)))
    return model, {"x": torch.rand(2, 3, 16, 16)}


def resnet() -> models.Built:
    """The bottleneck blocks of ResNet-50, fewer and narrower."""
    block = torchvision.models.resnet.Bottleneck
    model = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=3, width_per_group=4)
    return model, {"x": torch.rand(2, 3, 16, 16)}


@functools.cache
def tools() -> dict[str, ReportingTool[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_all(functools.partial(models.train, vit, 3))


@pytest.mark.parametrize("name", names())
def test_tables_and_charts_show_operators_of_the_model(name: str) -> None:
    """No table and no chart of any tool names an operator that builds, feeds, measures or changes
    the model; each other phase that the rows have is one line."""
    check(tools(), name)


@pytest.mark.parametrize("name", names())
def test_rows_describe_the_tensors_of_operators(name: str) -> None:
    """Those of each tool have phase, inputs, outputs and attributes, backward operators too."""
    for row in tools()[name].result()["ops"]:
        assert {"phase", "inputs", "outputs", "attributes"} <= set(row)
        if row["direction"] == "backward" and row["name"] != "AccumulateGrad":
            assert row["outputs"], row["id"]


def fit() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    model.fit(np.ones((4, 4), "float32"), np.arange(4) % 2, batch_size=2, verbose=0)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (functools.partial(models.train, models.llama, 2), ["count", "flops", "stats"]),
        (functools.partial(models.train, resnet, 2), ["count", "flops", "stats"]),
        # What the path goes through in the loop of ``fit`` included.
        (fit, ["count", "path", "stats"]),
    ],
    ids=["llama", "resnet", "keras"],
)
def test_tables_of_other_models_show_operators_of_the_model(
    run: Callable[[], object], names: list[str]
) -> None:
    """Likewise, of the tools whose tables list all operators."""
    found = run_all(run, names)
    for name in found:
        check(found, name)
