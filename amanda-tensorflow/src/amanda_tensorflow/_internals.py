"""Every private symbol of TensorFlow that this package uses.

Named by what they do. :func:`missing` compares names and parameters with what
the drivers expect when one of them attaches, so that a TensorFlow in which one
has changed gives one clear error, and refuses that mode only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session, session
from tensorflow.python.eager import (
    backprop,
    context,
    core,
    execute,
    forwardprop,
    imperative_grad,
    record,
)
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.framework import func_graph, op_def_registry, ops
from tensorflow.python.ops import (
    custom_gradient,
    gen_array_ops,
    gen_math_ops,
    gen_resource_variable_ops,
    gen_script_ops,
    gradients_util,
    handle_data_util,
    resource_variable_ops,
    script_ops,
)

from amanda.errors import CapabilityError


@attrs.frozen
class Symbol:
    """A private symbol, and what is expected of it.

    Attributes:
        where: the module or class, as a message gives it.
        owner: the module or class itself.
        name: the attribute.
        parameters: names of its parameters, ``self`` included; None where it has
            none that Python can see.
        modes: the modes that need it.
    """

    where: str
    owner: Any
    name: str
    parameters: Sequence[str] | None = None
    modes: Sequence[str] = ("eager", "function", "graph")

    def problem(self) -> str:
        """What is wrong with it in this TensorFlow; "" if nothing is."""
        found = inspect.getattr_static(self.owner, self.name, None)
        if found is None:
            found = getattr(self.owner, self.name, None)
        if found is None:
            return f"no {self.where}.{self.name}"
        if self.parameters is None:
            return ""
        function = getattr(found, "__func__", found)
        actual = list(inspect.signature(function).parameters)
        if actual == list(self.parameters):
            return ""
        expected = ", ".join(self.parameters)
        return f"{self.where}.{self.name}({', '.join(actual)}) instead of ({expected})"


_GRAPH_MODES = ("function", "graph")

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "tensorflow.python.eager.backprop",
        backprop,
        "_gradient_function",
        (
            "op_name",
            "attr_tuple",
            "num_inputs",
            "inputs",
            "outputs",
            "out_grads",
            "skip_input_indices",
            "forward_pass_name_scope",
        ),
    ),
    Symbol(
        "tensorflow.python.eager.forwardprop",
        forwardprop,
        "_jvp_dispatch",
        ("op_name", "attr_tuple", "inputs", "outputs", "tangents", "use_batch"),
    ),
    Symbol("tensorflow.python.pywrap_tfe", pywrap_tfe, "TFE_Py_RegisterGradientFunction"),
    Symbol("tensorflow.python.pywrap_tfe", pywrap_tfe, "TFE_Py_RegisterJVPFunction"),
    Symbol(
        "tensorflow.python.eager.execute",
        execute,
        "record_gradient",
        ("op_name", "inputs", "attrs", "outputs"),
    ),
    Symbol("tensorflow.python.eager.execute", execute, "must_record_gradient", ()),
    Symbol(
        "tensorflow.python.eager.record",
        record,
        "record_operation",
        ("op_type", "output_tensors", "input_tensors", "backward_function", "forward_function"),
    ),
    Symbol("tensorflow.python.eager.record", record, "stop_recording"),
    Symbol("tensorflow.python.framework.ops", ops, "get_gradient_function", ("op",)),
    Symbol("tensorflow.python.framework.ops", ops, "EagerTensor"),
    Symbol("tensorflow.python.framework.op_def_registry", op_def_registry, "get", ("name",)),
    # -- eager
    *(
        Symbol("tensorflow.python.pywrap_tfe", pywrap_tfe, name, modes=("eager",))
        for name in (
            "TFE_Py_FastPathExecute",
            "TFE_Py_TapeSetIsEmpty",
            "TFE_Py_TapeSetIsStopped",
            "TFE_Py_TapeSetStopOnThread",
            "TFE_Py_TapeSetRestartOnThread",
            "TFE_Py_TapeSetRecordOperation",
        )
    ),
    Symbol("tensorflow.python.eager.core", core, "_FallbackException", modes=("eager",)),
    Symbol(
        "tensorflow.python.eager.execute",
        execute,
        "execute",
        ("op_name", "num_outputs", "inputs", "attrs", "ctx", "name"),
        ("eager",),
    ),
    Symbol(
        "tensorflow.python.eager.imperative_grad",
        imperative_grad,
        "imperative_grad",
        (
            "tape",
            "target",
            "sources",
            "output_gradients",
            "sources_raw",
            "unconnected_gradients",
        ),
        ("eager",),
    ),
    Symbol(
        "tensorflow.python.ops.custom_gradient",
        custom_gradient,
        "_eager_mode_decorator",
        ("f", "args", "kwargs"),
        ("eager",),
    ),
    # -- graphs
    Symbol(
        "tensorflow.Graph",
        ops.Graph,
        "_create_op_internal",
        (
            "self",
            "op_type",
            "inputs",
            "dtypes",
            "input_types",
            "name",
            "attrs",
            "op_def",
            "compute_device",
        ),
        _GRAPH_MODES,
    ),
    Symbol("tensorflow.Graph", ops.Graph, "_get_function", ("self", "name"), _GRAPH_MODES),
    Symbol(
        "tensorflow.Graph",
        ops.Graph,
        "_add_function_recursive",
        ("self", "function", "overwrite"),
        _GRAPH_MODES,
    ),
    Symbol(
        "tensorflow.Operation",
        ops.Operation,
        "_update_input",
        ("self", "index", "tensor"),
        _GRAPH_MODES,
    ),
    Symbol("tensorflow.Operation", ops.Operation, "_set_device", ("self", "device"), _GRAPH_MODES),
    Symbol("FuncGraph", func_graph.FuncGraph, "capture", modes=_GRAPH_MODES),
    Symbol("FuncGraph", func_graph.FuncGraph, "external_captures", modes=_GRAPH_MODES),
    Symbol(
        "tensorflow.python.ops.handle_data_util",
        handle_data_util,
        "copy_handle_data",
        ("source_t", "target_t"),
        _GRAPH_MODES,
    ),
    Symbol(
        "EagerFunc",
        script_ops.EagerFunc,
        "__call__",
        ("self", "device", "token", "args"),
        _GRAPH_MODES,
    ),
    Symbol("tensorflow.python.ops.script_ops", script_ops, "_py_funcs", modes=_GRAPH_MODES),
    Symbol(
        "tensorflow.python.ops.gen_script_ops",
        gen_script_ops,
        "eager_py_func",
        modes=_GRAPH_MODES,
    ),
    Symbol(
        "ConcreteFunction",
        concrete_function.ConcreteFunction,
        "_call_flat",
        ("self", "tensor_inputs", "captured_inputs"),
        ("function",),
    ),
    Symbol(
        "ConcreteFunction",
        concrete_function.ConcreteFunction,
        "from_func_graph",
        ("cls", "graph", "function_type", "attrs", "shared_func_graph"),
        ("function",),
    ),
    Symbol(
        "tensorflow.python.eager.polymorphic_function.atomic_function",
        atomic_function,
        "from_func_graph",
        ("name", "graph", "attrs", "function_type", "overwrite"),
        _GRAPH_MODES,
    ),
    Symbol(
        "BaseSession",
        session.BaseSession,
        "_call_tf_sessionrun",
        ("self", "options", "feed_dict", "fetch_list", "target_list", "run_metadata"),
        ("graph",),
    ),
    Symbol(
        "BaseSession",
        session.BaseSession,
        "_call_tf_sessionprun",
        ("self", "handle", "feed_dict", "fetch_list"),
        ("graph",),
    ),
    Symbol("BaseSession", session.BaseSession, "_extend_graph", ("self",), ("graph",)),
    Symbol(
        "tensorflow.python.client.pywrap_tf_session",
        pywrap_tf_session,
        "TF_OperationName",
        modes=("graph",),
    ),
)


def missing(mode: str = "", symbols: Sequence[Symbol] = SYMBOLS) -> list[str]:
    """What this TensorFlow has not, or has otherwise, of what a mode needs (all: "")."""
    wanted = [s for s in symbols if mode in s.modes or not mode]
    return [problem for problem in (s.problem() for s in wanted) if problem]


def require(mode: str) -> None:
    """Refuse a mode whose private symbols are not as expected.

    Raises:
        CapabilityError: it names the symbols.
    """
    problems = missing(mode)
    if problems:
        raise CapabilityError(
            f"TensorFlow {tf.__version__} has {'; '.join(problems)}, which the {mode} mode of "
            "amanda-tensorflow needs as it was; install a release of amanda-tensorflow for it"
        )


EagerTensor: Any = ops.EagerTensor
Graph: Any = ops.Graph
FuncGraph: Any = func_graph.FuncGraph
ConcreteFunction: Any = concrete_function.ConcreteFunction
BaseSession: Any = session.BaseSession
EagerFunc: Any = script_ops.EagerFunc
AttrValue: Any = attr_value_pb2.AttrValue

PYWRAP = pywrap_tfe
EXECUTE = execute
RECORD = record
OPS = ops
IMPERATIVE_GRAD = imperative_grad
SESSION = session
CUSTOM_GRADIENT = custom_gradient
FallbackException: Any = core._FallbackException

vanilla_gradient_function: Any = backprop._gradient_function
vanilla_jvp: Any = forwardprop._jvp_dispatch
register_gradient_function: Any = pywrap_tfe.TFE_Py_RegisterGradientFunction
register_jvp_function: Any = pywrap_tfe.TFE_Py_RegisterJVPFunction
op_def_of: Any = op_def_registry.get
copy_handle_data: Any = handle_data_util.copy_handle_data
gradients_in_graph: Any = gradients_util._GradientsHelper
identity_n: Any = gen_array_ops.identity_n
identity: Any = gen_array_ops.identity
ensure_shape: Any = gen_array_ops.ensure_shape
read_variable: Any = gen_resource_variable_ops.read_variable_op
eager_py_func: Any = gen_script_ops.eager_py_func
function_from_graph: Any = atomic_function.from_func_graph
add_n: Any = gen_math_ops.add_n
context_of_process: Any = context.context
no_tape_records: Any = pywrap_tfe.TFE_Py_TapeSetIsEmpty
recording_is_stopped: Any = pywrap_tfe.TFE_Py_TapeSetIsStopped
stop_recording_here: Any = pywrap_tfe.TFE_Py_TapeSetStopOnThread
restart_recording_here: Any = pywrap_tfe.TFE_Py_TapeSetRestartOnThread
record_on_tapes: Any = pywrap_tfe.TFE_Py_TapeSetRecordOperation


def register_routine(function: Any) -> str:
    """Let the runtime call `function` (weakly held); the token by which it does."""
    token: str = script_ops._py_funcs.insert(function)
    return token


def registered_routine(token: Any) -> Any:
    """The function that a token stands for."""
    return script_ops._py_funcs.get(token if isinstance(token, str) else token.decode())


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


def registered_routines() -> int:
    """How many Python functions the runtime can call."""
    return int(script_ops._py_funcs.size())


def executing_eagerly() -> bool:
    """Whether operators of the current thread run at once."""
    return bool(context.executing_eagerly())


def eager_mode() -> AbstractContextManager[Any]:
    """Within it, operators run at once, also in a graph or without eager execution."""
    mode: AbstractContextManager[Any] = context.eager_mode()
    return mode


def stop_recording() -> AbstractContextManager[Any]:
    """Within it, no tape records."""
    stopped: AbstractContextManager[Any] = record.stop_recording()
    return stopped


def scope_name() -> str:
    """The name scope of eager execution: ``"net/conv1/"``, "" outside of one."""
    return str(context.context().scope_name or "")


def default_graph() -> Any:
    """The graph that operators are being added to."""
    return ops.get_default_graph()


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


def handle_dtype(handle: Any) -> Any:
    """The type of the variable that a resource handle stands for; None if it is not known."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return data.shape_and_type[0].dtype


def variable_dtype(handle: Any) -> Any:
    """The dtype of the variable that a resource tensor is the handle of; None if it is of none."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def execute_now(kind: str, count: int, inputs: list[Any], attributes: tuple[Any, ...]) -> list[Any]:
    """Run an operator at once, recorded by the tapes that are active; its outputs."""
    outputs = execute.execute(kind.encode(), count, inputs, attributes, context.context())
    if outputs and execute.must_record_gradient():
        execute.record_gradient(kind, inputs, attributes, outputs)
    return list(outputs or ())


def create_op(kind: str, inputs: list[Any], types: list[Any], attributes: Any) -> list[Any]:
    """Add an operator to the current graph; its outputs."""
    graph = ops.get_default_graph()
    return list(graph._create_op_internal(kind, inputs, types, attrs=dict(attributes)).outputs)


def operation_of(graph: Any, handle: Any) -> Any:
    """The operator of a graph that a handle of the runtime stands for."""
    return graph.get_operation_by_name(pywrap_tf_session.TF_OperationName(handle))


def tensor_of(graph: Any, output: Any) -> Any:
    """The tensor of a graph that an output of the runtime stands for."""
    return operation_of(graph, output.oper).outputs[output.index]


def shadow_graph(source: Any) -> Any:
    """An empty graph that knows the functions of another one."""
    graph = Graph()
    for function in source._functions.values():
        graph._add_function_recursive(function)
    return graph


def shadow_session(graph: Any, config: Any) -> Any:
    """A session for a copy; it is marked as ours."""
    with eager_mode():
        made = session.Session(graph=graph, config=config)
    made._amanda_shadow = True
    return made


def is_shadow(candidate: Any) -> bool:
    """Whether a session is one of ours."""
    return hasattr(candidate, "_amanda_shadow")


def is_closed(candidate: Any) -> bool:
    """Whether a session was closed."""
    return bool(candidate._closed)


def session_config(of: Any) -> Any:
    """The configuration that a session was made with."""
    return of._config


def run_vanilla(
    of: Any,
    fetches: Sequence[Any],
    targets: Sequence[Any] = (),
    feeds: Sequence[tuple[Any, Any]] = (),
    options: Any = None,
    run_metadata: Any = None,
) -> list[Any]:
    """Run a session's graph as it is.

    Args:
        fetches: tensors; their values are returned.
        targets: operators to run.
        feeds: pairs of a tensor and its value.
        options, run_metadata: handles of the runtime.
    """
    if not fetches and not targets:
        return []
    of._extend_graph()
    result: list[Any] = pywrap_tf_session.TF_SessionRun_wrapper(
        of._session,
        options,
        {tensor._as_tf_output(): value for tensor, value in feeds},
        [tensor._as_tf_output() for tensor in fetches],
        [target._c_op for target in targets],
        run_metadata,
    )
    return result


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


def is_recomputed(function: Any) -> bool:
    """Whether a function with a custom gradient is one of ``tf.recompute_grad``."""
    return getattr(function, "__qualname__", "") == "recompute_grad.<locals>.inner"


def is_tape_of(inner: Any, tape: Any) -> bool:
    """Whether `inner` is what a ``tf.GradientTape`` hands on to differentiate."""
    return inner is not None and inner is getattr(tape, "_tape", None)


def original_op(op: Any) -> Any:
    """The operator that ``tf.gradients`` has noted for one of its own; None for others."""
    return op._original_op


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


def is_read_by_runtime(value: Any) -> bool:
    """Whether the fast path reads `value`, a variable, or a variable in a list, by itself."""
    if isinstance(value, (list, tuple)):
        return any(is_read_by_runtime(item) for item in value)
    if isinstance(value, ops.EagerTensor):
        return False
    return isinstance(value, resource_variable_ops.BaseResourceVariable) or hasattr(
        value, "_should_act_as_resource_variable"
    )


_FUNCTION_NAMES = itertools.count()


def unique_function_name(stem: str) -> str:
    """A name that no function of this process has."""
    return f"{stem}_{next(_FUNCTION_NAMES)}"


def functions_of(graph: Any) -> list[Any]:
    """The functions that a graph knows."""
    return list(graph._functions.values())


@contextmanager
def unfinalized(graph: Any) -> Iterator[None]:
    """Within it, something can be added to a graph that the user has finalized."""
    was_finalized = graph.finalized
    if was_finalized:
        graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if was_finalized:
            graph.finalize()


def call_node(
    graph: Any, name: str, function: Any, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """Add a node that calls a function.

    Args:
        outputs: the function's outputs, for their types.
    """
    called, taken, given = AttrValue(), AttrValue(), AttrValue()
    called.func.name = function.name.decode()
    taken.list.type.extend([tensor.dtype.as_datatype_enum for tensor in inputs])
    given.list.type.extend([tensor.dtype.as_datatype_enum for tensor in outputs])
    with graph.as_default(), graph.control_dependencies(None), graph.device(None):
        node = graph._create_op_internal(
            "StatefulPartitionedCall",
            list(inputs),
            [tensor.dtype for tensor in outputs],
            name=graph.unique_name(name) + "/",
            attrs={"f": called, "Tin": taken, "Tout": given},
            compute_device=False,
        )
    for tensor, output in zip(node.outputs, outputs, strict=True):
        tensor.set_shape(output.shape)
    graph._amanda_inserted = getattr(graph, "_amanda_inserted", 0) + 1
    return node


def own_version(graph: Any) -> int:
    """How many operators the user has added to a graph."""
    return int(graph.version) - getattr(graph, "_amanda_inserted", 0)


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


def hide(graph: Any, nodes: str, functions: str) -> None:
    """Leave nodes and functions whose names begin so out of what is written of a graph."""
    if hasattr(graph, "_amanda_hidden"):
        return
    graph._amanda_hidden = True
    vanilla = graph._as_graph_def

    def _as_graph_def(*args: Any, **kwargs: Any) -> Any:
        definition, version = vanilla(*args, **kwargs)
        kept = type(definition)()
        kept.CopyFrom(definition)
        del kept.node[:]
        kept.node.extend(n for n in definition.node if not n.name.startswith(nodes))
        del kept.library.function[:]
        kept.library.function.extend(
            f for f in definition.library.function if not f.signature.name.startswith(functions)
        )
        return kept, version

    graph._as_graph_def = _as_graph_def
