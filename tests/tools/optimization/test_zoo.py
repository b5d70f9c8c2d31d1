"""The same tools on published models: each operator of their types is treated, or listed with why.

Every tool meets convolutions and attention of both frameworks here; ``python -m
tests.benchmarks.zoo`` runs all tools on all models.
"""

from __future__ import annotations

import pytest

from tests.tools.optimization import zoo

TRANSFORMERS = ("bert", "gpt2", "llama")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("magnitude", "densenet121"),
        ("nm", "resnet50"),
        ("tile", "mobilenet_v2"),
        ("channel", "inception_v3"),
        ("activation", "densenet121"),
        ("static", "vgg19"),
        ("dynamic", "resnet50"),
        ("qat", "mobilenet_v2"),
        ("inject", "resnet50"),
    ],
)
def test_networks_of_convolutions(name: str, model: str) -> None:
    pytest.importorskip("torch")
    tool = zoo.made(name)
    count, skipped = zoo.treated(tool, zoo.TORCH[model]())
    assert count >= 16
    assert name != "nm" or "its input axis, 3, is not a multiple of m=4" in skipped


@pytest.mark.parametrize("name", [t for t in zoo.TOOLS if t not in ("channel", "activation")])
def test_one_tool_object_on_three_transformers(name: str) -> None:
    """One object for all of them, one after the other; its operators are those of each."""
    pytest.importorskip("transformers")
    tool = zoo.made(name)
    found = {model: zoo.treated(tool, zoo.TORCH[model]()) for model in TRANSFORMERS}
    if name == "attention":
        assert found["bert"] == (2, [])
        assert all("it is causal" in why for model in ("gpt2", "llama") for why in found[model][1])
    else:
        assert all(count >= 14 and not skipped for count, skipped in found.values())


@pytest.mark.parametrize("name", [t for t in zoo.TOOLS if t not in ("channel", "activation")])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_a_transformer_of_keras(name: str, function: bool) -> None:
    pytest.importorskip("tensorflow")
    count, _ = zoo.treated(zoo.made(name), zoo.KERAS["transformer"](function))
    assert count >= (1 if name == "attention" else 2)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("ResNet50", "nm"),
        ("VGG19", "channel"),
        ("MobileNetV2", "activation"),
        ("InceptionV3", "dynamic"),
        ("DenseNet121", "magnitude"),
        ("EfficientNetB0", "inject"),
    ],
)
def test_applications_of_keras(model: str, name: str) -> None:
    pytest.importorskip("tensorflow")
    count, _ = zoo.treated(zoo.made(name), zoo.KERAS[model](False), steps=1)
    assert count >= 16
