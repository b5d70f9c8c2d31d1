"""One instrumented execution of an operator of the toy framework."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from amanda.engine.backward import OpHandle, replaced_gradients
from amanda.engine.dispatch import OpExecution
from amanda.engine.plan import ActionPlan
from amanda.errors import RoutineResultError
from amanda.interface.action import ActionKind, InstPoint
from amanda.interface.calls import BackwardCall, OpCall
from amanda.testing.loopback import ops, tape
from amanda.testing.loopback.tape import AccumulateGrad, Buffer, Node, Parameter, Tensor

if TYPE_CHECKING:
    from amanda.interface.action import Action
    from amanda.testing.loopback.driver import LoopbackDriver

Tensors = list["Tensor | None"]


class DriverNode(Node):
    """A node of the gradient graph that the driver has put there: no backward operator."""

    __slots__ = ()


@attrs.frozen
class BackwardOp:
    """What ``get_backward_op()`` gives: unlike the node, it keeps no tensor alive."""

    __name__: str


@attrs.frozen(eq=False)
class Claim:
    """Says that a node is a backward operator of the forward operator of `handle`."""

    handle: OpHandle
    call: BackwardCall


class WeakTensor:
    """A forward tensor as a backward analysis reads it: gone when nobody else holds it."""

    def __init__(self, source: Tensor) -> None:
        self._reference = weakref.ref(source)

    def __call__(self) -> Tensor | None:
        return self._reference()

    def constant(self) -> Tensor | None:
        """The value of a parameter or buffer; None for other tensors."""
        return value_of(self._reference())


def value_of(source: Tensor | None) -> Tensor | None:
    """The current value of a parameter or buffer; None for other tensors."""
    return source.alias() if isinstance(source, (Parameter, Buffer)) else None


@attrs.define(eq=False)
class Arguments:
    """The arguments of one call, flattened as design rule 4 wants.

    Attributes:
        inputs: tensors in the order of the declared parameters.
        names: the parameter of each input.
        attributes: all other arguments.
    """

    op: ops.Op
    inputs: Tensors
    names: list[str]
    attributes: dict[str, Any]
    _lengths: dict[str, int]

    @classmethod
    def of(cls, op: ops.Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Flatten the arguments of a call."""
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found = cls(op, [], [], {}, {})
        for name, value in bound.arguments.items():
            if isinstance(value, (list, tuple)) and op.takes_tensor(name):
                found._lengths[name] = len(value)
                found.inputs += value
                found.names += [name] * len(value)
            elif isinstance(value, Tensor) or (value is None and op.takes_tensor(name)):
                found.inputs.append(value)
                found.names.append(name)
            else:
                found.attributes[name] = value
        return found

    def rebuilt(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Keyword arguments for the operator, with other tensors."""
        rest = iter(inputs)
        arguments: dict[str, Any] = {}
        for name in dict.fromkeys(self.names):
            length = self._lengths.get(name)
            arguments[name] = next(rest) if length is None else [next(rest) for _ in range(length)]
        empty: dict[str, Any] = {name: [] for name, length in self._lengths.items() if not length}
        return {**self.attributes, **empty, **arguments}


@attrs.define(eq=False)
class LoopbackCall(OpCall):
    """What core is told of the operator."""

    arguments: Arguments | None = None

    def value(self, index: int) -> Tensor | None:
        return value_of(self.inputs[index])

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        assert self.arguments is not None
        without_tensors = attrs.evolve(self.arguments, inputs=[])
        return lambda inputs: without_tensors.op.compute(**without_tensors.rebuilt(inputs))


class Execution:
    """Runs one operator with its plan."""

    def __init__(
        self, driver: LoopbackDriver, op: ops.Op, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._driver = driver
        self._dispatcher = driver.dispatcher
        self._op = op
        self._arguments = Arguments.of(op, args, kwargs)
        self._id = driver.ids.next(op.__name__)
        self._started = tape.next_sequence()

    def run(self) -> Any:
        """The operator's result as the user gets it."""
        arguments = self._arguments
        plan = self._dispatcher.plan(self._id)
        analysis: OpExecution | None = None
        if plan is None:
            analysis = self._dispatcher.begin(self._call())
            plan = analysis.plan
        inputs = list(arguments.inputs)
        for action in plan.before:
            inputs = self._dispatcher.run(action, inputs)
        handle = self._handle()
        # An analysis that sees the outputs may yet ask for their gradients.
        if _acts_on_gradients(plan) or (analysis is not None and self._is_analysed_after()):
            inputs = self._with_input_gradients(handle, inputs)
        outputs, plan = self._executed(plan, analysis, handle, inputs)
        if _acts_on_gradients(plan):
            outputs = self._with_output_gradients(handle, plan, inputs, outputs)
        for action in plan.after:
            outputs = self._dispatcher.run(action, outputs)
        return self._returned(outputs)

    def _call(self) -> LoopbackCall:
        arguments = self._arguments
        return LoopbackCall(
            op=self._op,
            op_id=self._id,
            inputs=arguments.inputs,
            names=arguments.names,
            attributes=arguments.attributes,
            module=self._driver.ids.module,
            arguments=arguments,
        )

    def _handle(self) -> OpHandle:
        weak = [None if t is None else WeakTensor(t) for t in self._arguments.inputs]
        return OpHandle(self._id, self._dispatcher.scopes(), weak)

    def _is_analysed_after(self) -> bool:
        scopes = self._dispatcher.scopes()
        return any(scope.analyses_at(InstPoint.AFTER_FORWARD_OP) for scope in scopes)

    # -- the operator itself ----------------------------------------------

    def _executed(
        self,
        plan: ActionPlan,
        analysis: OpExecution | None,
        handle: OpHandle,
        inputs: Tensors,
    ) -> tuple[Tensors, ActionPlan]:
        """Outputs of the operator, its backward operators claimed, and the complete plan."""
        first = tape.next_sequence()
        if plan.replace is not None:
            outputs = self._replaced(plan, inputs)
        else:
            if self._op.inplace and inputs[0] is not self._arguments.inputs[0]:
                # What a routine has returned must not be changed in place.
                inputs = [_copied(inputs[0]), *inputs[1:]]
            with self._driver.vanilla():
                result = self._op.compute(**self._arguments.rebuilt(inputs))
            outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        handle.outputs = [WeakTensor(t) for t in outputs if t is not None]
        if analysis is not None:
            plan = analysis.finish(outputs)
        if plan.claims:
            self._claim(handle, inputs, outputs, first)
        return outputs, plan

    def _replaced(self, plan: ActionPlan, inputs: Tensors) -> Tensors:
        action = plan.replace
        assert action is not None
        result = self._dispatcher.replace(action, inputs, self._call())
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if not outputs or not all(isinstance(t, Tensor) for t in outputs):
            raise RoutineResultError(
                f"{action.routine} replaces op {self._id} and must return its output tensors, "
                f"got {result!r:.60}"
            )
        return outputs

    def _returned(self, outputs: Tensors) -> Any:
        if self._op.inplace:
            target, result = self._arguments.inputs[0], outputs[0]
            assert target is not None
            assert result is not None
            if result is not target:
                target.become(result)
            return target
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    # -- backward operators -----------------------------------------------

    def _claim(self, handle: OpHandle, inputs: Tensors, outputs: Tensors, first: int) -> None:
        """Note which backward operators this execution has brought into the graph."""
        names: dict[Any, str] = {}
        for name, source in zip(self._arguments.names, inputs, strict=True):
            if source is not None:
                names.setdefault(source.edge(), name)
        counts: collections.Counter[str] = collections.Counter()
        claims = self._driver.claims
        todo = [t.node for t in outputs if t is not None and t.node is not None]
        seen: set[Node] = set()
        while todo:
            node = todo.pop(0)
            leaf = isinstance(node, AccumulateGrad)
            if node in seen or (node.sequence < self._started and not leaf):
                continue
            seen.add(node)
            todo += [edge[0] for edge in node.edges if edge is not None]
            # A leaf belongs to the first operator of the iteration that consumes it.
            taken = leaf and node in claims and claims[node].handle.records()
            if isinstance(node, DriverNode) or taken or (node.sequence < first and not leaf):
                continue
            backward_id = f"{self._id}/grad/{node.name}:{counts[node.name]}"
            counts[node.name] += 1
            claims[node] = Claim(handle, self._backward_call(handle, node, backward_id, names))

    def _backward_call(
        self, handle: OpHandle, node: Node, backward_id: str, names: dict[Any, str]
    ) -> BackwardCall:
        return BackwardCall(
            op=BackwardOp(node.name),
            op_id=backward_id,
            names=["" if edge is None else names.get(edge, "") for edge in node.edges],
            inputs=handle.inputs,
            outputs=handle.outputs,
        )

    def _with_input_gradients(self, handle: OpHandle, inputs: Tensors) -> Tensors:
        """The inputs, with a node behind them that sees all their gradients at once."""

        def passing(grads: Tensors) -> Tensors:
            for action in self._live_actions(handle, ActionKind.AFTER_BACKWARD_OP):
                grads = self._dispatcher.run(action, grads)
            return grads

        return _behind("InputGradients", inputs, inputs, passing)

    def _with_output_gradients(
        self, handle: OpHandle, plan: ActionPlan, inputs: Tensors, outputs: Tensors
    ) -> Tensors:
        """The outputs, with a node behind them that sees all their gradients at once.

        It leads to the operator's own backward operators and, past them, to the
        inputs, for the gradients that a tool supplies for the whole operator.
        """

        def passing(grads: Tensors) -> Tensors:
            for action in self._live_actions(handle, ActionKind.BEFORE_BACKWARD_OP):
                grads = self._dispatcher.run(action, grads)
            nothing: Tensors = [None] * len(inputs)
            for action in self._live_actions(handle, ActionKind.REPLACE_BACKWARD_OP):
                gradients = replaced_gradients(self._dispatcher, action, grads, nothing)
                return [*[None] * len(grads), *gradients]
            return [*grads, *nothing]

        sources = [*outputs, *inputs]
        if plan.replace_backward is None:
            sources = outputs
        return _behind("OutputGradients", outputs, sources, passing)

    def _live_actions(self, handle: OpHandle, kind: ActionKind) -> list[Action]:
        """The actions on the whole operator that apply to a backward running now."""
        if self._dispatcher.is_paused():
            return []
        return [action for _, record in handle.records() for action in record.actions(kind)]


def _behind(
    name: str, tensors: Tensors, sources: Tensors, passing: Callable[[Tensors], Tensors]
) -> Tensors:
    """Copies of `tensors` whose gradients go through `passing` to `sources`.

    Where there are more sources than tensors, all copies require a gradient.
    """
    edges = [None if t is None else t.edge() for t in sources]
    if not tape.grad_enabled() or not any(edges):
        return tensors
    node = DriverNode(name, edges, passing, (), len(tensors))
    copies = list(tensors)
    for index, source in enumerate(tensors):
        if source is not None and (source.requires_grad or len(sources) > len(tensors)):
            copy = source.alias()
            copy.requires_grad, copy.node, copy.index = True, node, index
            copies[index] = copy
    return copies


def _acts_on_gradients(plan: ActionPlan) -> bool:
    return bool(plan.before_backward or plan.after_backward or plan.replace_backward)


def _copied(source: Tensor | None) -> Tensor | None:
    """A tensor of the same value and the same place in the graph, in memory of its own."""
    if source is None:
        return None
    copy = Tensor(list(source.data), source.shape)
    copy.requires_grad, copy.node, copy.index = source.requires_grad, source.node, source.index
    return copy
