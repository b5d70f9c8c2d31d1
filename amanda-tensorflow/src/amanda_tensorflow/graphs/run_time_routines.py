"""The nodes of an instrumented copy that call Python, and their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.errors import CapabilityError, RoutineResultError, described
from amanda.interface.action import Action, ActionKind
from amanda.state import STATE
from amanda.tool import Tool
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building
from amanda_tensorflow.graphs.tool_errors import FAILURES
from amanda_tensorflow.operators.types import UNROUTABLE

STRAIGHT_THROUGH = "AmandaStraightThrough"
DIFFERENTIABLE = "AmandaDifferentiableRoutine"
_SWITCHES = frozenset({"Switch", "RefSwitch", "Enter", "RefEnter", "Merge", "RefMerge"})
"""Operators that run whether or not what follows them does: waiting for one is not enough."""


def _straight_through(op: Any, *gradients: Any) -> list[Any]:
    """The gradient of IdentityN([new, old]) goes to the old tensors unchanged."""
    half = len(op.outputs) // 2
    return [None] * half + list(gradients[:half])


def _differentiated(op: Any, *gradients: Any) -> list[Any]:
    """The gradient of a node that calls Python is a node that differentiates what it calls."""
    node = _internals.registered_routine(op.get_attr("token"))
    wanted = [t.dtype.is_floating or t.dtype.is_complex for t in op.inputs]
    known = [
        tf.zeros_like(output) if gradient is None else gradient
        for output, gradient in zip(op.outputs, gradients, strict=True)
    ]
    product = VectorJacobianProduct(node, len(op.inputs), wanted)
    types = [t.dtype for t, is_wanted in zip(op.inputs, wanted, strict=True) if is_wanted]
    found = iter(product.insert([*op.inputs, *known], types))
    result = [next(found) if is_wanted else None for is_wanted in wanted]
    for tensor, source in zip(result, op.inputs, strict=True):
        if tensor is not None:
            tensor.set_shape(source.shape)
    return result


tf.RegisterGradient(STRAIGHT_THROUGH)(_straight_through)
tf.RegisterGradient(DIFFERENTIABLE)(_differentiated)


def is_reference(tensor: Any) -> bool:
    """Whether a tensor is a reference to a variable of TensorFlow 1."""
    return _internals.is_reference(tensor.dtype)


def is_routable(tensor: Any) -> bool:
    """Whether a routine may put another tensor in place of this one."""
    if tensor is None or tensor.dtype in UNROUTABLE:
        return False
    return not is_reference(tensor)


def _is_static(tensor: Any) -> bool:
    """Whether TensorFlow may need to know a tensor's value while it builds a graph."""
    return bool(tensor.op.type == "Const" and tensor.dtype.is_integer)


class PythonNode(_internals.EagerFunc):
    """What the runtime calls for one node of a graph. The graph keeps it alive."""

    def __init__(self) -> None:
        super().__init__(None, None, False)

    def insert(self, inputs: Sequence[Any], types: Sequence[Any]) -> list[Any]:
        """Add the node to the current graph; its outputs."""
        graph = _internals.default_graph()
        _internals.keep_alive(graph, self)
        token = _internals.register_routine(self)
        with graph.gradient_override_map({"EagerPyFunc": DIFFERENTIABLE}):
            result = _internals.eager_py_func(
                input=list(inputs), token=token, is_async=False, Tout=list(types)
            )
        if not types:
            self.op = result
            return []
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        self.op = outputs[0].op
        return outputs

    def compute(self, values: Sequence[Any]) -> list[Any]:
        """The outputs for the values of the inputs, computed at once."""
        raise NotImplementedError

    def __call__(self, device: Any, token: Any, args: Sequence[Any]) -> list[Any]:
        """Called by the runtime, in one of its threads."""
        try:
            if _internals.executing_eagerly():
                return self.compute(list(args))
            with _internals.eager_mode():
                return self.compute(list(args))
        except BaseException as error:
            raise FAILURES.carrier(error) from None


class VectorJacobianProduct(PythonNode):
    """The gradient of another node: runs it again under a tape.

    Args:
        of: the node.
        count: how many inputs that has; the gradients of its outputs follow them.
        wanted: which of these inputs have a gradient.
    """

    def __init__(self, of: PythonNode, count: int, wanted: Sequence[bool]) -> None:
        super().__init__()
        self._of = of
        self._count = count
        self._wanted = wanted

    def compute(self, values: Sequence[Any]) -> list[Any]:
        inputs = [tf.identity(value) for value in values[: self._count]]
        sources = [t for t, is_wanted in zip(inputs, self._wanted, strict=True) if is_wanted]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = self._of.compute(inputs)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, values[self._count :], strict=True)
            if output.dtype.is_floating or output.dtype.is_complex
        ]
        found = tape.gradient(
            [output for output, _ in pairs],
            sources,
            [gradient for _, gradient in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(gradient) for gradient in found]


class RunTimeRoutine(PythonNode):
    """Calls one routine at each execution of the operator that it was recorded for.

    After its scope it changes nothing.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        action: Action,
        selected: Sequence[Any],
        building: Building,
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._building: Building | None = building
        building.routines.append(self)
        # The routine is given what was selected and nothing else.
        self._action = attrs.evolve(action, select=None)
        self._scopes = [weakref.ref(scope) for scope in building.scopes]
        self._selected: Sequence[Any] = selected
        self._positions = [
            i
            for i, tensor in enumerate(selected)
            # What an operator writes to may have no value yet.
            if tensor is not None and not (building.takes_reference and is_reference(tensor))
        ]
        self._routed = [
            i
            for i, tensor in enumerate(selected)
            if is_routable(tensor) and not (action.select is None and _is_static(tensor))
        ]
        self._count = len(selected)
        self._keywords = _symbolic_keywords(action, building.graph)
        # What was computed with it is differentiated with it, whenever that is.
        self._outlives = action.differentiable

    # -- while the copy is built ------------------------------------------

    def inserted(self, values: Sequence[Any]) -> list[Any]:
        """Add the node; what is to take the place of the selected tensors."""
        new = list(self._selected)
        types = [new[i].dtype for i in self._routed]
        outputs = self._placed(values, types)
        for index, output in zip(self._routed, outputs, strict=True):
            old = new[index]
            if old.shape.rank is not None and not self._action.differentiable:
                # The optimizer rewrites what follows only if it knows the shape.
                output = _internals.ensure_shape(output, old.shape)
            new[index] = output
        self._building, self._selected = None, ()
        return new

    def _placed(self, values: Sequence[Any], types: Sequence[Any]) -> list[Any]:
        """Add the node where it runs if and only if the operator does."""
        building = self._building
        assert building is not None
        inputs = [self._selected[i] for i in self._positions]
        inputs += [self._action.kwargs[name] for name in self._keywords]
        anchors: list[Any] = []
        if not inputs:
            present = [t for t in values if t is not None]
            inputs = [t for t in present if t.op.type in _SWITCHES and is_routable(t)][:1]
            anchors = [t.op for t in present] or list(building.anchors)
        self._anchored = len(inputs) - len(self._positions) - len(self._keywords)
        with tf.control_dependencies([*anchors, *building.earlier()]):
            outputs = self.insert(inputs, types)
        self._forget_symbols()
        if not outputs:
            building.controls.append(self.op)
        return outputs

    def _forget_symbols(self) -> None:
        """Symbolic keywords are inputs of the node now, and would keep the graph alive."""
        kwargs = {k: v for k, v in self._action.kwargs.items() if k not in self._keywords}
        self._action = attrs.evolve(self._action, kwargs=kwargs)

    # -- at run time ------------------------------------------------------

    def compute(self, values: Sequence[Any]) -> list[Any]:
        values = list(values)[: len(values) - self._anchored or None]
        count = len(values) - len(self._keywords)
        selected: list[Any] = [None] * self._count
        for position, value in zip(self._positions, values[:count], strict=True):
            selected[position] = value
        new = self._adopting(self._run, selected, values[count:])
        if new is not selected:
            self._refuse_others(selected, new)
            return [self._fitted(selected[i], new[i]) for i in self._routed]
        return [selected[i] for i in self._routed]

    def _run(self, selected: list[Any], keywords: Sequence[Any]) -> list[Any]:
        return self._dispatcher.run(self._called(keywords), selected)

    def _called(self, keywords: Sequence[Any]) -> Action:
        """The action with the values of its symbolic keywords."""
        if not self._keywords:
            return self._action
        named = dict(zip(self._keywords, keywords, strict=False))
        return attrs.evolve(self._action, kwargs={**self._action.kwargs, **named})

    def _adopting(self, run: Any, selected: list[Any], keywords: Sequence[Any]) -> Any:
        """Call `run` in the scopes of the copy, to which the runtime's thread belongs.

        Returns:
            What it returns; `selected` itself where the scopes are over.
        """
        found = [reference() for reference in self._scopes]
        alive = tuple(scope for scope in found if scope is not None and scope.alive)
        if not alive and not self._outlives:
            return selected
        state = STATE
        outer = state.scopes, state.enabled
        state.scopes, state.enabled = alive, True
        try:
            return run(selected, keywords)
        finally:
            state.scopes, state.enabled = outer

    def release(self) -> None:
        """Let go of the tool: the scope is over. What is differentiated stays."""
        if not self._outlives:
            self._action = attrs.evolve(self._action, tool=Tool(), func=_nothing, kwargs={})

    def _fitted(self, old: Any, new: Any) -> Any:
        """A result in the type that the graph expects.

        Raises:
            RoutineResultError: its shape is another one.
        """
        if new is old:
            return old
        return fitted(self._action, old, new)

    def _refuse_others(self, selected: Sequence[Any], new: Sequence[Any]) -> None:
        """A tensor that is part of the graph's structure stays what it is.

        Raises:
            CapabilityError: the routine has changed one.
        """
        for index, (old, result) in enumerate(zip(selected, new, strict=True)):
            if result is not old and index not in self._routed:
                raise CapabilityError(
                    f"{self._action.routine} at op {self._action.op_id} changes tensor {index} of "
                    f"what it selects, {old!r:.60}: a resource, or a constant that shapes are "
                    "computed from; select a constant by its position to change it"
                )


def _nothing(*tensors: Any) -> None:
    """A routine that changes nothing."""


class ReplacementRoutine(RunTimeRoutine):
    """Runs a function in place of an operator or of what computes its gradient."""

    def inserted(self, values: Sequence[Any]) -> list[Any]:
        building = self._building
        assert building is not None
        template = building.template
        # It is the operator now.
        self._outlives = True
        self._wanted = [tensor is not None for tensor in template]
        self._likes = self._shapes(building)
        self._types = [None if tensor is None else tensor.dtype for tensor in template]
        types = [kind for kind in self._types if kind is not None]
        found = iter(self._placed(values, types))
        self._building, self._selected = None, ()
        return [next(found) if is_wanted else None for is_wanted in self._wanted]

    def _shapes(self, building: Building) -> list[Any]:
        """The shape of the zeros that stand for a gradient that is not given."""
        likes = list(building.likes) or [None] * len(building.template)
        return [None if t is None or not t.shape.is_fully_defined() else t.shape for t in likes]

    def compute(self, values: Sequence[Any]) -> list[Any]:
        count = len(values) - self._anchored - len(self._keywords)
        selected: list[Any] = [None] * self._count
        for position, value in zip(self._positions, values[:count], strict=True):
            selected[position] = value
        found: list[Any] = self._adopting(self._replaced, selected, values[count:])
        return found

    def _replaced(self, selected: list[Any], keywords: Sequence[Any]) -> list[Any]:
        action, dispatcher = self._called(keywords), self._dispatcher
        if action.kind is ActionKind.REPLACE_BACKWARD_OP:
            found = replaced_gradients(dispatcher, action, selected, self._wanted)
            return [
                self._or_zeros(gradient, shape, i)
                for i, (gradient, shape) in enumerate(zip(found, self._likes, strict=True))
                if self._wanted[i]
            ]
        return self._outputs(dispatcher.replace(action, selected))

    def _outputs(self, result: Any) -> list[Any]:
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        tensor = self._dispatcher.driver.is_tensor
        if len(outputs) != len(self._wanted) or not all(tensor(t) for t in outputs):
            raise RoutineResultError(
                f"{self._action.routine} replaces op {self._action.op_id} and must return its "
                f"{len(self._wanted)} output tensors, got {described(result)}"
            )
        return [tf.convert_to_tensor(output) for output in outputs]

    def _or_zeros(self, gradient: Any, shape: Any, index: int) -> Any:
        if gradient is not None:
            return tf.convert_to_tensor(gradient)
        if shape is None:
            raise RoutineResultError(
                f"{self._action.routine} replaces the backward of op {self._action.op_id} and "
                f"gives no gradient for input {index}, whose shape is not known before the graph "
                "runs; return zeros instead of None"
            )
        return tf.zeros(shape, self._types[index])


def _symbolic_keywords(action: Action, graph: Any) -> list[str]:
    """Names of the keyword arguments that are tensors of the copy.

    Raises:
        CapabilityError: one is a tensor of another graph.
    """
    names = []
    for name, value in action.kwargs.items():
        if not isinstance(value, tf.Tensor) or isinstance(value, _internals.EagerTensor):
            continue
        if value.graph is not graph:
            raise CapabilityError(
                f"{action.routine} at op {action.op_id} is given {name}={value!r:.60}, a tensor "
                "of another graph; keep a value (context.get_value()) instead of an expression"
            )
        names.append(name)
    return names


def fitted(action: Action, old: Any, new: Any) -> Any:
    """`new` in the type of `old`: in a graph all types are settled before it runs.

    Raises:
        RoutineResultError: the shapes differ.
    """
    if not new.shape.is_compatible_with(old.shape):
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must return tensors of the shapes it got, "
            f"expected {tuple(old.shape)}, got {tuple(new.shape)}"
        )
    return new if new.dtype == old.dtype else tf.cast(new, old.dtype)
