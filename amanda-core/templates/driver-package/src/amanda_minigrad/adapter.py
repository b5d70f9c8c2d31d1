"""The adapter of minigrad for the contract kit: calls of minigrad only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from amanda.testing.framework import Build, EagerFramework

import minigrad


class Minigrad(EagerFramework):
    """The adapter."""

    types: ClassVar[Mapping[str, str]] = {
        name: name for name in ("add", "mul", "relu", "linear", "cat", "split", "dropout")
    }
    names: ClassVar[Mapping[str, Sequence[str]]] = {
        "mul": ["left", "right"],
        "linear": ["x", "weight", "bias"],
    }
    attributes: ClassVar[Mapping[str, Any]] = {"sections": 2}
    backward_types: ClassVar[Mapping[str, Sequence[str]]] = {
        name: [f"{name}_backward"] for name in ("mul", "relu", "linear")
    }
    watched = (minigrad, minigrad.Node, minigrad.Leaf, minigrad.MiniTensor, minigrad.MiniOperator)

    add, mul, relu, linear = minigrad.add, minigrad.mul, minigrad.relu, minigrad.linear

    def tensor(self, values: Any) -> Any:
        return minigrad.MiniTensor(values)

    def parameter(self, values: Any) -> Any:
        return minigrad.MiniParameter(values)

    def leaf(self, values: Any) -> Any:
        return minigrad.MiniTensor(values, requires_grad=True)

    def to_list(self, tensor: Any) -> Any:
        return tensor.data.tolist()

    def cat(self, tensors: Sequence[Any]) -> Any:
        return minigrad.cat(*tensors)

    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        return minigrad.split(tensor, sections=sections)

    def dropout(self, tensor: Any) -> Any:
        return minigrad.dropout(tensor, rate=0.5)

    def backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        minigrad.backward(*outputs)
        gradients = [None if leaf.grad is None else leaf.grad.data.tolist() for leaf in leaves]
        for leaf in leaves:
            leaf.edge[0].grad = None
        return gradients

    def user_op(self) -> tuple[str, Build]:
        @minigrad.MiniOperator
        def twice(x):
            return 2 * x, lambda grads: [2 * grads[0]]

        return "twice", twice

    def seed(self) -> None:
        minigrad.random.bit_generator.state = type(minigrad.random.bit_generator)(7).state

    def rng_state(self) -> Any:
        return minigrad.random.bit_generator.state
