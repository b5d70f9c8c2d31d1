"""Published architectures under tools that change nothing, bit for bit, with every interceptor.

For ``nox -s architectures``: all 25 take five minutes, and a usual run skips them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

if not os.environ.get("AMANDA_ARCHITECTURES"):
    pytest.skip("nox -s architectures runs it", allow_module_level=True)

import amanda

# Before timm and transformers.
from tests import models, torchvision_ops  # noqa: F401
from tests.benchmarks.architectures import ARCHITECTURES
from tests.torch.support import Counter, Identity, Watcher, applied, fingerprint

ASKED = os.environ["AMANDA_ARCHITECTURES"]
CHOSEN = sorted(ARCHITECTURES) if ASKED == "all" else ASKED.split(",")
STEPS = 5
"""Analyses of backward operators run in the first one, and all is known after the third one."""


class Returning(Identity, Counter):
    """Watches, and has routines that return nothing and routines that return what they got."""

    def __init__(self) -> None:
        Counter.__init__(self)
        Identity.__init__(self)


def _steps(model: nn.Module, inputs: dict[str, Any], training: bool) -> Sequence[Any]:
    """Outputs, gradients, buffers and random state after each of some steps."""
    torch.manual_seed(1)
    model, done = copy.deepcopy(model).train(training), []
    for _ in range(STEPS):
        model.zero_grad()
        with torch.set_grad_enabled(training):
            outputs = model(**inputs)
        if training:
            models.loss(outputs).backward()
        done.append(
            {
                "outputs": fingerprint(list(models.tensors(outputs))),
                "gradients": fingerprint([p.grad for p in model.parameters()]),
                "buffers": fingerprint(list(model.buffers())),
                "random": fingerprint([torch.get_rng_state()]),
            }
        )
    return done


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize("name", CHOSEN)
def test_tools_that_change_nothing_leave_every_bit(name: str, training: bool) -> None:
    """Every step is bit-identical: watched, with routines that return None or what they got."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    wanted = _steps(model, inputs, training)
    tools: Sequence[Callable[[], amanda.Tool]] = (Watcher, Counter, Returning)
    try:
        for make in tools:
            with applied(make()):
                found = _steps(model, inputs, training)
            differing = [
                f"{key} of step {number}"
                for number, (one, other) in enumerate(zip(wanted, found, strict=True))
                for key in one
                if one[key] != other[key]
            ]
            assert differing == [], make.__name__
    finally:
        torch.compiler.reset()
