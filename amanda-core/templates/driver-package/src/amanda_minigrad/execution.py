"""One instrumented execution of an operator."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from amanda.engine.backward import OpHandle, replaced_gradients
from amanda.engine.plan import ActionPlan
from amanda.errors import RoutineResultError
from amanda.interface.action import ActionKind
from amanda.interface.calls import BackwardCall, OpCall

from minigrad import Leaf, Node, Operator, Parameter, Tensor

if TYPE_CHECKING:
    from amanda_minigrad.driver import EagerDriver

Tensors = list["Tensor | None"]


class DriverNode(Node):
    """A node that the driver has put into the graph: no backward operator."""

    def __init__(self, name: str, tensors: Sequence[Tensor | None], outputs: int) -> None:
        edges = [None if tensor is None else tensor.edge for tensor in tensors]
        super().__init__(name, edges, lambda arrays: arrays, outputs)
        self.passing: Callable[[Tensors], Tensors] = list

    def run(self, grads: Tensors) -> Tensors:
        """What becomes of the gradients on their way."""
        return self.passing(grads)


@attrs.frozen
class BackwardOp:
    """What ``get_backward_op()`` gives: unlike the node, it keeps nothing alive."""

    __name__: str


@attrs.frozen(eq=False)
class Claim:
    """Says that a node is a backward operator of the forward operator of `handle`."""

    handle: OpHandle
    call: BackwardCall


class Past:
    """A forward tensor as a backward analysis reads it: gone when nobody else holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)

    def __call__(self) -> Tensor | None:
        return self._reference()

    def constant(self) -> Tensor | None:
        """The value of a parameter; None for other tensors."""
        return value_of(self._reference())


def value_of(tensor: Tensor | None) -> Tensor | None:
    """The current value of a parameter; None for other tensors."""
    return Tensor(tensor.data) if isinstance(tensor, Parameter) else None


@attrs.define(eq=False)
class MinigradCall(OpCall):
    """What core is told of the operator."""

    vanilla: Callable[..., Any] = attrs.field(kw_only=True)

    def value(self, index: int) -> Tensor | None:
        """For ``context.get_value()``."""
        return value_of(self.inputs[index])

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        """For ``context.get_function()`` (Capability.REPLAY): it holds no tensor."""
        vanilla, op, attributes = self.vanilla, self.op, dict(self.attributes)
        return lambda inputs: vanilla(op, inputs, attributes)


class Execution:
    """Runs one operator with its plan.

    Args:
        driver: whose it is.
        vanilla: the framework's own ``execute``.
        op, inputs, attributes: what it is called with.
    """

    def __init__(
        self,
        driver: EagerDriver,
        vanilla: Callable[..., Any],
        op: Operator,
        inputs: Sequence[Tensor | None],
        attributes: dict[str, Any],
    ) -> None:
        self._driver, self._dispatcher = driver, driver.dispatcher
        self._vanilla, self._op = vanilla, op
        self._inputs, self._attributes = inputs, attributes
        self._id = driver.next_id(op)
        self._handle = OpHandle(self._id, self._dispatcher.scopes(), _past(inputs))

    def run(self) -> Any:
        """The operator's result, as the user gets it."""
        plan, analysis = self._dispatcher.plan(self._id), None
        if plan is None:
            analysis = self._dispatcher.begin(self._call())
            plan = analysis.plan
        inputs = list(self._inputs)
        for action in plan.before:
            inputs = self._dispatcher.run(action, inputs)
        # An analysis that is to see the outputs may yet ask for the gradients of the inputs.
        if plan.after_backward or analysis is not None:
            inputs = self._with_input_gradients(inputs)
        # What has a higher number than this comes from the operator itself.
        first = Node("", [], list).number
        outputs = self._outputs(plan, inputs)
        self._handle.outputs = _past(outputs)
        if analysis is not None:
            plan = analysis.finish(outputs)
        if plan.claims:
            self._claim(inputs, outputs, first)
        if plan.before_backward or plan.replace_backward:
            outputs = self._with_output_gradients(plan, inputs, outputs)
        for action in plan.after:
            outputs = self._dispatcher.run(action, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _call(self) -> MinigradCall:
        return MinigradCall(
            op=self._op,
            op_id=self._id,
            inputs=self._inputs,
            names=self._names(),
            attributes=self._attributes,
            vanilla=self._vanilla,
        )

    def _names(self) -> list[str]:
        """The declared name of each input; the inputs of a list have the same."""
        parameters = self._op.signature.parameters.values()
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        return (names + names[-1:] * len(self._inputs))[: len(self._inputs)]

    def _outputs(self, plan: ActionPlan, inputs: Tensors) -> Tensors:
        """Run the operator, or what stands in for it."""
        if plan.replace is None:
            result = self._vanilla(self._op, inputs, self._attributes)
        else:
            result = self._dispatcher.replace(plan.replace, inputs, self._call())
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if not outputs or not all(isinstance(output, Tensor) for output in outputs):
            raise RoutineResultError(
                f"{plan.replace.routine if plan.replace else self._op.__name__} replaces op "
                f"{self._id} and must return its output tensors, got {result!r:.60}"
            )
        return outputs

    # -- backward operators -----------------------------------------------

    def _claim(self, inputs: Tensors, outputs: Tensors, first: int) -> None:
        """Note which nodes this execution has brought into the graph."""
        names: dict[Any, str] = {}
        for name, tensor in zip(self._names(), inputs, strict=True):
            if tensor is not None:
                names.setdefault(tensor.edge, name)
        counts: collections.Counter[str] = collections.Counter()
        todo = [output.edge[0] for output in outputs if output is not None and output.edge]
        seen: set[Node] = set()
        while todo:
            node = todo.pop(0)
            if node in seen or node.number <= first or isinstance(node, Leaf):
                continue
            seen.add(node)
            todo += [edge[0] for edge in node.edges if edge is not None]
            call = BackwardCall(
                op=BackwardOp(node.name),
                op_id=f"{self._id}/grad/{node.name}:{counts[node.name]}",
                names=["" if edge is None else names.get(edge, "") for edge in node.edges],
                inputs=self._handle.inputs,
                outputs=self._handle.outputs,
            )
            counts[node.name] += 1
            self._driver.claims[node] = Claim(self._handle, call)

    def _with_input_gradients(self, inputs: Tensors) -> Tensors:
        """The inputs, with a node behind them that sees all their gradients at once."""
        node = DriverNode("input_gradients", inputs, len(inputs))
        acting = _Acting(self._driver, self._handle)
        node.passing = lambda grads: acting.run(ActionKind.AFTER_BACKWARD_OP, grads)
        return _behind(node, inputs, [tensor is not None and tensor.edge for tensor in inputs])

    def _with_output_gradients(
        self, plan: ActionPlan, inputs: Tensors, outputs: Tensors
    ) -> Tensors:
        """The outputs, with a node behind them that sees all their gradients at once.

        It leads to the operator's own nodes, and also past them to the inputs where a tool
        supplies the operator's whole vector-Jacobian product.
        """
        replaced = plan.replace_backward is not None
        node = DriverNode("output_gradients", outputs + inputs * replaced, len(outputs))
        acting, count = _Acting(self._driver, self._handle), len(inputs)

        def passing(grads: Tensors) -> Tensors:
            grads = acting.run(ActionKind.BEFORE_BACKWARD_OP, grads)
            return acting.replace(grads, count) if replaced else grads

        node.passing = passing
        wanted = [replaced or (output is not None and output.edge) for output in outputs]
        return _behind(node, outputs, wanted)


class _Acting:
    """Runs the actions on an operator as a whole, of the scopes that have not ended.

    A node holds it: it holds neither tensors nor tools.
    """

    def __init__(self, driver: EagerDriver, handle: OpHandle) -> None:
        self._dispatcher, self._handle = driver.dispatcher, handle

    def run(self, kind: ActionKind, grads: Tensors) -> Tensors:
        """The gradients after the routines of one kind."""
        for action in self._actions(kind):
            grads = self._dispatcher.run(action, grads)
        return grads

    def replace(self, grads: Tensors, count: int) -> Tensors:
        """The gradients for the operator's own nodes, and those for its `count` inputs."""
        nothing: Tensors = [None] * count
        for action in self._actions(ActionKind.REPLACE_BACKWARD_OP):
            supplied = replaced_gradients(self._dispatcher, action, grads, nothing)
            return [*[None] * len(grads), *supplied]
        return [*grads, *nothing]

    def _actions(self, kind: ActionKind) -> list[Any]:
        if self._dispatcher.is_paused():
            return []
        return [action for _, record in self._handle.records() for action in record.actions(kind)]


def _past(tensors: Sequence[Tensor | None]) -> list[Past | None]:
    return [None if tensor is None else Past(tensor) for tensor in tensors]


def _behind(node: DriverNode, tensors: Tensors, wanted: Sequence[Any]) -> Tensors:
    """The tensors, those that are wanted as outputs of a node."""
    if not any(node.edges):
        return tensors
    copies = list(tensors)
    for index, tensor in enumerate(tensors):
        if tensor is not None and wanted[index]:
            copies[index] = copy = Tensor(tensor.data)
            copy.edge = (node, index)
    return copies
