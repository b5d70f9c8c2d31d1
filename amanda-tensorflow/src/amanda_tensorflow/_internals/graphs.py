"""Private symbols for graphs, functions and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensorflow.python.framework import ops

from amanda_tensorflow._internals.runtime import AttrValue, ConcreteFunction, EagerTensor, FuncGraph


def keep_alive(graph: Any, function: Any) -> None:
    """Let a graph hold a function that its nodes call."""
    if not hasattr(graph, "_amanda_routines"):
        graph._amanda_routines = []
    graph._amanda_routines.append(function)


def annotate(graph: Any, name: str, value: Any) -> None:
    """Let a graph of ours remember something of an operator."""
    if not hasattr(graph, "_amanda_notes"):
        graph._amanda_notes = {}
    graph._amanda_notes[name] = value


def annotation(graph: Any, name: str) -> Any:
    """What a graph of ours remembers of an operator."""
    return graph._amanda_notes[name]


def attributes_proto(op: Any) -> dict[str, Any]:
    """The attributes of an operator of a graph, as protocol buffers of its own."""
    return dict(op.node_def.attr.items())


def raw_attributes(op: Any) -> Iterator[tuple[str, Any]]:
    """The declared attributes of an operator of a graph, as TensorFlow gives them."""
    for attribute in op.op_def.attr:
        yield attribute.name, op.get_attr(attribute.name)


def input_types(op: Any) -> list[Any]:
    """The types that an operator's inputs are declared with, references included."""
    return list(op._input_types)


def share_variables(source: Any, graph: Any) -> None:
    """Let a copy of a function's graph tell of the variables that the function uses."""
    graph._weak_variables = list(source._weak_variables)


def function_of(op: Any) -> Any:
    """The function that a call calls, if its graph is known."""
    return function_named(op.graph, op.get_attr("f").name)


def function_named(graph: Any, name: str) -> Any:
    """A function that a graph or one around it knows; None if there is none."""
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def function_attributes(op: Any) -> dict[str, list[str]]:
    """The names of the functions that an operator runs, by attribute."""
    found = {}
    for name, value in op.node_def.attr.items():
        kind = value.WhichOneof("value")
        if kind == "func":
            found[name] = [value.func.name]
        elif kind == "list" and len(value.list.func):
            found[name] = [function.name for function in value.list.func]
    return found


def renamed(attribute: Any, names: Sequence[Any]) -> Any:
    """An attribute that names functions, with other names."""
    result = AttrValue()
    result.CopyFrom(attribute)
    functions = [result.func] if result.WhichOneof("value") == "func" else result.list.func
    for function, name in zip(functions, names, strict=True):
        function.name = name if isinstance(name, str) else name.decode()
    return result


def graph_of(function: Any) -> Any:
    """The graph of a concrete function."""
    return function._func_graph


def output_count(function: Any) -> int:
    """How many tensors a concrete function gives; a tape may have added more to its graph."""
    return int(function._delayed_rewrite_functions._num_inference_outputs)


def function_attrs(function: Any) -> dict[str, Any]:
    """The attributes of a concrete function."""
    return dict(function._attrs)


def instrumented(function: Any, graph: Any, attributes: dict[str, Any]) -> Any:
    """A concrete function like `function`, of another graph; it is marked as ours."""
    copy = ConcreteFunction.from_func_graph(
        graph, function.function_type, attributes, shared_func_graph=False
    )
    copy._amanda_instrumented = True
    return copy


def is_instrumented(function: Any) -> bool:
    """Whether a concrete function is one of ours."""
    return hasattr(function, "_amanda_instrumented")


_BRANCH_GRAPHS = {
    "cond": "_cond_graph",
    "body": "_body_graph",
    "then_branch": "_true_graph",
    "else_branch": "_false_graph",
    "branches": "_branch_graph_{}",
}


def remember_branches(op: Any, graphs: dict[str, list[Any]]) -> None:
    """Let an operator know the graphs of its functions, for the gradient of it."""
    for attribute, of in graphs.items():
        name = _BRANCH_GRAPHS.get(attribute, "")
        for index, graph in enumerate(of if name else ()):
            setattr(op, name.format(index), graph)


def set_functions(op: Any, attribute: str, names: Sequence[Any]) -> None:
    """Let an operator of a copy run other functions."""
    op._set_attr(attribute, renamed(op.node_def.attr[attribute], names))


def original_op(op: Any) -> Any:
    """The operator that ``tf.gradients`` has noted for one of its own; None for others."""
    return op._original_op


def create_op_in(graph: Any, kind: str, inputs: Sequence[Any], types: Any, **options: Any) -> Any:
    """Add an operator to a graph; the operator."""
    return graph._create_op_internal(kind, inputs, types, **options)


def add_function(graph: Any, function: Any) -> None:
    """Let a graph know a function, and those that it calls."""
    graph._add_function_recursive(function)


def update_input(op: Any, index: int, tensor: Any) -> None:
    """Let an operator of a graph read another tensor."""
    op._update_input(index, tensor)


def add_control_input(op: Any, before: Any) -> None:
    """Let an operator of a graph wait for another one."""
    op._add_control_input(before)


def set_device(op: Any, device: str) -> None:
    """Place an operator of a graph on a device."""
    op._set_device(device)


def is_reference(dtype: Any) -> bool:
    """Whether tensors of a type are references to variables of TensorFlow 1."""
    return bool(dtype._is_ref_dtype)


def is_stateful(op: Any) -> bool:
    """Whether an operator of a graph does more than give its outputs."""
    return bool(op._is_stateful)


def known_ops(graph: Any, make: bool = False) -> Any:
    """What a copy knows of its operators, by name; None for other graphs."""
    if make and not hasattr(graph, "_amanda_ops"):
        graph._amanda_ops = {}
    return getattr(graph, "_amanda_ops", None)


@contextmanager
def twins_captured(op: Any) -> Iterator[None]:
    """Within it, the function being built captures tensors of a copy instead of vanilla ones.

    ``tf.custom_gradient`` keeps the tensors of the graph in which it was traced.

    Args:
        op: the operator whose gradient is being built; nothing is done for one of no copy.
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
            # It was replaced before, for an operator around this one.
            graph.capture = capture


_FUNCTION_NAMES = itertools.count()


def unique_function_name(stem: str) -> str:
    """A name that no function of this process has."""
    return f"{stem}_{next(_FUNCTION_NAMES)}"


def functions_of(graph: Any) -> list[Any]:
    """The functions that a graph knows."""
    return list(graph._functions.values())


def is_function_call(op: Any) -> bool:
    """Whether an operator calls a function whose name is its type, as TensorFlow 1's Defun."""
    return bool(op.graph._is_function(op.type))


def must_compile(function: Any) -> bool:
    """Whether a function is compiled with XLA wherever it is called."""
    return is_compiled(function.cached_definition.attr)


def is_compiled(attributes: Any) -> bool:
    """Whether the attributes of a function ask for XLA."""
    return "_XlaMustCompile" in attributes and bool(attributes["_XlaMustCompile"].b)


def attributes_of_function(function: Any) -> dict[str, Any]:
    """The attributes of a function that a graph knows."""
    return dict(function.cached_definition.attr.items())
