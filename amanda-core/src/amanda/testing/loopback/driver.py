"""The driver of the toy framework: where it is patched, and the job of each patch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from amanda.driver import (
    BackwardExecution,
    Capability,
    EagerDriver,
    Namespace,
    OperatorRun,
    PatchSet,
)
from amanda.testing.loopback import nn, ops, tape
from amanda.testing.loopback.tape import AccumulateGrad, Buffer, GradientNode, Parameter, Tensor

Gradients = list["Tensor | None"]


class DriverNode(GradientNode):
    """A node of the gradient graph that the driver has put there: no backward operator."""

    __slots__ = ()


class LoopbackDriver(EagerDriver):
    """Instruments the toy framework of :mod:`amanda.testing.loopback`.

    Six functions of the framework are replaced while it is attached: the one that runs an
    operator, the constructor and the run of a node of the gradient graph, the call of a module
    (for ids), the run of a gradient graph (its end restarts the counters of ids) and the step of
    gradient descent (its end is the end of an iteration).

    Attributes:
        claims: the backward operator that a node of the gradient graph is.
    """

    name: ClassVar[str] = "loopback"
    framework: ClassVar[str] = "amanda.testing.loopback"
    interface_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.STATIC_GRAPH,
        Capability.COMPILED,
    }

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self.claims: weakref.WeakKeyDictionary[GradientNode, BackwardExecution] = (
            weakref.WeakKeyDictionary()
        )
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def namespace(self) -> Namespace:
        return Namespace("loopback/1.0/eager")

    def patch(self, patches: PatchSet) -> None:
        patches.wrap(ops, "execute", self._executing)
        patches.wrap(GradientNode, "__init__", self._recording_node)
        patches.wrap(GradientNode, "run", self._running_node)
        patches.wrap(nn.Module, "__call__", self._calling_module)
        patches.wrap(tape, "run_graph", self._running_graph)
        patches.wrap(nn, "update", self._stepping)

    # -- the framework's tensors ------------------------------------------

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def current_value(self, tensor: Tensor) -> Tensor | None:
        return tensor.alias() if isinstance(tensor, (Parameter, Buffer)) else None

    def parameter_name(self, tensor: Tensor) -> str | None:
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((name for name, value in named if value is tensor), None)

    def ad_isolated(self) -> AbstractContextManager[Any]:
        return tape.no_grad()  # type: ignore[no-any-return]

    def wants_gradient(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and tape.grad_enabled()

    def with_vjp(
        self, outputs: list[Any], inputs: list[Any], vjp: Callable[[Gradients], Gradients]
    ) -> list[Any]:
        edges = [tensor.edge() for tensor in inputs]
        node = DriverNode("Amanda", edges, vjp, (), len(outputs))
        values = [tensor.alias() for tensor in outputs]
        tape.attach(node, values)
        return values

    # -- the patches ------------------------------------------------------

    def _executing(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def execute(op: ops.LoopbackOp, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if not self.is_active:
                return vanilla(op, args, kwargs)
            tensors = [name for name in op.signature.parameters if op.takes_tensor(name)]
            signature = self.signature(op, tensors, op.signature)
            if not op.inplace:
                return self.run_operator(op, op.__name__, signature, args, kwargs, op.compute)
            return self._run_inplace(op, signature, args, kwargs)

        return execute

    def _run_inplace(
        self, op: ops.LoopbackOp, signature: Any, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run an operator that changes its first argument, which stays the result."""

        def declared(*args: Any, **kwargs: Any) -> list[Any]:
            return list(op.signature.bind(*args, **kwargs).arguments.values())

        def compute(*args: Any, **kwargs: Any) -> Any:
            first, *rest = declared(*args, **kwargs)
            # The value that a routine has returned must not be changed in place.
            return op.compute(first if first is target else _copied(first), *rest)

        target = declared(*args, **kwargs)[0]

        result = self.run_operator(op, op.__name__, signature, args, kwargs, compute)
        if result is not target:
            target.become(result)
        return target

    def _recording_node(self, vanilla: Callable[..., None]) -> Callable[..., None]:
        def init(
            node: GradientNode, name: str, edges: list[Any], *args: Any, **kwargs: Any
        ) -> None:
            vanilla(node, name, edges, *args, **kwargs)
            operator = self.thread.operator
            if operator is not None and not isinstance(node, (AccumulateGrad, DriverNode)):
                names = operator.names_by(Tensor.edge)
                told = ["" if edge is None else names.get(edge, "") for edge in edges]
                self.claims[node] = operator.claim(name, told)

        return init

    def claim_nodes(self, operator: OperatorRun, outputs: list[Any]) -> None:
        """A leaf's accumulation belongs to the first operator of the iteration that uses it."""
        for tensor in operator.inputs:
            edge = None if tensor is None else tensor.edge()
            while edge is not None and isinstance(edge[0], DriverNode):
                edge = edge[0].edges[edge[1]]  # to the tensor that the driver has substituted
            if edge is not None and isinstance(edge[0], AccumulateGrad):
                claimed = self.claims.get(edge[0])
                if claimed is None or not claimed.is_live():
                    self.claims[edge[0]] = operator.claim(edge[0].name, [])

    def _running_node(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(node: GradientNode, grads: Gradients) -> Any:
            if isinstance(node, DriverNode):
                return vanilla(node, grads)
            claimed = self.claims.get(node)
            return self.run_backward_operator(claimed, grads, lambda grads: vanilla(node, grads))

        return run

    def _calling_module(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inputs = (*args, *kwargs.values())
            if not self.thread.modules:
                self._models.add(module)
            with self.module_call(module, module.named_modules, inputs) as returned:
                return returned(vanilla(module, *args, **kwargs))

        return call

    def _stepping(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any) -> None:
            with self.optimizer_step():
                vanilla(*args)

        return update

    def trains(self, module: Any) -> bool:
        return tape.grad_enabled()

    def _running_graph(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run_graph(*args: Any, **kwargs: Any) -> Any:
            with self.backward_pass(continues=kwargs["create_graph"]):
                return vanilla(*args, **kwargs)

        return run_graph


def _copied(source: Tensor) -> Tensor:
    """A tensor of the same value and the same place in the graph, in memory of its own."""
    copy = Tensor(list(source.data), source.shape)
    copy.requires_grad, copy.node, copy.index = source.requires_grad, source.node, source.index
    return copy
