"""The models that the PyTorch benchmarks run, and the peers that Amanda is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amanda
from tests import models
from tests.benchmarks.timing import Step


@attrs.frozen
class Workload:
    """A model, and whether a step of it trains.

    Attributes:
        build: makes the model and its inputs.
        training: forward and backward; otherwise forward without gradients.
    """

    build: Callable[[], models.Built]
    training: bool

    def start(self) -> tuple[nn.Module, Step]:
        """The model, and a function that runs one step."""
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


def _resnet50(batch: int, size: int) -> Callable[[], models.Built]:
    return lambda: models.resnet50(size, batch)


def _gpt2(layers: int) -> Callable[[], models.Built]:
    return lambda: models.gpt2(batch=1, tokens=8, layers=layers)


WORKLOADS: Mapping[str, Workload] = {
    "resnet50-b1-224-infer": Workload(_resnet50(1, 224), training=False),
    "resnet50-b8-32-train": Workload(_resnet50(8, 32), training=True),
    # Not for training: batch normalization needs more than one value per channel, and one image
    # of 32 x 32 has one left at the end.
    "resnet18-b1-32-infer": Workload(lambda: models.resnet18(32, 1), training=False),
    "gpt2-4x64-infer": Workload(_gpt2(4), training=False),
    "gpt2-4x64-train": Workload(_gpt2(4), training=True),
    "gpt2-12x64-infer": Workload(_gpt2(12), training=False),
    "gpt2-12x64-train": Workload(_gpt2(12), training=True),
    "bert-base-b2-64-train": Workload(lambda: models.bert_base(batch=2, length=64), training=True),
}
"""By model, batch or layers, size, and kind of step."""

Scope = Callable[[nn.Module], AbstractContextManager[Any]]
"""Makes the scope that is compared with no scope, for a model."""


def tool(name: str, **options: Any) -> Scope:
    """The scope of a new instance of an installed tool."""
    return lambda model: amanda.apply(amanda.tools.load(name)(**options))


# -- peers -----------------------------------------------------------------------


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _NanCheck(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                bool(torch.isfinite(tensor).all())
        return result


@contextlib.contextmanager
def _module_hooks(model: nn.Module) -> Iterator[None]:
    # No backward hooks: full ones raise on a stock ResNet, whose ReLUs work in place.
    handles = [m.register_forward_hook(lambda *_: None) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


PEERS: Mapping[str, Scope] = {
    # What else stands between a program and its operators, or modules.
    "peer: forward hook on modules": _module_hooks,
    "peer: no-op TorchFunctionMode": lambda model: _FunctionMode(),
    "peer: no-op TorchDispatchMode": lambda model: _DispatchMode(),
    "peer: FlopCounterMode": lambda model: FlopCounterMode(display=False),
    # What else records every operator.
    "peer: DebugMode": lambda model: DebugMode(),
    "peer: torch.profiler": lambda model: torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ),
    # What else looks for NaN.
    "peer: NaN check in a DispatchMode": lambda model: _NanCheck(),
    # Not the class that the row is named after, which warns each time that it is slow.
    "peer: detect_anomaly": lambda model: torch.autograd.set_detect_anomaly(True, check_nan=True),
}
"""What a workload is compared with besides: by the name of the row."""
