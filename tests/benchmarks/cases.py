"""What the benchmarks run, and what they run it under."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amanda
from tests import models

Step = Callable[[], Any]


@attrs.frozen
class Case:
    """A model and what one repetition of it does.

    Attributes:
        build: makes the model and its inputs.
        training: forward and backward; otherwise forward without gradients.
        bound: the ratio to vanilla that the project wants to keep.
        repetitions: timed runs per block.
    """

    build: Callable[[], models.Built]
    training: bool
    bound: float
    repetitions: int

    def step(self) -> tuple[nn.Module, Step]:
        """The model and a function that runs it once."""
        torch.manual_seed(0)
        model, inputs = self.build()
        model.train(self.training)

        def infer() -> None:
            with torch.no_grad():
                model(**inputs)

        def train() -> None:
            model.zero_grad(set_to_none=True)
            models.loss(model(**inputs)).backward()

        return model, train if self.training else infer


def _resnet50() -> models.Built:
    return models.resnet50(size=224, batch=1)


def _resnet18() -> models.Built:
    # Batch normalization needs more than one value per channel: one image of 32 x 32
    # has one left at the end, so that this model is only used for inference.
    return models.resnet18(size=32, batch=1)


def _gpt2() -> models.Built:
    return models.gpt2(batch=1, tokens=8)


CASES = {
    "resnet50-b1-224-infer": Case(_resnet50, training=False, bound=1.015, repetitions=4),
    "resnet50-b1-224-train": Case(_resnet50, training=True, bound=1.015, repetitions=3),
    "resnet18-b1-32-infer": Case(_resnet18, training=False, bound=1.12, repetitions=40),
    "gpt2-4x64-infer": Case(_gpt2, training=False, bound=1.75, repetitions=80),
    "gpt2-4x64-train": Case(_gpt2, training=True, bound=1.45, repetitions=40),
}


class WatchForward(amanda.Tool):
    """Analyses every operator and instruments none."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Look, and do nothing."""


class WatchBoth(WatchForward):
    """Analyses every forward and backward operator and instruments none."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse, backward=True)


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _module_hooks(model: nn.Module) -> Iterator[None]:
    """A hook that does nothing on every module's forward.

    No backward hooks: full ones raise on a stock ResNet, whose ReLUs work in place.
    """
    handles = [m.register_forward_hook(lambda *_: None) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _count(model: nn.Module) -> AbstractContextManager[Any]:
    count: Callable[..., amanda.Tool] = amanda.tools.load("count")
    return amanda.apply(count(ops=["conv2d", "linear"]))


VANILLA = "vanilla"

CONTESTANTS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    VANILLA: lambda model: nullcontext(),
    "amanda, nothing instrumented": lambda model: amanda.apply(WatchForward()),
    "amanda, backward analysed too": lambda model: amanda.apply(WatchBoth()),
    "amanda, count:ops=conv2d+linear": _count,
    "peer: forward hook on modules": _module_hooks,
    "peer: no-op TorchFunctionMode": lambda model: _FunctionMode(),
    "peer: no-op TorchDispatchMode": lambda model: _DispatchMode(),
    "peer: FlopCounterMode": lambda model: FlopCounterMode(display=False),
}
