"""Which operator of a graph is the gradient of which: the passive tag of gradient records.

TensorFlow knows it while it builds a gradient and forgets it. From the moment
that TensorFlow is imported beside Amanda, every call of an operator's gradient
function in a graph is noted: names only, in a table that dies with the graph.
Nothing is computed, changed or kept alive. It is the one patch that is in place
outside of a scope, so that functions traced before ``apply`` can be
instrumented exactly (design, section 5).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from amanda.patching import PatchSet
from amanda_tensorflow import _internals

TensorName = tuple[str, int]
"""An operator's name and the index of one of its outputs."""

MARK = "_amanda"
"""Name of the attribute by which a record of the tape carries what it belongs to."""


@attrs.frozen(eq=False)
class ForwardOp:
    """An operator of a graph, held by name."""

    graph: weakref.ref[Any]
    name: str

    @classmethod
    def of(cls, op: Any) -> ForwardOp:
        """The reference to an operator."""
        return cls(weakref.ref(op.graph), op.name)


@attrs.frozen(eq=False)
class GradientCall:
    """One call of an operator's gradient function while a graph was built.

    Attributes:
        forward: the operator whose gradient it is; it may be in another graph.
        grad_outputs: the gradients given to the function, None where there is none.
        grad_inputs: the gradients that it returned, one per input.
        ops: names of the operators that it made, in order.
    """

    forward: ForwardOp
    grad_outputs: tuple[TensorName | None, ...]
    grad_inputs: tuple[TensorName | None, ...]
    ops: tuple[str, ...]


@attrs.define(eq=False)
class GradientLog:
    """The gradient calls that one graph holds.

    Attributes:
        calls: in the order in which they were made.
        owners: operator's name to the innermost call that made it.
        ambiguous: names of operators of some gradient, nobody knows of which; only
            in what was recovered.
        is_recovered: whether it was recovered from the graph: calls do not tell
            their gradients then.
    """

    calls: list[GradientCall] = attrs.field(factory=list)
    owners: dict[str, GradientCall] = attrs.field(factory=dict)
    ambiguous: set[str] = attrs.field(factory=set)
    is_recovered: bool = False

    def add(self, call: GradientCall) -> None:
        """Note one more call."""
        self.calls.append(call)
        for name in call.ops:
            self.owners.setdefault(name, call)


_LOGS: weakref.WeakKeyDictionary[Any, GradientLog] = weakref.WeakKeyDictionary()
_PATCHES = PatchSet()


@attrs.define
class EagerGradients:
    """What the eager driver does with a marked record; None while it is not attached.

    Attributes:
        run: called with the mark, the call of the gradient function and its
            output gradients; gives the input gradients.
    """

    run: Callable[[Any, Callable[[Sequence[Any]], Any], Sequence[Any]], Any] | None = None


EAGER = EagerGradients()
_OLDER: weakref.WeakSet[Any] = weakref.WeakSet()
"""The graphs that were there before gradients were noted."""


def log_of(graph: Any) -> GradientLog:
    """What is known of the gradients in `graph`."""
    return _LOGS.get(graph) or GradientLog()


def is_older(graph: Any) -> bool:
    """Whether a graph may hold gradients that were not noted."""
    return graph in _OLDER


def is_installed() -> bool:
    """Whether gradients are being noted."""
    return bool(len(_PATCHES))


def install() -> None:
    """Note gradients from now on; harmless when called twice.

    Raises:
        CapabilityError: TensorFlow's private symbols are not as expected.
    """
    if is_installed():
        return
    _internals.require("records")
    # By type: isinstance() would run code of lazy objects.
    _OLDER.update(g for g in gc.get_objects() if issubclass(type(g), _internals.Graph))
    _PATCHES.wrap(_internals.EXECUTE, "record_gradient", _marking)
    _PATCHES.wrap(_internals.RECORD, "record_operation", _noting_custom_gradients)
    _PATCHES.wrap(_internals.OPS, "get_gradient_function", _noting_gradients)
    _internals.register_gradient_function(_gradient_function)
    _internals.register_jvp_function(_jvp)


def _marking(vanilla: Any) -> Any:
    """Let the tape's record of an operator in a graph carry its name."""

    def record_gradient(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        if outputs and not isinstance(outputs[0], _internals.EagerTensor):
            op = getattr(outputs[0], "op", None)
            if op is not None and attrs is not None:
                attrs = (*attrs, MARK, ForwardOp.of(op))
        return vanilla(op_name, inputs, attrs, outputs)

    return record_gradient


def unmarked(attr_tuple: Any) -> tuple[Any, Any]:
    """A record's attributes as TensorFlow made them, and the mark or None.

    The mark comes last, or, on the fast path of eager execution, before the
    attributes that the runtime has inferred.
    """
    if not attr_tuple or MARK not in attr_tuple[::2]:
        return attr_tuple, None
    position = 2 * attr_tuple[::2].index(MARK)
    return (*attr_tuple[:position], *attr_tuple[position + 2 :]), attr_tuple[position + 1]


def _gradient_function(
    op_name: str,
    attr_tuple: Any,
    num_inputs: int,
    inputs: Any,
    outputs: Any,
    out_grads: Any,
    skip_input_indices: Any,
    forward_pass_name_scope: Any,
) -> Any:
    """TensorFlow's function of the same name; the call is noted, or the eager driver's."""
    if not attr_tuple or MARK not in attr_tuple[::2]:
        return _internals.vanilla_gradient_function(
            op_name,
            attr_tuple,
            num_inputs,
            inputs,
            outputs,
            out_grads,
            skip_input_indices,
            forward_pass_name_scope,
        )
    own_attrs, mark = unmarked(attr_tuple)

    def call(gradients: Sequence[Any]) -> Any:
        return _internals.vanilla_gradient_function(
            op_name,
            own_attrs,
            num_inputs,
            inputs,
            outputs,
            gradients,
            skip_input_indices,
            forward_pass_name_scope,
        )

    if isinstance(mark, ForwardOp):
        return _noted(mark, call, out_grads)
    if EAGER.run is not None and _internals.executing_eagerly():
        return EAGER.run(mark, call, out_grads)
    return call(out_grads)


def _jvp(
    op_name: Any, attr_tuple: Any, inputs: Any, outputs: Any, tangents: Any, use_batch: bool = False
) -> Any:
    """TensorFlow's forward-mode rule, which must not see the mark: it is no attribute."""
    own_attrs, _ = unmarked(attr_tuple)
    return _internals.vanilla_jvp(op_name, own_attrs, inputs, outputs, tangents, use_batch)


def _noting_gradients(vanilla: Any) -> Any:
    """Note the gradients of ``tf.gradients`` and of functions that a tape looks into."""

    def get_gradient_function(op: Any) -> Any:
        function = vanilla(op)
        if function is None:
            return None

        def gradient(forward: Any, *out_grads: Any) -> Any:
            # The gradient of an operator of a copy may be a closure over vanilla tensors.
            with _internals.twins_captured(forward):
                return _noted(ForwardOp.of(forward), lambda g: function(forward, *g), out_grads)

        return gradient

    return get_gradient_function


def _noting_custom_gradients(vanilla: Any) -> Any:
    """Note the gradients of ``tf.custom_gradient`` and of functions called in a graph."""

    def record_operation(
        op_type: Any,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        forward_function: Any = None,
    ) -> Any:
        first = output_tensors[0] if output_tensors else None
        op = None if isinstance(first, _internals.EagerTensor) else getattr(first, "op", None)
        if op is not None:
            forward, own = ForwardOp.of(op), backward_function

            def backward_function(*out_grads: Any) -> Any:
                return _noted(forward, lambda gradients: own(*gradients), out_grads)

        return vanilla(op_type, output_tensors, input_tensors, backward_function, forward_function)

    return record_operation


def _noted(forward: ForwardOp, call: Callable[[Sequence[Any]], Any], out_grads: Any) -> Any:
    """Call a gradient function, and note what it makes in the graph being built."""
    if _internals.executing_eagerly():
        return call(out_grads)
    graph = _internals.default_graph()
    before = len(graph.get_operations())
    result = call(out_grads)
    made = tuple(op.name for op in graph.get_operations()[before:])
    grad_inputs = result if isinstance(result, (list, tuple)) else [result]
    log = _LOGS.get(graph)
    if log is None:
        log = _LOGS[graph] = GradientLog()
    log.add(GradientCall(forward, _names(out_grads, graph), _names(grad_inputs, graph), made))
    return result


def _names(tensors: Iterable[Any], graph: Any) -> tuple[TensorName | None, ...]:
    """Tensors of `graph` by name; None for what is none."""
    return tuple(tensor_name(tensor) if _is_in(tensor, graph) else None for tensor in tensors)


def _is_in(tensor: Any, graph: Any) -> bool:
    if isinstance(tensor, _internals.EagerTensor):
        return False
    return hasattr(tensor, "op") and hasattr(tensor, "value_index") and tensor.graph is graph


def tensor_name(tensor: Any) -> TensorName:
    """The name of a symbolic tensor: its operator's and its index."""
    return tensor.op.name, tensor.value_index


def forward_op(call: GradientCall) -> Any:
    """The vanilla operator that a gradient call differentiates; None if its graph is gone."""
    graph = call.forward.graph()
    return None if graph is None else graph.get_operation_by_name(call.forward.name)


def position_in(call: GradientCall, name: TensorName, target: Any) -> int:
    """The input of a call's forward operator that is `target` and has this gradient; or -1."""
    op = forward_op(call) if target is not None else None
    if op is None:
        return -1
    for index, (gradient, tensor) in enumerate(zip(call.grad_inputs, op.inputs, strict=False)):
        if gradient == name and tensor is target:
            return index
    return -1
