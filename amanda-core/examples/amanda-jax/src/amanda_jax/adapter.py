"""The adapter of JAX for the contract kit: calls of JAX only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from amanda.testing.framework import Build, FunctionalFramework


class Jax(FunctionalFramework):
    """The adapter."""

    types: ClassVar[Mapping[str, str]] = {
        "add": "add", "mul": "multiply", "relu": "relu", "linear": "dot_general",
        "cat": "concatenate", "split": "split", "dropout": "bernoulli",
    }  # fmt: skip
    names: ClassVar[Mapping[str, Sequence[str]]] = {"mul": ["x", "y"], "linear": ["lhs", "rhs"]}
    attributes: ClassVar[Mapping[str, Any]] = {"sizes": (1, 1), "axis": 0}
    backward_types: ClassVar[Mapping[str, Sequence[str]]] = {
        "mul": ["multiply_backward"],
        "relu": ["relu_backward"],
        "linear": ["dot_general_backward"],
    }
    accumulation = ""
    has_parameters = False
    # Dead weak references, one for each vector-Jacobian product, also without Amanda.
    kept_objects = 1
    # JAX has threads of its own.
    forks = False
    watched = (jax, jax.stages.Compiled, jax.extend.core.Primitive)

    def __init__(self) -> None:
        self.key = jax.random.key(7)

    def tensor(self, values: Any) -> Any:
        return jnp.asarray(np.asarray(values, "float32"))

    def parameter(self, values: Any) -> Any:
        return self.tensor(values)

    def to_list(self, tensor: Any) -> Any:
        return np.asarray(tensor).tolist()

    def add(self, x: Any, y: Any) -> Any:
        return jnp.add(x, y)

    def mul(self, x: Any, y: Any) -> Any:
        return jnp.multiply(x, y)

    def relu(self, x: Any) -> Any:
        return jax.nn.relu(x)

    def linear(self, lhs: Any, rhs: Any, bias: Any = None) -> Any:
        y = jax.lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())))
        return y if bias is None else jnp.add(y, bias)

    def cat(self, tensors: Sequence[Any]) -> Any:
        return jax.lax.concatenate(tensors, 0)

    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        return list(jax.lax.split(tensor, [tensor.shape[0] // sections] * sections))

    def scale(self, tensor: Any, factor: float) -> Any:
        return tensor * factor

    def dropout(self, tensor: Any) -> Any:
        self.key, key = jax.random.split(self.key)
        return jax.random.bernoulli(key, 0.5, tensor.shape) * tensor

    def seed(self) -> None:
        self.key = jax.random.key(7)

    def rng_state(self) -> Any:
        return jax.random.key_data(self.key).tolist()

    def cast(self, tensor: Any) -> Any:
        return tensor.astype("float16")

    def global_state(self) -> Any:
        return jax.config.jax_disable_jit, jax.extend.core.get_opaque_trace_state()

    def vjp(
        self, function: Callable[..., list[Any]], tensors: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], list[Any]]]:
        outputs, vjp = jax.vjp(lambda *tensors: list(function(*tensors)), *tensors)
        return outputs, lambda: list(vjp([jnp.ones_like(y) for y in outputs]))

    def user_op(self) -> tuple[str, Build]:
        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def twice(x: Any) -> Any:
            return 2 * x

        twice.defvjp(lambda x: (2 * x, None), lambda _, grad: (2 * grad,))
        return "twice", twice

    def model(self, weight: Any, calls: int = 1) -> Build:
        import equinox

        linear, value = self.linear, self.tensor(weight)

        class Layer(equinox.Module):  # type: ignore[misc]
            weight: Any

            def __call__(self, x: Any) -> Any:
                return linear(x, self.weight)

        class Model(equinox.Module):  # type: ignore[misc]
            first: Layer
            second: Layer

            def __call__(self, x: Any) -> Any:
                for _ in range(calls):
                    x = self.second(self.first(x))
                return x

        model: Build = Model(Layer(value + 0), Layer(value + 0))
        return model
