"""The adapter of autograd for the contract kit: calls of autograd only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import autograd.numpy as anp
import numpy as np
from autograd import core, tracer
from autograd.builtins import tuple as tuple_
from autograd.extend import defvjp, primitive, vspace

from amanda.testing.framework import Build, FunctionalFramework


@primitive
def relu(x):
    """The positive part."""
    return x * (x > 0)


defvjp(relu, lambda ans, x: lambda g: g * (x > 0))


@primitive
def linear(x, weight):
    """A weight row for each output."""
    return x @ weight.T


defvjp(
    linear,
    lambda ans, x, weight: lambda g: anp.dot(g, weight),
    lambda ans, x, weight: lambda g: anp.dot(g.T, x),
)


@primitive
def dropout(x):
    """Without half of the elements, at random."""
    return x * (np.random.random(x.shape) < 0.5)


defvjp(dropout, lambda ans, x: lambda g: g * (ans != 0))


class Autograd(FunctionalFramework):
    """The adapter."""

    types: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("add", "relu", "linear", "split", "dropout")},
        "mul": "multiply",
        "cat": "concatenate_args",
    }
    names: ClassVar[Mapping[str, Sequence[str]]] = {"mul": ["x1", "x2"], "linear": ["x", "weight"]}
    attributes: ClassVar[Mapping[str, Any]] = {"indices_or_sections": 2}
    backward_types: ClassVar[Mapping[str, Sequence[str]]] = {
        "mul": ["multiply_backward"],
        "relu": ["relu_backward"],
        "linear": ["linear_backward"],
    }
    has_parameters = False
    watched = (tracer, core, relu, linear, anp.add)

    add, mul = staticmethod(anp.add), staticmethod(anp.multiply)
    relu, dropout = staticmethod(relu), staticmethod(dropout)

    def tensor(self, values: Any) -> Any:
        return np.array(values, dtype=float)

    def parameter(self, values: Any) -> Any:
        return np.array(values, dtype=float)

    def unreferenceable(self, value: float) -> Any:
        return np.float64(value)

    def to_list(self, tensor: Any) -> Any:
        return tracer.getval(tensor).tolist()

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        product = linear(x, weight)
        return product if bias is None else anp.add(product, bias)

    def cat(self, tensors: Sequence[Any]) -> Any:
        return anp.concatenate(tensors)

    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        return list(anp.split(tensor, sections))

    def vjp(
        self, function: Callable[..., list[Any]], tensors: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], list[Any]]]:
        def called(values: Any) -> Any:
            return tuple_(function(*[values[i] for i in range(len(tensors))]))

        vjp, outputs = core.make_vjp(called, tuple_(tensors))
        return list(outputs), lambda: list(vjp(tuple(vspace(output).ones() for output in outputs)))

    def seed(self) -> None:
        np.random.seed(7)

    def rng_state(self) -> Any:
        return np.random.get_state()[1].tolist()

    def user_op(self) -> tuple[str, Build]:
        @primitive
        def twice(x):
            return 2 * x

        defvjp(twice, lambda ans, x: lambda g: 2 * g)
        return "twice", twice
