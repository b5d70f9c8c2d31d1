"""A driver of the loopback framework that differentiates functions, as those of autograd or JAX do.

It finds no backward operators: each operator has one, its vector-Jacobian product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from amanda.driver import Capability, PatchSet
from amanda.testing import loopback as lb
from amanda.testing.loopback import nn, ops, tape
from amanda.testing.loopback.driver import DriverNode
from tests.core.loopback_framework import FunctionalLoopback

Gradients = list[Any]


class FunctionalDriver(lb.LoopbackDriver):
    """Instruments the loopback framework without its gradient graph."""

    name = "loopback-functional"
    capabilities = lb.LoopbackDriver.capabilities - {Capability.IN_PLACE, Capability.SECOND_ORDER}

    def patch(self, patches: PatchSet) -> None:
        patches.wrap(ops, "execute", self._executing)
        patches.wrap(tape.GradientNode, "run", self._counting_node)
        patches.wrap(nn.Module, "__call__", self._calling_module)
        patches.wrap(tape, "run_graph", self._running_graph)

    def _counting_node(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(node: tape.GradientNode, grads: Gradients) -> Any:
            if isinstance(node, (DriverNode, tape.AccumulateGrad)):
                return vanilla(node, grads)
            return self.run_backward_operator(None, grads, lambda grads: vanilla(node, grads))

        return run

    def differentiate(
        self, function: Callable[[list[Any]], list[Any]], inputs: list[Any]
    ) -> tuple[list[Any], Callable[[Gradients], Gradients]]:
        leaves = [None if t is None else _leaf(t, self.wants_gradient(t)) for t in inputs]
        wanted = [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad]
        outputs = function(leaves)

        def vjp(gradients: Gradients) -> Gradients:
            pairs = zip(outputs, gradients, strict=True)
            with tape.set_grad(True):
                weighted = [ops.mul.compute(y, g) for y, g in pairs if g is not None]
            sources = [leaves[i] for i in wanted]
            found = dict(zip(wanted, lb.grad(weighted, sources, retain_graph=True), strict=True))
            return [found.get(i) for i in range(len(leaves))]

        return [output.alias() for output in outputs], vjp


def _leaf(tensor: Any, wants_gradient: bool) -> Any:
    leaf = tensor.alias()
    leaf.requires_grad = wants_gradient
    return leaf


class FunctionalToy(FunctionalLoopback):
    """The adapter: each operator has one backward operator."""

    backward_types: ClassVar[Mapping[str, Any]] = {
        name: [f"{name}_backward"] for name in ("mul", "relu", "linear")
    }
