"""Tools that change nothing leave every bit as it was, on real architectures."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from tests import models
from tests.torch.support import TRANSPARENT, Counter, applied, fingerprint

TRAINED = ("resnet50", "bert", "gpt2", "llama", "vit", "lstm")
FUSED = {
    "vit": "_native_multi_head_attention",
    "encoder": "_transformer_encoder_layer_fwd",
    "attention": "_native_multi_head_attention",
}


def _step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """One training step's outputs, gradients, buffers and random state."""
    torch.manual_seed(1)
    outputs = model(**inputs)
    models.loss(outputs).backward()
    return {
        "outputs": fingerprint(list(models.tensors(outputs))),
        "gradients": fingerprint([p.grad for p in model.parameters()]),
        "buffers": fingerprint(list(model.buffers())),
        "random": torch.get_rng_state().tolist(),
    }


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if one[key] != other[key]]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("make", TRANSPARENT)
def test_evaluation(name: str, make: Callable[[], amanda.Tool]) -> None:
    """Outputs of an inference stay bit-identical, computed by the same fused operators."""
    model, inputs = models.build(name, training=False)
    counter = Counter()
    with torch.no_grad():
        vanilla = fingerprint(list(models.tensors(model(**inputs))))
        with applied(make(), counter):
            instrumented = fingerprint(list(models.tensors(model(**inputs))))
    assert instrumented == vanilla
    assert FUSED[name] in counter.ops


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("make", TRANSPARENT)
def test_training(name: str, make: Callable[[], amanda.Tool]) -> None:
    """Outputs, gradients, buffers and random state of two training steps under a scope, and of the
    first one after it, stay bit-identical."""
    model, inputs = models.build(name)
    vanilla = [_step(model, inputs) for _ in range(3)]
    model, inputs = models.build(name)
    with applied(make()):
        instrumented = [_step(model, inputs) for _ in range(2)]
    instrumented.append(_step(model, inputs))
    for one, other in zip(vanilla, instrumented, strict=True):
        assert _differing(one, other) == []


@pytest.mark.parametrize("name", ["resnet50"])
def test_stock_model_takes_backward_routines_everywhere(name: str) -> None:
    """Backward routines on every operator work on a model with in-place ReLUs, where
    full backward hooks on every module raise."""
    hooked, inputs = models.build(name)
    for module in hooked.modules():
        module.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        models.loss(hooked(**inputs)).backward()
    model, inputs = models.build(name)
    counter = Counter()
    with applied(counter):
        models.loss(model(**inputs)).backward()
    assert counter.backward_ops["ConvolutionBackward0"] == 53


@pytest.mark.parametrize("make", [*TRANSPARENT, Counter, amanda.tools.load("flops")])
def test_parameters_swap_what_they_hold(make: Callable[[], amanda.Tool]) -> None:
    """A module may change the type of its parameters in place, which PyTorch refuses where there
    are references to them, and their accumulations are seen afterwards as before."""

    def run(is_swapped: bool) -> tuple[Any, amanda.Tool]:
        torch.manual_seed(0)
        net, tool, losses = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), make(), []
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        torch.__future__.set_swap_module_params_on_conversion(is_swapped)
        try:
            with applied(tool):
                for dtype in (torch.float32, torch.float64, torch.float64):
                    loss = net.to(dtype)(torch.ones(2, 3, dtype=dtype)).sum()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
                    del loss
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        return [fingerprint(losses), fingerprint([*net.parameters()])], tool

    (expected, counted), (found, swapped) = run(False), run(True)
    assert found == expected
    if isinstance(swapped, Counter) and isinstance(counted, Counter):
        assert swapped.backward_ops == counted.backward_ops
        assert swapped.backward_ops["AccumulateGrad"] == 12


def test_references_of_the_program_keep_parameters_from_swapping() -> None:
    """PyTorch's error is raised as ever where the program refers weakly to a parameter."""
    net = nn.Linear(2, 2)
    reference = weakref.ref(net.weight)
    with applied(Counter()):
        net(torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
            torch.utils.swap_tensors(net.weight, nn.Parameter(torch.ones(2, 2)))
    assert reference() is net.weight
