"""Private symbols of graphs, operators and functions.

Attributes of our own on TensorFlow's objects begin with ``_amanda``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.python.framework import function_def_to_graph, ops

from amanda_tensorflow._internals.runtime import AttrValue, ConcreteFunction, EagerTensor, FuncGraph
from amanda_tensorflow._internals.symbols import require


def keep_alive(graph: Any, function: Any) -> None:
    """Let a graph keep a function alive that its nodes call; the runtime holds it weakly."""
    if not hasattr(graph, "_amanda_routines"):
        graph._amanda_routines = []
    graph._amanda_routines.append(function)


def count_operations(graph: Any) -> int:
    """Count the operators of a graph."""
    return len(graph.operations)


def operations_since(graph: Any, count: int) -> list[Any]:
    """The operators of a graph that were added since it had this many.

    The list of all is TensorFlow's own (2.16 to 2.21), of which ``get_operations`` makes a copy.
    """
    added: list[Any] = graph.operations[count:]
    return added


def annotate(graph: Any, name: str, value: Any) -> None:
    """Note a value for an operator of a copy."""
    if not hasattr(graph, "_amanda_notes"):
        graph._amanda_notes = {}
    graph._amanda_notes[name] = value


def annotation(graph: Any, name: str) -> Any:
    """The value that was noted for an operator of a copy."""
    return graph._amanda_notes[name]


def attributes_proto(op: Any) -> dict[str, Any]:
    """The attributes of an operator of a graph by name, as protocol buffers."""
    return dict(sorted(op.node_def.attr.items()))


def raw_attributes(op: Any) -> Iterator[tuple[str, Any]]:
    """The declared attributes of an operator of a graph with their values."""
    for attribute in op.op_def.attr:
        yield attribute.name, op.get_attr(attribute.name)


def attributes_to_execute(op: Any) -> tuple[Any, ...]:
    """The names and values of an operator's attributes, in turn, as eager execution takes them."""
    return tuple(item for name, value in raw_attributes(op) for item in (name, _to_execute(value)))


def _to_execute(value: Any) -> Any:
    """The value of an attribute. Of a shape, which a graph gives as a protocol buffer, the
    dimensions."""
    if isinstance(value, list):
        return [_to_execute(item) for item in value]
    if not isinstance(value, TensorShapeProto):
        return value
    if value.unknown_rank:
        return None
    return [None if dim.size < 0 else dim.size for dim in value.dim]


def input_types(op: Any) -> list[Any]:
    """The dtypes of an operator's inputs, references to variables told apart."""
    return list(op._input_types)


def share_variables(source: Any, graph: Any) -> None:
    """Let the graph of a copy list the variables of the vanilla function."""
    graph._weak_variables = list(source._weak_variables)


@attrs.frozen(eq=False)
class Callee:
    """A function that an operator of a graph runs.

    Attributes:
        graph: its graph.
        function_type: its signature; None for the functions of TensorFlow 1, which have none.
        attributes: its attributes by name, as protocol buffers.
        is_differentiated_as_one: whether the gradient of a call is a ``SymbolicGradient``, which
            names the vanilla function and derives its gradient at run time.
    """

    graph: Any
    function_type: Any
    attributes: dict[str, Any]
    is_differentiated_as_one: bool

    @property
    def must_compile(self) -> bool:
        """True if it is compiled with XLA wherever it is called."""
        return is_compiled(self.attributes)

    @property
    def side_effects(self) -> list[Any]:
        """The operators that run although nothing reads their outputs.

        In the functions of TensorFlow 1 these are all that have side effects or state; the runtime
        keeps them.
        """
        if self.function_type is not None:
            return list(self.graph.control_outputs)
        return [op for op in self.graph.get_operations() if is_stateful(op)]


def callee_named(graph: Any, name: str) -> Callee | None:
    """The function of this name that a graph, or a graph around it, knows; else None."""
    known = graph
    while known is not None:
        function = known._get_function(name)
        if function is not None:
            attributes = dict(function.cached_definition.attr.items())
            of, signature = _graph_of_known(function, known), None
            has_gradient = True
            if hasattr(function, "function_type"):
                signature = function.function_type
            elif function.python_grad_func is None and function.grad_func_name is None:
                has_gradient = False
            return Callee(of, signature, attributes, not has_gradient)
        known = getattr(known, "outer_graph", None)
    return None


def callees_of(op: Any) -> dict[str, list[Callee | None]]:
    """By attribute, the functions that an operator runs; None for one that its graph does not know.

    A call of TensorFlow 1's ``Defun`` has the function as its type, which stands for the attribute.
    """
    if is_function_call(op):
        return {op.type: [callee_named(op.graph, op.type)]}
    return {
        attribute: [callee_named(op.graph, name) for name in names]
        for attribute, names in function_attributes(op).items()
    }


def known_callees(op: Any) -> list[tuple[str, Callee]]:
    """The functions that an operator runs and its graph knows, with the attribute of each."""
    found = callees_of(op).items()
    return [(name, callee) for name, callees in found for callee in callees if callee is not None]


def differentiate_as(op: Any, graph: Any, callee: Callee) -> None:
    """Let a call of a copy have the gradient of a function, as calls in a traced graph have it.

    Args:
        op: calls a function of `graph`.
        callee: the vanilla function, whose signature and attributes that function has.
    """
    if callee.function_type is not None:
        function = ConcreteFunction.from_func_graph(graph, callee.function_type, callee.attributes)
        op._gradient_function = function._get_gradient_function()


_MADE: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""By function of TensorFlow 1, the graph that was made from its definition, while it is in use."""


def _graph_of_known(function: Any, known: Any) -> Any:
    """The graph of a function that a graph knows.

    Functions of TensorFlow 1 (``Defun``, with which CTC losses make their loops) and those of an
    imported graph have a definition and no graph: one is made from it, as TensorFlow itself does
    for their gradients.
    """
    found = getattr(function, "graph", None)
    if found is None and function in _MADE:
        found = _MADE[function]()
    if found is None:
        with known.as_default():
            found = function_def_to_graph.function_def_to_graph(function.cached_definition)
        _MADE[function] = weakref.ref(found)
    return found


def function_attributes(op: Any) -> dict[str, list[str]]:
    """By attribute, the names of the functions that an operator runs."""
    found = {}
    # A map of protocol buffers has another order in each process; ids are counted in this one.
    for name, value in sorted(op.node_def.attr.items()):
        kind = value.WhichOneof("value")
        if kind == "func":
            found[name] = [value.func.name]
        elif kind == "list" and len(value.list.func):
            found[name] = [function.name for function in value.list.func]
    return found


def renamed(attribute: Any, names: Sequence[Any]) -> Any:
    """A copy of an attribute that names functions, with other names."""
    result = AttrValue()
    result.CopyFrom(attribute)
    functions = [result.func] if result.WhichOneof("value") == "func" else result.list.func
    for function, name in zip(functions, names, strict=True):
        function.name = name if isinstance(name, str) else name.decode()
    return result


uid: Any = ops.uid


def is_made_since(graph: Any, number: int) -> bool:
    """True if the first tensor of a graph is younger than a number that :func:`uid` has given."""
    tensors = (tensor for op in graph.get_operations() for tensor in op.outputs)
    first = next(tensors, None)
    return first is None or bool(first._id > number)


def graph_of(function: Any) -> Any:
    """The graph of a concrete function."""
    return function._func_graph


def output_count(function: Any) -> int:
    """Count the tensors that a concrete function returns; a tape adds others to its graph."""
    return int(function._delayed_rewrite_functions._num_inference_outputs)


def function_attrs(function: Any) -> dict[str, Any]:
    """The attributes of a concrete function."""
    return dict(function._attrs)


def instrumented(function: Any, graph: Any, attributes: dict[str, Any]) -> Any:
    """A concrete function of another graph with the signature of `function`, marked as a copy.

    Its graph keeps the one that it is a copy of.
    """
    copy = ConcreteFunction.from_func_graph(
        graph, function.function_type, attributes, shared_func_graph=False
    )
    copy._amanda_instrumented = True
    graph._amanda_source = function._func_graph, function._garbage_collector
    return copy


def keep_differentiated(functions: Any) -> None:
    """Let the function that computes a gradient keep the graph that it differentiates.

    TensorFlow dismantles the graph of a function that the program lets go of, also while a tape
    still has the function of its gradient (2.16 to 2.21).

    Args:
        functions: what a tape records for a call, with the function of the gradient.
    """
    backward = functions._backward
    if not hasattr(backward, "_amanda_differentiated"):
        backward._amanda_differentiated = functions._func_graph, functions._func_graph_deleter


def call_flat(function: Any, tensors: Sequence[Any], captured: Sequence[Any]) -> Any:
    """Call a concrete function with the tensors that it captures; in a graph, which captures them
    as well."""
    return function._call_flat(list(tensors), list(captured))


def lite_operators(interpreter: Any) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
    """The operators of a model of LiteRT: types, and indices of input and output tensors.

    The public methods of an interpreter tell its tensors only (2.21).

    Raises:
        CapabilityError: this TensorFlow has another private method for them, or none.
    """
    require("lite")
    for each in interpreter._get_ops_details():
        yield each["op_name"].lower(), each["inputs"], each["outputs"]


def is_instrumented(function: Any) -> bool:
    """True if a concrete function is a copy."""
    return hasattr(function, "_amanda_instrumented")


_BRANCH_GRAPHS = {
    "cond": "_cond_graph",
    "body": "_body_graph",
    "then_branch": "_true_graph",
    "else_branch": "_false_graph",
    "branches": "_branch_graph_{}",
}
"""By attribute of a loop or branch, where its gradient function looks for the graph."""


def remember_branches(op: Any, graphs: dict[str, list[Any]]) -> None:
    """Let a loop or branch know the graphs of its functions, where its gradient looks for them."""
    for attribute, of in graphs.items():
        name = _BRANCH_GRAPHS.get(attribute, "")
        for index, graph in enumerate(of if name else ()):
            setattr(op, name.format(index), graph)


def set_functions(op: Any, attribute: str, names: Sequence[Any]) -> None:
    """Let an operator of a copy run the functions of these names."""
    op._set_attr(attribute, renamed(op.node_def.attr[attribute], names))


_OVERLAPPING = "parallel_iterations"
"""The attribute of a loop with the number of its iterations that may overlap."""


def run_in_order(op: Any) -> None:
    """Let the iterations of a loop run one after the other; an operator of no loop stays as it is.

    Else routines would meet the iterations in any order.

    Args:
        op: of a copy that has not run yet: a loop, or what lets a value enter one of TensorFlow 1.
    """
    if _OVERLAPPING in op.node_def.attr:
        op._set_attr(_OVERLAPPING, AttrValue(i=1))


def original_op(op: Any) -> Any:
    """The forward operator that ``tf.gradients`` has noted for an operator; None for others."""
    return op._original_op


def create_op_in(graph: Any, kind: str, inputs: Sequence[Any], types: Any, **options: Any) -> Any:
    """Add an operator to a graph. Returns the operator.

    Args:
        types: the dtypes of its outputs.
        options: see ``Graph._create_op_internal``.
    """
    return graph._create_op_internal(kind, inputs, types, **options)


def python_node(
    graph: Any, inputs: Sequence[Any], token: str, types: Sequence[Any], gradient: str, shapes: Any
) -> Any:
    """Add a node that calls Python to a graph. Returns the operator.

    The generated ``eager_py_func`` takes three times as long for its checks.

    Args:
        token: of the registered function.
        types: the dtypes of its outputs.
        gradient: the registered name of its gradient function.
        shapes: the static shapes of its outputs. The two attributes for them are those from which
            Grappler takes the shapes of operators that cannot infer them (2.16 to 2.21); a shape
            without dimensions counts as unknown there.
    """
    # A reference to a variable is read as its value.
    taken = [t.dtype.base_dtype for t in inputs]
    shown = AttrValue.ListValue(shape=[shape.as_proto() for shape in shapes])
    attributes = {
        "token": AttrValue(s=token.encode()),
        "is_async": AttrValue(b=False),
        "Tin": AttrValue(list=AttrValue.ListValue(type=[t.as_datatype_enum for t in taken])),
        "Tout": AttrValue(list=AttrValue.ListValue(type=[t.as_datatype_enum for t in types])),
        "_gradient_op_type": AttrValue(s=gradient.encode()),
        "_same_output_for_iterations": AttrValue(b=True),
        "_output_shape_vector": AttrValue(list=shown),
    }
    return graph._create_op_internal(
        "EagerPyFunc", list(inputs), list(types), input_types=taken, attrs=attributes
    )


def unique_name(graph: Any, name: str) -> str:
    """A name for an operator of a graph, outside of the name scopes that are open."""
    with graph.name_scope(None):
        unique: str = graph.unique_name(name, mark_as_used=True)
        return unique


def add_function(graph: Any, function: Any) -> None:
    """Let a graph know a function, and the functions that it calls."""
    graph._add_function_recursive(function)


def update_input(op: Any, index: int, tensor: Any) -> None:
    """Let an operator of a graph read another tensor."""
    op._update_input(index, tensor)


def add_control_input(op: Any, before: Any) -> None:
    """Let an operator of a graph wait for another one."""
    op._add_control_input(before)


def waiting_for(graph: Any, before: Iterable[Any]) -> Any:
    """Within it, operators that are added to a graph wait for others.

    ``Graph.control_dependencies`` marks those with an attribute, and TensorFlow warns of it where
    a session has run them already (2.16 to 2.21).
    """
    return graph._ControlDependenciesController(graph, list(dict.fromkeys(before)))


def control_flow_of(op: Any) -> Any:
    """The loop or branch of TensorFlow 1 that an operator is in; None for others."""
    return op._get_control_flow_context()


def set_device(op: Any, device: str) -> None:
    """Place an operator of a graph on a device."""
    op._set_device(device)


def is_reference(dtype: Any) -> bool:
    """True if tensors of a dtype are references to variables of TensorFlow 1."""
    return bool(dtype._is_ref_dtype)


def is_stateful(op: Any) -> bool:
    """True if an operator of a graph has side effects or state."""
    return bool(op._is_stateful)


def known_ops(graph: Any, make: bool = False) -> Any:
    """The table of operators, by name, that a copy carries; None for other graphs.

    Args:
        make: add an empty table to a graph that has none.
    """
    if make and not hasattr(graph, "_amanda_ops"):
        graph._amanda_ops = {}
    return getattr(graph, "_amanda_ops", None)


@contextmanager
def twins_captured(op: Any) -> Iterator[None]:
    """Within it, the default graph captures tensors of a copy instead of vanilla ones.

    The gradient function of a ``tf.custom_gradient`` is a closure over tensors of the graph in
    which it was traced, which is the vanilla one.

    Args:
        op: the operator whose gradient is being built; nothing is done unless it is in a copy.
    """
    graph, known = ops.get_default_graph(), (known_ops(op.graph) or {}).get(op.name)
    if known is None or not isinstance(graph, FuncGraph):
        yield
        return
    twins, capture = known.site.tensors, graph.capture

    def captured(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, EagerTensor) and tensor.graph is known.site.graph:
            tensor = twins.get(id(tensor), tensor)
        return capture(tensor, *args, **kwargs)

    graph.capture = captured
    try:
        yield
    finally:
        del graph.capture
        if capture != graph.capture:
            # An operator around this one had replaced it, too.
            graph.capture = capture


_FUNCTION_NAMES = itertools.count()


def unique_function_name(stem: str) -> str:
    """A name that no function of this process has."""
    return f"{stem}_{next(_FUNCTION_NAMES)}"


def functions_of(graph: Any) -> list[Any]:
    """The functions that a graph knows."""
    return list(graph._functions.values())


def is_function_call(op: Any) -> bool:
    """True if an operator's type is the name of a function, as with TensorFlow 1's Defun."""
    return bool(op.graph._is_function(op.type))


def is_compiled(attributes: Any) -> bool:
    """True if the attributes of a function ask for XLA."""
    return "_XlaMustCompile" in attributes and bool(attributes["_XlaMustCompile"].b)
