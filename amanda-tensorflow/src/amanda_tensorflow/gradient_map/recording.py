"""Notes the calls of gradient functions while gradients are built in graphs.

TensorFlow knows which operator a gradient belongs to while it builds the gradient, and forgets it.
As soon as TensorFlow is imported beside Amanda, every call of an operator's gradient function in a
graph is noted: names only, in a table that is dropped with the graph. Nothing is computed, changed
or kept alive. These are the only patches that are in place outside of a scope: so functions that
were traced before ``apply`` can be instrumented exactly.

::

    install()
    ...                             # gradients are built
    log_of(graph).owners["gradients/MatMul_grad/MatMul"].forward.name
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs
import tensorflow as tf

from amanda.python.patching import OWN_FRAMES_HIDDEN, PatchSet, hide_own_frames, named_as
from amanda_tensorflow import _internals

TensorName = tuple[str, int]
"""A tensor of a graph: its operator's name and its index among the outputs."""

Slices = Mapping[int, tuple[TensorName, ...]]
"""By position, the values, indices and dense shape of a gradient that is an IndexedSlices.

Where its values are an IndexedSlices themselves: the innermost values, then the indices and shape
of each, from the innermost on.
"""

MARK = "_amanda"
"""The attribute that is added to records on tapes. Its value is a :class:`ForwardOp` in a graph,
and the eager driver's mark in eager execution."""


@attrs.frozen(eq=False)
class ForwardOp:
    """An operator of a graph, referred to by name, so that it is not kept alive."""

    shared: ClassVar[bool] = False
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
        forward: the operator that it differentiates, possibly of another graph.
        grad_outputs: the gradients that the function received; None where there is none. Of an
            IndexedSlices the values stand for it.
        grad_inputs: the gradients that it returned, one per input, likewise.
        ops: names of the operators that it made, in order.
        output_slices: the gradients that the function received as an IndexedSlices, by position.
        input_slices: those that it returned so.
    """

    forward: ForwardOp
    grad_outputs: tuple[TensorName | None, ...]
    grad_inputs: tuple[TensorName | None, ...]
    ops: tuple[str, ...]
    output_slices: Slices = attrs.field(factory=dict)
    input_slices: Slices = attrs.field(factory=dict)


@attrs.define(eq=False)
class GradientLog:
    """The gradient calls that one graph holds.

    Attributes:
        calls: in the order in which they were made.
        owners: by name of an operator, the innermost call that made it.
        ambiguous: names of operators of a gradient whose forward operator is ambiguous; only in
            a recovered log.
        is_recovered: whether the log was recovered from the graph. Its calls have neither
            `grad_outputs` nor `grad_inputs`.
        inside: by name of an operator of the graph, the number of the first call of its gradient
            function, among all calls, for a gradient in the same graph.
        outside: likewise for gradients in other graphs, as those of functions and loops are.
    """

    calls: list[GradientCall] = attrs.field(factory=list)
    owners: dict[str, GradientCall] = attrs.field(factory=dict)
    ambiguous: set[str] = attrs.field(factory=set)
    is_recovered: bool = False
    inside: dict[str, int] = attrs.field(factory=dict)
    outside: dict[str, int] = attrs.field(factory=dict)

    def add(self, call: GradientCall) -> None:
        """Note one more call."""
        self.calls.append(call)
        for name in call.ops:
            self.owners.setdefault(name, call)


_LOGS: weakref.WeakKeyDictionary[Any, GradientLog] = weakref.WeakKeyDictionary()
"""The gradient calls by graph."""


_NUMBERS = itertools.count()

_PATCHES = PatchSet()


class SharedRun(Protocol):
    """A call of the gradient function of an operator whose executions share a mark.

    Attributes:
        has_sums: whether :meth:`summed` has to be called before the function.
    """

    has_sums: bool

    def summed(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients that the function is given, where the tape has added some of them."""

    def leave(self, results: Any) -> None:
        """The function has given `results`; None if it has raised."""


@attrs.define
class EagerGradients:
    """The eager driver's way to run gradient functions of marked records.

    Attributes:
        run: called with the mark, a function that calls the gradient function, and the gradients
            of the outputs; returns the gradients of the inputs. None while no driver is attached.
        begin: called before a gradient function, with a mark that several executions may share;
            returns the call, to be left afterwards, or None where `run` has to be called. None
            while no driver is attached.
    """

    run: Callable[[Any, Callable[[Sequence[Any]], Any], Sequence[Any]], Any] | None = None
    begin: Callable[[Any], SharedRun | None] | None = None


EAGER = EagerGradients()
_OLDER: weakref.WeakSet[Any] = weakref.WeakSet()
"""The graphs that were there when :func:`install` was called."""


def log_of(graph: Any) -> GradientLog:
    """The gradient calls that were noted in `graph`."""
    return _LOGS.get(graph) or GradientLog()


def is_older(graph: Any) -> bool:
    """True if a graph may hold gradients that were not noted."""
    return graph in _OLDER


def is_installed() -> bool:
    """True if gradients are being noted."""
    return bool(len(_PATCHES))


def install() -> None:
    """Note gradient calls from now on; harmless when called twice.

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
    _PATCHES.wrap(_internals.GRADIENTS, "_SymGrad", _noting_function_gradients)
    _internals.register_gradient_function(_gradient_function)
    _internals.register_jvp_function(_jvp)


def _marking(vanilla: Any) -> Any:
    """The patch of ``execute.record_gradient``: marks records of operators in graphs."""

    def record_gradient(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        if outputs and not isinstance(outputs[0], _internals.EagerTensor):
            op = getattr(outputs[0], "op", None)
            # Of the output of an operator that ran before, its tangents are computed here.
            if op is not None and attrs is not None and op.type != "Placeholder":
                attrs = (*attrs, MARK, ForwardOp.of(op))
        return vanilla(op_name, inputs, attrs, outputs)

    return named_as(vanilla, record_gradient)


def unmarked(attr_tuple: Any) -> tuple[Any, Any]:
    """A record's attributes without the mark, and the mark; None if there is none.

    The mark comes last, or, on the fast path of eager execution, before the attributes that the
    runtime has inferred.
    """
    if not attr_tuple or MARK not in attr_tuple[::2]:
        return attr_tuple, None
    position = 2 * attr_tuple[::2].index(MARK)
    return (*attr_tuple[:position], *attr_tuple[position + 2 :]), attr_tuple[position + 1]


def _gradient_function(op_name: str, attr_tuple: Any, *given: Any) -> Any:
    """Replaces ``backprop._gradient_function``, which tapes call for every record.

    The call is noted if the record is of an operator in a graph, and run by the eager driver if it
    carries that driver's mark.

    Args:
        given: the number of inputs, inputs, outputs, the gradients of these, and two more.
    """
    vanilla = _internals.vanilla_gradient_function
    names = attr_tuple[::2] if attr_tuple else ()
    run = results = None
    try:
        if MARK not in names:
            return vanilla(op_name, attr_tuple, *given)
        # As `unmarked` does it.
        position = 2 * names.index(MARK)
        mark, own = attr_tuple[position + 1], (*attr_tuple[:position], *attr_tuple[position + 2 :])
        if mark.shared and EAGER.begin is not None:
            run = EAGER.begin(mark)
        before, out_grads, after = given[:3], given[3], given[4:]
        if run is None:

            def call(gradients: Sequence[Any]) -> Any:
                return vanilla(op_name, own, *before, gradients, *after)

            return _run_marked(mark, call, out_grads)
        gradients = run.summed(out_grads) if run.has_sums else out_grads
        # No function of ours is between: the runtime finds the line of each at each operator.
        results = vanilla(op_name, own, *before, gradients, *after)
        return results
    except BaseException as error:
        hide_own_frames(error)
        raise
    finally:
        if run is not None:
            run.leave(results)


def _run_marked(mark: Any, call: Callable[[Sequence[Any]], Any], out_grads: Any) -> Any:
    """Call the gradient function of a marked record."""
    if isinstance(mark, ForwardOp):
        return _noted(mark, call, out_grads)
    if EAGER.run is not None and _internals.executing_eagerly():
        return EAGER.run(mark, call, out_grads)
    return call(out_grads)


def _jvp(
    op_name: Any, attr_tuple: Any, inputs: Any, outputs: Any, tangents: Any, use_batch: bool = False
) -> Any:
    """Replaces ``forwardprop._jvp_dispatch``, which must not see the mark among the attributes."""
    own_attrs, _ = unmarked(attr_tuple)
    return _internals.vanilla_jvp(op_name, own_attrs, inputs, outputs, tangents, use_batch)


def _noting_gradients(vanilla: Any) -> Any:
    """The patch of ``ops.get_gradient_function``, which ``tf.gradients`` asks for each operator.

    Tapes ask it for the operators of functions, too.
    """

    def get_gradient_function(op: Any) -> Any:
        function = vanilla(op)
        if function is None:
            return None

        def gradient(forward: Any, *out_grads: Any) -> Any:
            # For an operator of a copy the function may capture tensors of the vanilla graph.
            with OWN_FRAMES_HIDDEN, _internals.twins_captured(forward):
                return _noted(ForwardOp.of(forward), lambda g: function(forward, *g), out_grads)

        return gradient

    return named_as(vanilla, get_gradient_function)


def _noting_function_gradients(vanilla: Any) -> Any:
    """The patch of ``gradients_util._SymGrad``, the gradient of a call of TensorFlow 1's ``Defun``.

    Such calls have no gradient function.
    """

    def sym_grad(op: Any, out_grads: Any) -> Any:
        with OWN_FRAMES_HIDDEN:
            return _noted(ForwardOp.of(op), lambda gradients: vanilla(op, gradients), out_grads)

    return named_as(vanilla, sym_grad)


def _noting_custom_gradients(vanilla: Any) -> Any:
    """The patch of ``record.record_operation``.

    It is called for ``tf.custom_gradient`` and for calls of functions in a graph.
    """

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
                with OWN_FRAMES_HIDDEN:
                    return _noted(forward, lambda gradients: own(*gradients), out_grads)

        return vanilla(op_type, output_tensors, input_tensors, backward_function, forward_function)

    return named_as(vanilla, record_operation)


def _noted(forward: ForwardOp, function: Callable[[Sequence[Any]], Any], out_grads: Any) -> Any:
    """Call a gradient function, and note the operators that it adds to the default graph."""
    if _internals.executing_eagerly():
        return function(out_grads)
    graph = _internals.default_graph()
    before, number = _internals.count_operations(graph), next(_NUMBERS)
    result = function(out_grads)
    made = tuple(op.name for op in _internals.operations_since(graph, before))
    grad_inputs = result if isinstance(result, (list, tuple)) else [result]
    source = forward.graph()
    if source is not None:
        of_source = _LOGS.setdefault(source, GradientLog())
        noted = of_source.inside if source is graph else of_source.outside
        noted.setdefault(forward.name, number)
    received, returned = _slices(out_grads, graph), _slices(grad_inputs, graph)
    names = _names(out_grads, received, graph), _names(grad_inputs, returned, graph)
    call = GradientCall(forward, *names, made, received, returned)
    _LOGS.setdefault(graph, GradientLog()).add(call)
    return result


def _slices(gradients: Iterable[Any], graph: Any) -> Slices:
    """The gradients that are slices of known shape in `graph`, by position."""
    found = {}
    for position, gradient in enumerate(gradients):
        parts: list[Any] = []
        values = gradient
        # The gradient of tf.RaggedTensor's gather has those that it gets as values, slices or not.
        while isinstance(values, tf.IndexedSlices):
            parts[:0] = values.indices, values.dense_shape
            values = values.values
        if parts and all(_is_in(part, graph) for part in (values, *parts)):
            found[position] = (tensor_name(values), *map(tensor_name, parts))
    return found


def _names(tensors: Iterable[Any], slices: Slices, graph: Any) -> tuple[TensorName | None, ...]:
    """The names of tensors of `graph`, and of the values of slices; None for others."""
    return tuple(
        slices[i][0] if i in slices else tensor_name(tensor) if _is_in(tensor, graph) else None
        for i, tensor in enumerate(tensors)
    )


def _is_in(tensor: Any, graph: Any) -> bool:
    """True if `tensor` is a symbolic tensor of `graph`."""
    if isinstance(tensor, _internals.EagerTensor):
        return False
    return hasattr(tensor, "op") and hasattr(tensor, "value_index") and tensor.graph is graph


def tensor_name(tensor: Any) -> TensorName:
    """The name of a symbolic tensor."""
    return tensor.op.name, tensor.value_index


def forward_op(call: GradientCall) -> Any:
    """The operator that a gradient call differentiates; None if its graph is gone."""
    graph = call.forward.graph()
    return None if graph is None else graph.get_operation_by_name(call.forward.name)


def position_in(call: GradientCall, name: TensorName, target: Any) -> int:
    """The index of the input that is `target` and whose gradient has this name; -1 if none is.

    Args:
        call: the gradient call; its forward operator's inputs are meant.
    """
    op = forward_op(call) if target is not None else None
    if op is None:
        return -1
    for index, (gradient, tensor) in enumerate(zip(call.grad_inputs, op.inputs, strict=False)):
        if gradient == name and tensor is target:
            return index
    return -1
