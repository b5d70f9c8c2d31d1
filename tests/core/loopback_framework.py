"""The contract's adapters of the loopback framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from amanda.testing import loopback as lb
from amanda.testing.framework import Build, EagerFramework, Framework, FunctionalFramework, Values
from amanda.testing.loopback import nn, ops, tape


class Model(lb.Module):
    """Two linear modules, one after the other."""

    def __init__(self, weight: Values, calls: int) -> None:
        self.first = lb.Linear(weight)
        self.second = lb.Linear(weight)
        self.calls = calls

    def forward(self, x: Any) -> Any:
        for _ in range(self.calls):
            x = self.second(self.first(x))
        return x


class LoopbackOperators(Framework):
    """The toy framework without its ways to differentiate."""

    types: ClassVar[Mapping[str, Any]] = {
        name: name for name in ("add", "mul", "relu", "linear", "cat", "split", "dropout")
    } | {"add_inplace": "add_"}
    names: ClassVar[Mapping[str, Any]] = {
        "mul": ["input", "other"],
        "linear": ["input", "weight", "bias"],
    }
    attributes: ClassVar[Mapping[str, Any]] = {"sections": 2}
    backward_types: ClassVar[Mapping[str, Any]] = {
        "mul": ["MulBackward"],
        "relu": ["ReluBackward"],
        "linear": ["AddBiasBackward", "MatmulBackward", "TransposeBackward"],
    }
    accumulation = "AccumulateGrad"
    watched = (lb, ops, nn, tape, lb.Tensor, lb.Module, tape.GradientNode, lb.LoopbackOp)

    add = lb.add
    mul = lb.mul
    relu = lb.relu
    linear = lb.linear
    cat = lb.cat
    split = lb.split
    add_inplace = lb.add_
    dropout = lb.dropout

    def tensor(self, values: Values) -> Any:
        return lb.tensor(values)

    def parameter(self, values: Values) -> Any:
        return lb.parameter(values)

    def unreferenceable(self, value: float) -> Any:
        return lb.tensor(value)

    def to_list(self, tensor: Any) -> Any:
        return tensor.tolist()

    def scale(self, tensor: Any, factor: float) -> Any:
        return lb.mul(tensor, factor)

    def model(self, weight: Values, calls: int = 1) -> Build:
        return Model(weight, calls)

    def user_op(self) -> tuple[str, Build]:
        @lb.op
        def twice(input: lb.Tensor) -> lb.Tensor:
            """An operator that the framework does not have; its gradient calls one that it has."""
            output = lb.add(lb.detach(input), lb.detach(input))
            lb.record("TwiceBackward", [input], [output], lambda g: [lb.add(g[0], g[0])])
            return output

        return "twice", twice

    def counted_op(self) -> tuple[Build, Callable[[], int]]:
        executions: list[None] = []

        @lb.op
        def counted(input: lb.Tensor) -> lb.Tensor:
            """An operator that counts its executions."""
            executions.append(None)
            return lb.add(input, input)

        return counted, lambda: len(executions)

    def further_ops(self) -> Mapping[str, Build]:
        return {"transpose": lb.transpose, "sum": lb.sum}

    def seed(self) -> None:
        lb.manual_seed(7)

    def rng_state(self) -> Any:
        return lb.rng_state()

    def global_state(self) -> Any:
        return lb.tape.grad_enabled()


class LoopbackFramework(LoopbackOperators, EagerFramework):
    """The toy framework, with leaves that accumulate gradients."""

    def leaf(self, values: Values) -> Any:
        return lb.tensor(values, requires_grad=True)

    def training_step(self) -> Callable[[], Any]:
        weight = lb.parameter([1.0, 2.0])

        def step() -> None:
            lb.mul(weight, 2.0).backward()
            lb.sgd_step([weight], 0.1)

        return step

    def backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        tape.run_graph(outputs, None, retain_graph=False, create_graph=False)
        gradients = [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients

    def second_backward(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        first = [g for g in lb.grad(outputs, leaves, create_graph=True) if g is not None]
        return [None if g is None else g.tolist() for g in lb.grad(first, leaves)]


class FunctionalLoopback(LoopbackOperators, FunctionalFramework):
    """The toy framework as one that differentiates functions, where no gradient is accumulated."""

    accumulation = ""
    depth = 0

    def vjp(
        self, function: Callable[..., list[Any]], tensors: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], list[Any]]]:
        # A tensor of a call around this one already wants a gradient, and is its own tracer.
        tracers = [t if t.requires_grad else lb.tensor(t.tolist(), True) for t in tensors]
        # Within the function of another call, whose variables this one may read.
        within = self.depth > 0
        self.depth += 1
        try:
            outputs = function(*tracers)
        finally:
            self.depth -= 1
        return outputs, lambda: lb.grad(outputs, tracers, retain_graph=True, create_graph=within)
