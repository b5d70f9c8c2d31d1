"""The PyTorch eager driver keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from amanda.testing import DriverContract
from amanda.testing.framework import Build, EagerFramework, EagerProgram, Program, Values
from amanda_torch import _internals
from amanda_torch.plugin import TorchEagerDriver, TorchGraphDriver


class Model(nn.Module):
    """Two linear modules, one after the other."""

    def __init__(self, weight: Values, calls: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        self.second = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        self.calls = calls
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = self.second(self.first(x))
        return x


class Descent(torch.optim.Optimizer):
    """An optimizer that multiplies."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(torch.mul(parameter.grad, 0.1))


class TorchFramework(EagerFramework):
    """PyTorch, eager."""

    types: ClassVar[Mapping[str, Any]] = {
        name: name for name in ("add", "mul", "relu", "linear", "cat", "split", "dropout")
    } | {"add_inplace": "add_", "split": "chunk"}
    names: ClassVar[Mapping[str, Any]] = {
        "mul": ["input", "other"],
        "linear": ["input", "weight", "bias"],
    }
    attributes: ClassVar[Mapping[str, Any]] = {"chunks": 2}
    backward_types: ClassVar[Mapping[str, Any]] = {
        "mul": ["MulBackward0"],
        "relu": ["ReluBackward0"],
        "linear": ["AddmmBackward0", "TBackward0"],
    }
    accumulation = "AccumulateGrad"
    namespace = "pytorch"
    watched = (
        nn.Module,
        torch.overrides,
        torch.functional,
        nn.functional,
        torch.autograd,
        torch.autograd.function,
        torch.autograd.Function,
        _internals.FUNCTION_BASE,
        _internals.FUNCTION_NODE,
        torch.utils.checkpoint,
        torch.utils.checkpoint.CheckpointFunction,
        torch.jit,
    )

    add = staticmethod(torch.add)
    mul = staticmethod(torch.mul)
    relu = staticmethod(torch.relu)
    linear = staticmethod(nn.functional.linear)
    cat = staticmethod(torch.cat)

    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        return torch.chunk(tensor, sections)

    def add_inplace(self, tensor: Any, other: Any) -> Any:
        return tensor.add_(other)

    def dropout(self, tensor: Any) -> Any:
        return torch.dropout(tensor, 0.5, True)

    def tensor(self, values: Values) -> Any:
        return torch.tensor(values, dtype=torch.float64)

    def parameter(self, values: Values) -> Any:
        return nn.Parameter(self.tensor(values))

    def leaf(self, values: Values) -> Any:
        return self.tensor(values).requires_grad_()

    def to_list(self, tensor: Any) -> Any:
        return tensor.tolist()

    def scale(self, tensor: Any, factor: float) -> Any:
        return tensor * factor

    def cast(self, tensor: Any) -> Any:
        return tensor.float()

    def training_step(self) -> Callable[[], Any]:
        weight = self.parameter([1.0, 2.0])
        optimizer = Descent([weight], {})

        def step() -> None:
            torch.mul(weight, 2.0).sum().backward()
            optimizer.step()

        return step

    def backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        gradients = [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients

    def second_backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        first = torch.autograd.grad(
            outputs,
            leaves,
            [torch.ones_like(output) for output in outputs],
            create_graph=True,
            allow_unused=True,
        )
        used = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        second = torch.autograd.grad(
            used, leaves, [torch.ones_like(gradient) for gradient in used], allow_unused=True
        )
        return [None if gradient is None else gradient.tolist() for gradient in second]

    def model(self, weight: Values, calls: int = 1) -> Build:
        return Model(weight, calls)

    def user_op(self) -> tuple[str, Build]:
        class Twice(torch.autograd.Function):
            """An operator that PyTorch does not have, made of one that it has."""

            @staticmethod
            def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                return tensor + tensor

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient + gradient

        return "Twice", Twice.apply

    def further_ops(self) -> Mapping[str, Build]:
        return {
            "softmax": lambda x: x.softmax(0),
            "matmul": lambda x: x @ x,
            "sin": torch.compile(torch.sin, backend="eager"),
            "cos": torch.jit.trace(torch.cos, torch.ones(2)),
        }

    def seed(self) -> None:
        torch.manual_seed(7)

    def rng_state(self) -> Any:
        return torch.get_rng_state().tolist()

    def global_state(self) -> Any:
        return _internals.mode_depth(), torch.is_grad_enabled(), _internals.in_forward_ad()


class TestTorchEagerDriver(DriverContract):
    driver_cls = TorchEagerDriver
    framework_cls = TorchFramework


class CompiledFramework(TorchFramework):
    """PyTorch, with all programs compiled by ``torch.compile``."""

    def __init__(self) -> None:
        # The programs of many tests are one function to Dynamo, which compiles it a few times only.
        torch.compiler.reset()

    def program(self, build: Build, *values: Values) -> Program:
        return EagerProgram(self, torch.compile(build, backend="eager"), values)


# With routines at modules a compiled function runs eagerly, and says so.
@pytest.mark.filterwarnings("ignore:.*a tool has routines at modules")
class TestTorchGraphDriver(DriverContract):
    driver_cls = TorchGraphDriver
    framework_cls = CompiledFramework
