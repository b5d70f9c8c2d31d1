"""Run-time routines in graphs: nodes that call Python at each execution, and their gradients.

A node is an ``EagerPyFunc``, the operator behind ``tf.py_function``, with a function object of our
own: a call takes 18 microseconds (29 to 38 with ``tf.py_function``; TensorFlow 2.21, CPU)::

    new = RunTimeRoutine(dispatcher, action, selected, building).inserted(values)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import tensorflow as tf

from amanda.engine.backward import replaced_gradients
from amanda.engine.dispatch import Dispatcher
from amanda.errors import CapabilityError, RoutineResultError
from amanda.interface.action import Action, ActionKind
from amanda.python.bytecode import returns_something
from amanda.state import STATE, LiveScope
from amanda.tool import Tool
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.building import Building, alive, weak_scopes
from amanda_tensorflow.graphs.tool_errors import FAILURES
from amanda_tensorflow.operators.gradient_shapes import checked, gradient_shapes
from amanda_tensorflow.operators.replacements import replaced_outputs
from amanda_tensorflow.operators.types import UNROUTABLE, is_differentiable

STRAIGHT_THROUGH = "AmandaStraightThrough"
PASSING = "AmandaPassingRoutine"
DIFFERENTIABLE = "AmandaDifferentiableRoutine"
_OF_GRADIENTS = frozenset({ActionKind.BEFORE_BACKWARD_OP, ActionKind.AFTER_BACKWARD_OP})
_SWITCHES = frozenset({"Switch", "RefSwitch", "Enter", "RefEnter", "Merge", "RefMerge"})
"""Operators of TensorFlow 1 whose outputs may be dead: a node that only waits for such an operator
runs in every case, one that reads an output runs only where the output is alive."""


def _straight_through(op: Any, *gradients: Any) -> list[Any]:
    """The gradient of ``IdentityN([*new, *old])``: it passes to the old tensors unchanged."""
    half = len(op.outputs) // 2
    return [None] * half + list(gradients[:half])


def _differentiated(op: Any, *gradients: Any) -> list[Any]:
    """The gradient of a node that calls Python: a node that runs it again under a tape."""
    node = _internals.registered_routine(op.get_attr("token"))
    if isinstance(node, ReplacementRoutine):
        node.refuse_state(op.inputs, op.outputs)
    wanted = [is_differentiable(t) for t in op.inputs]
    # The gradient of an operator that gathers rows is an IndexedSlices.
    known = [
        tf.zeros_like(output) if gradient is None else tf.convert_to_tensor(gradient)
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


def _passing(op: Any, *gradients: Any) -> list[Any]:
    """The gradient of a node whose routine takes no part in AD: it passes to the old tensors."""
    node = _internals.registered_routine(op.get_attr("token"))
    result: list[Any] = [None] * len(op.inputs)
    for position, gradient in zip(node.passes_to, gradients, strict=True):
        if is_differentiable(op.inputs[position]):
            result[position] = gradient
    return result


tf.RegisterGradient(STRAIGHT_THROUGH)(_straight_through)
tf.RegisterGradient(PASSING)(_passing)
tf.RegisterGradient(DIFFERENTIABLE)(_differentiated)


def is_routable(tensor: Any) -> bool:
    """True if a routine may put another tensor in place of this one."""
    if tensor is None or tensor.dtype in UNROUTABLE:
        return False
    return not _internals.is_reference(tensor.dtype)


def _is_shape_constant(tensor: Any) -> bool:
    """True if a tensor is a constant that TensorFlow may read while it builds a graph.

    Shapes and axes are such constants: another tensor in their place would lose static shapes.
    """
    return bool(tensor.op.type == "Const" and tensor.dtype.is_integer)


_NODES: weakref.WeakSet[PythonNode] = weakref.WeakSet()
"""All nodes of all copies."""


def may_wait_for_tools() -> bool:
    """True if threads of the runtime may be waiting for a tool's code to end."""
    return bool(_NODES)


class PythonNode(_internals.EagerFunc):
    """The function object of one node. The graph keeps it alive; the runtime holds it weakly."""

    def __init__(self) -> None:
        super().__init__(None, None, False)
        _NODES.add(self)

    def insert(
        self,
        inputs: Sequence[Any],
        types: Sequence[Any],
        shapes: Sequence[tf.TensorShape] = (),
        gradient: str = DIFFERENTIABLE,
    ) -> list[Any]:
        """Add the node to the current graph. Returns its outputs.

        Args:
            types: the dtypes of the outputs.
            shapes: their static shapes; none if they are not known.
            gradient: the name of its gradient function.
        """
        graph = _internals.default_graph()
        _internals.keep_alive(graph, self)
        token = _internals.register_routine(self)
        self.op = _internals.python_node(graph, inputs, token, types, gradient, shapes)
        outputs = list(self.op.outputs)
        for output, shape in zip(outputs, shapes, strict=False):
            output.set_shape(shape)
        return outputs

    def compute(self, values: Sequence[Any]) -> list[Any]:
        """Compute the outputs for the values of the inputs; runs eagerly."""
        raise NotImplementedError

    def __call__(self, device: Any, token: Any, args: Sequence[Any]) -> list[Any]:
        """Called by the runtime, in one of its threads or in that of the caller."""
        try:
            if _internals.executing_eagerly():
                return self.compute(list(args))
            with _internals.eager_mode():
                return self.compute(list(args))
        except BaseException as error:
            raise FAILURES.carrier(error) from None


Told = Callable[[tuple[LiveScope, ...], Sequence[Any]], object]
"""Is called with the scopes of a copy that are alive, and the values of a mark's inputs."""


class _Mark(PythonNode):
    """A node that computes nothing. In each run it calls a function, as long as a scope is alive.

    Args:
        building: the copy.
        tell: the function.
    """

    def __init__(self, building: Building, tell: Told) -> None:
        super().__init__()
        self._scopes = weak_scopes(building)
        self._tell: Told | None = tell

    def compute(self, values: Sequence[Any]) -> list[Any]:
        scopes, tell = alive(self._scopes), self._tell
        if scopes and tell is not None:
            tell(scopes, values)
        return []

    def release(self) -> None:
        """Call nothing any more: the scope has ended."""
        self._tell = None


def insert_mark(
    building: Building, tell: Told, scope: str, waits: Sequence[Any], inputs: Sequence[Any]
) -> Any:
    """Add a node that computes nothing to a copy. Returns the operator.

    Args:
        tell: is called in each run.
        scope: the name scope for it.
        waits: the operators that it waits for.
        inputs: the tensors that it is given.
    """
    graph, node = building.graph, _Mark(building, tell)
    with (
        graph.as_default(),
        tf.name_scope(scope),
        graph.control_dependencies(None),
        graph.control_dependencies(waits),
    ):
        node.insert(inputs, [])
    building.is_changed = building.has_python = True
    building.routines.append(node)
    return node.op


class VectorJacobianProduct(PythonNode):
    """The gradient of another node: runs that node again under a tape.

    Its inputs are those of the other node, followed by the gradients of the other node's outputs.

    Args:
        of: the other node.
        count: how many inputs that has.
        wanted: for each of them, whether it has a gradient.
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
            if is_differentiable(output)
        ]
        found = tape.gradient(
            [output for output, _ in pairs],
            sources,
            [gradient for _, gradient in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(gradient) for gradient in found]


class RunTimeRoutine(PythonNode):
    """Calls one routine at each execution of its operator; changes nothing after its scope.

    The gradients of its outputs pass unchanged to the tensors that they take the place of (contract
    rule 7), unless the routine takes part in differentiation.

    Args:
        action: the routine; its selection has been made.
        selected: the tensors of the copy that it selects.
        building: the copy.

    Attributes:
        passes_to: for each output the position of the input that it takes the place of.
    """

    def __init__(
        self, dispatcher: Dispatcher, action: Action, selected: Sequence[Any], building: Building
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._building: Building | None = building
        # The inputs of the node are the selected tensors and no others.
        self._action = attrs.evolve(action, select=None)
        self._scopes = weak_scopes(building)
        self._selected: Sequence[Any] = selected
        self._positions = [
            i
            for i, tensor in enumerate(selected)
            # A variable that the operator writes to may have no value yet.
            if tensor is not None
            and not (building.takes_reference and _internals.is_reference(tensor.dtype))
        ]
        # Grappler rewrites operators only where no node stands between them.
        may_change = returns_something(action.func)
        self._routed = [
            i
            for i, tensor in enumerate(selected)
            if may_change
            and is_routable(tensor)
            and not (action.select is None and _is_shape_constant(tensor))
        ]
        self._count = len(selected)
        at = {position: k for k, position in enumerate(self._positions)}
        self.passes_to = [at[i] for i in self._routed]
        self._keywords = _symbolic_keywords(action, building.graph)
        # Its result is differentiated with it, possibly after the scope.
        self._outlives = action.differentiable
        # Last: what is listed can be released, also if an interrupt ends the making of it.
        building.routines.append(self)

    # -- while the copy is built ------------------------------------------

    def inserted(self, values: Sequence[Any]) -> list[Any]:
        """Add the node.

        Args:
            values: all tensors at the point of the routine.

        Returns:
            The tensors that take the place of the selected ones.
        """
        new = list(self._selected)
        routed = [new[i] for i in self._routed]
        outputs = self._placed(values, [t.dtype for t in routed], [t.shape for t in routed])
        for index, output in zip(self._routed, outputs, strict=True):
            if new[index].shape.rank == 0 and not self._action.differentiable:
                # Grappler rewrites the operators that follow only if it knows the shape.
                output = _internals.ensure_shape(output, [])
            new[index] = output
        self._building, self._selected = None, ()
        return new

    def _placed(
        self, values: Sequence[Any], types: Sequence[Any], shapes: Sequence[Any] = ()
    ) -> list[Any]:
        """Add the node where it runs if and only if the operator does."""
        building = self._building
        assert building is not None
        inputs = [self._selected[i] for i in self._positions]
        inputs += [self._action.kwargs[name] for name in self._keywords]
        anchors: list[Any] = []
        if not inputs:
            inputs, anchors = self._anchors(building, values)
        self._anchored = len(inputs) - len(self._positions) - len(self._keywords)
        waits = [*anchors, *building.earlier(), *building.late_nodes(inputs)]
        gradient = DIFFERENTIABLE if self._outlives else PASSING
        with tf.control_dependencies(waits) if waits else nullcontext():
            outputs = self.insert(inputs, types, shapes, gradient)
        self._forget_symbols()
        if not outputs:
            building.controls.append(self.op)
            is_of_gradients = self._action.kind in _OF_GRADIENTS
            if is_of_gradients and self._positions and not building.takes_feeds:
                building.looks.add(self.op.name)
        return outputs

    def _anchors(self, building: Building, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the tensors that a node reads in place of selected ones, and what it waits for."""
        present = [t for t in values if t is not None]
        if building.takes_feeds:
            inputs = [t for t in present if is_routable(t)]
        else:
            inputs = [t for t in present if t.op.type in _SWITCHES and is_routable(t)][:1]
        read = {id(t) for t in inputs}
        others = [t.op for t in present if id(t) not in read]
        return inputs, others if present else list(building.anchors)

    def _forget_symbols(self) -> None:
        """Forget symbolic keywords: they are inputs now, and would keep the graph alive."""
        kwargs = {k: v for k, v in self._action.kwargs.items() if k not in self._keywords}
        self._action = attrs.evolve(self._action, kwargs=kwargs)

    # -- at run time ------------------------------------------------------

    def _arguments(self, values: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """The selected tensors and the values of symbolic keywords, of the node's inputs."""
        count = len(values) - self._anchored - len(self._keywords)
        selected: list[Any] = [None] * self._count
        for position, value in zip(self._positions, values[:count], strict=True):
            selected[position] = value
        return selected, values[count : len(values) - self._anchored]

    def compute(self, values: Sequence[Any]) -> list[Any]:
        selected, keywords = self._arguments(values)
        new = self._adopting(self._run, selected, keywords)
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
        """Call `run` under the scopes of the copy, which the runtime's thread knows nothing of.

        Returns:
            Its result; `selected` itself where the scopes have ended.
        """
        scopes = alive(self._scopes)
        if not scopes and not self._outlives:
            return selected
        state = STATE
        outer = state.scopes, state.enabled, state.held
        try:
            state.scopes, state.enabled, state.held = scopes, True, False
            result = run(selected, keywords)
            state.scopes, state.enabled, state.held = outer
        except BaseException:
            state.scopes, state.enabled, state.held = outer
            raise
        return result

    def release(self) -> None:
        """Let go of the tool, as the scope has ended, unless a tape may still need the routine."""
        if not self._outlives:
            self._action = attrs.evolve(self._action, tool=Tool(), func=_nothing, kwargs={})

    def _fitted(self, old: Any, new: Any) -> Any:
        """A result, cast to the type that the graph expects.

        Raises:
            RoutineResultError: the shapes differ.
        """
        if new is old:
            return old
        return fitted(self._action, old, new)

    def _refuse_others(self, selected: Sequence[Any], new: Sequence[Any]) -> None:
        """Refuse a change of a tensor that the node has no output for.

        Raises:
            CapabilityError: the routine has changed a resource, a reference or a constant.
        """
        for index, (old, result) in enumerate(zip(selected, new, strict=True)):
            if result is not old and index not in self._routed:
                raise CapabilityError(
                    f"{self._action.routine} at op {self._action.op_id} changes tensor {index} of "
                    f"what it selects, {old.dtype.name} of shape {old.shape}: a resource, a "
                    "variable itself, or a constant that shapes are computed from; change a "
                    "variable where its value is used, and select a constant by its position to "
                    "change it"
                )


def _nothing(*tensors: Any) -> None:
    """A routine that changes nothing."""


class ReplacementRoutine(RunTimeRoutine):
    """Runs the function that replaces an operator, or the gradient of an operator."""

    def inserted(self, values: Sequence[Any]) -> list[Any]:
        building = self._building
        assert building is not None
        template = building.template
        # The tape differentiates it as it would the operator.
        self._outlives = True
        self._wanted = [tensor is not None for tensor in template]
        self._likes = self._shapes(building)
        self._known = gradient_shapes(building.likes or template)
        self._types = [None if tensor is None else tensor.dtype for tensor in template]
        types = [kind for kind in self._types if kind is not None]
        found = iter(self._placed(values, types))
        self._building, self._selected = None, ()
        outputs = [next(found) if is_wanted else None for is_wanted in self._wanted]
        if self._action.kind is ActionKind.REPLACE_BACKWARD_OP:
            for output, like in zip(outputs, building.likes, strict=True):
                if output is not None:
                    output.set_shape(like.shape)
        return outputs

    def _shapes(self, building: Building) -> list[Any]:
        """For each output the shape of zeros in place of a missing gradient; None if unknown."""
        likes = list(building.likes) or [None] * len(building.template)
        return [None if t is None or not t.shape.is_fully_defined() else t.shape for t in likes]

    def compute(self, values: Sequence[Any]) -> list[Any]:
        selected, keywords = self._arguments(values)
        found: list[Any] = self._adopting(self._replaced, selected, keywords)
        return found

    def _replaced(self, selected: list[Any], keywords: Sequence[Any]) -> list[Any]:
        action, dispatcher = self._called(keywords), self._dispatcher
        if action.kind is ActionKind.REPLACE_BACKWARD_OP:
            found = replaced_gradients(dispatcher, action, selected, self._wanted)
            found = checked(found, action, self._known)
            return [
                self._or_zeros(gradient, shape, i)
                for i, (gradient, shape) in enumerate(zip(found, self._likes, strict=True))
                if self._wanted[i]
            ]
        result = dispatcher.replace(action, selected)
        is_tensor = dispatcher.driver.is_tensor
        outputs = replaced_outputs(result, action, len(self._wanted), is_tensor)
        return [_cast(output, kind) for output, kind in zip(outputs, self._types, strict=True)]

    def refuse_state(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Refuse to differentiate a replacement that reads a variable, or takes or makes a list.

        Raises:
            CapabilityError: an input is a variable, or one of `inputs` and `outputs` a list.
        """
        if any(tensor.dtype == tf.resource for tensor in inputs):
            what, way = "reads a variable", "replace the op that uses the value"
            gradient = "a variable"
        elif any(tensor.dtype == tf.variant for tensor in [*inputs, *outputs]):
            what, way = "takes or makes a list of tensors", "leave the op as it is"
            gradient = "a list"
        else:
            return
        raise CapabilityError(
            f"{self._action.routine} replaces op {self._action.op_id}, which {what}, by Python, "
            f"and the gradient of {gradient} does not pass Python in a graph; mark the replacement "
            f"@amanda.traceable, or {way}"
        )

    def _or_zeros(self, gradient: Any, shape: Any, index: int) -> Any:
        """A gradient as a tensor; zeros of this shape for None.

        Raises:
            RoutineResultError: the shape is not known before the graph runs.
        """
        if gradient is not None:
            return _cast(gradient, self._types[index])
        if shape is None:
            raise RoutineResultError(
                f"{self._action.routine} replaces the backward of op {self._action.op_id} and "
                f"gives no gradient for input {index}, whose shape is not known before the graph "
                "runs; return zeros instead of None"
            )
        return tf.zeros(shape, self._types[index])


def _cast(value: Any, kind: Any) -> Any:
    """A result as a tensor of the type that the graph expects."""
    tensor = tf.convert_to_tensor(value)
    return tensor if kind is None or tensor.dtype == kind else tf.cast(tensor, kind)


def _symbolic_keywords(action: Action, graph: Any) -> list[str]:
    """The names of the keyword arguments that are tensors of the copy.

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
    """`new`, cast to the type of `old`: the types of a graph are fixed before it runs.

    Raises:
        RoutineResultError: the shapes differ.
    """
    if not new.shape.is_compatible_with(old.shape):
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must return tensors of the shapes it got, "
            f"expected {tuple(old.shape)}, got {tuple(new.shape)}"
        )
    return new if new.dtype == old.dtype else tf.cast(new, old.dtype)
