"""The driver: where minigrad is patched, and the job of each patch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from amanda.driver import BackwardExecution, Namespace, PatchSet

import minigrad
from amanda_minigrad.plugin import MinigradDriver
from minigrad import MiniTensor, Node


class MiniNode(Node):
    """A node that the driver has put into the graph: no backward operator."""

    def __init__(
        self, edges: list[Any], vjp: Callable[[list[Any]], list[Any]], outputs: int
    ) -> None:
        super().__init__("amanda", edges, list, outputs)
        self.passing = vjp

    def run(self, grads: list[Any]) -> list[Any]:
        """Hand the gradients on, as the routines leave them."""
        return self.passing(grads)


class MinigradEagerDriver(MinigradDriver):
    """Instruments minigrad while it is attached.

    Four functions are replaced: the one that runs an operator, the constructor and the run of a
    node of the gradient graph, and the run of the graph, whose end is the end of an iteration.
    All are looked up at each call. A function that users import by name, as they may import
    ``backward``, could not be replaced for them.
    """

    def __init__(self, dispatcher: Any) -> None:
        super().__init__(dispatcher)
        self._claims: weakref.WeakKeyDictionary[Node, BackwardExecution] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def namespace(self) -> Namespace:
        """The name of the framework for mapping rules and results."""
        return Namespace("minigrad/0.1/eager")

    def patch(self, patches: PatchSet) -> None:
        """Replace the four functions."""
        patches.wrap(minigrad, "execute", self._executing)
        patches.wrap(minigrad, "run_graph", self._running_graph)
        patches.wrap(Node, "__init__", self._recording_node)
        patches.wrap(Node, "run", self._running_node)

    # -- tensors and differentiation --------------------------------------

    def is_tensor(self, value: Any) -> bool:
        """True if a routine may return it for a tensor."""
        return isinstance(value, MiniTensor)

    def current_value(self, tensor: MiniTensor) -> MiniTensor | None:
        """The value of a parameter, for ``context.get_value()``."""
        return MiniTensor(tensor.data) if isinstance(tensor, minigrad.MiniParameter) else None

    def ad_isolated(self) -> AbstractContextManager[None]:
        """Within it, operators leave no nodes."""
        return minigrad.no_grad()

    def wants_gradient(self, tensor: MiniTensor) -> bool:
        """True if operators on it are recorded."""
        return tensor.edge is not None and minigrad.grad_enabled()

    def with_vjp(
        self, outputs: list[Any], inputs: list[Any], vjp: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Tensors like `outputs` behind a node whose gradients go through `vjp` to `inputs`."""
        node = MiniNode([tensor.edge for tensor in inputs], vjp, len(outputs))
        values = [MiniTensor(tensor.data) for tensor in outputs]
        for index, value in enumerate(values):
            value.edge = (node, index)
        return values

    # -- the patches ------------------------------------------------------

    def _executing(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def execute(
            op: minigrad.MiniOperator,
            inputs: Sequence[MiniTensor | None],
            attributes: dict[str, Any],
        ) -> Any:
            if not self.is_active:
                return vanilla(op, inputs, attributes)

            def function(*inputs: Any, **attributes: Any) -> Any:
                return vanilla(op, inputs, attributes)

            parameters = op.signature.parameters.values()
            tensors = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
            signature = self.signature(op, tensors, op.signature)
            return self.run_operator(op, op.__name__, signature, inputs, attributes, function)

        return execute

    def _recording_node(self, vanilla: Callable[..., None]) -> Callable[..., None]:
        def init(node: Node, name: str, edges: list[Any], *args: Any) -> None:
            vanilla(node, name, edges, *args)
            operator = self.thread.operator
            if operator is not None and not isinstance(node, minigrad.Leaf):
                names = operator.names_by(lambda tensor: tensor.edge)
                told = ["" if edge is None else names.get(edge, "") for edge in edges]
                self._claims[node] = operator.claim(name, told)

        return init

    def _running_node(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run(node: Node, grads: list[Any]) -> Any:
            claimed = self._claims.get(node)
            return self.run_backward_operator(claimed, grads, lambda grads: vanilla(node, grads))

        return run

    def _running_graph(self, vanilla: Callable[..., Any]) -> Callable[..., Any]:
        def run_graph(outputs: Sequence[MiniTensor]) -> None:
            with self.backward_pass():
                vanilla(outputs)

        return run_graph
