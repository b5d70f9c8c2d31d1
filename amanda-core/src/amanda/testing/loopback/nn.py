"""Modules of the toy framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from amanda.testing.loopback import ops, tape
from amanda.testing.loopback.tape import Parameter, Tensor, parameter


class Module:
    """Something with parameters and child modules, both kept as attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's result; subclasses implement it."""
        raise NotImplementedError

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, with their paths."""
        yield path, self
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.named_modules(f"{path}.{name}" if path else name)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters of this module and of all modules below it, with their paths."""
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter):
                    yield f"{path}.{name}" if path else name, value

    def parameters(self) -> list[Parameter]:
        """The parameters of this module and of all modules below it."""
        return [value for _, value in self.named_parameters()]


class Linear(Module):
    """A ``linear`` operator with its own parameters.

    Args:
        weight: one row per output feature.
        bias: one number per output feature; None for no bias.
    """

    def __init__(self, weight: list[list[float]], bias: list[float] | None = None) -> None:
        self.weight = parameter(weight)
        self.bias = None if bias is None else parameter(bias)

    def forward(self, input: Tensor) -> Any:
        """Apply the operator."""
        return ops.linear(input, self.weight, self.bias)


class Sequential(Module):
    """Modules one after the other; children are named by their position."""

    def __init__(self, *modules: Module) -> None:
        for position, module in enumerate(modules):
            setattr(self, str(position), module)

    def forward(self, input: Tensor) -> Any:
        """Apply all modules."""
        for module in vars(self).values():
            input = module(input)
        return input


def sgd_step(parameters: Iterable[Parameter], rate: float) -> None:
    """One step of gradient descent; clears the gradients."""
    update(list(parameters), rate)


def update(parameters: list[Parameter], rate: float) -> None:
    """Move parameters against their gradients, which are cleared."""
    for item in parameters:
        if item.grad is not None:
            # As operators, as the optimizers of other frameworks move theirs.
            with tape.no_grad():
                change = ops.mul(item.grad, rate)
            item.data[:] = [a - b for a, b in zip(item.data, change.data, strict=True)]
            item.version += 1
            item.grad = None
