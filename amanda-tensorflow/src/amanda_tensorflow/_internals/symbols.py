"""The private symbols of TensorFlow that the drivers need, and what they expect of each.

They are compared with the installed TensorFlow when a driver attaches (:func:`require`), so that a
TensorFlow in which one has changed gives one error that names it. Of those that this folder reads
while it is imported only some are listed, with their parameters. The expectations hold in 2.16 and
2.21.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf

from amanda.errors import CapabilityError
from amanda.python.signatures import signature_of

RECORDS = "records"
"""Stands among the modes for the noting of gradients, which is in place outside of scopes."""

_ALL = (RECORDS, "eager", "function", "graph")
_EAGER = ("eager",)
_GRAPHS = ("function", "graph")
_FUNCTION = ("function",)
_SESSION = ("graph",)


@attrs.frozen
class Symbol:
    """A private symbol, and the expectation of it.

    Attributes:
        where: the module, below ``tensorflow.python``, and after a colon the class, if any.
        name: the attribute.
        parameters: the names of its parameters, ``self`` included, separated by spaces; None to
            expect its presence only.
        modes: the modes that need it.
    """

    where: str
    name: str
    parameters: str | None = None
    modes: Sequence[str] = _ALL

    @property
    def owner(self) -> str:
        """The module or the class, as a message gives it."""
        module, _, cls = self.where.partition(":")
        return cls or f"tensorflow.python.{module}"

    def problem(self) -> str:
        """The difference from the expectation in this TensorFlow; "" if there is none."""
        module, _, cls = self.where.partition(":")
        try:
            owner: Any = importlib.import_module(f"tensorflow.python.{module}")
        except ImportError:
            return f"no module tensorflow.python.{module}"
        if cls:
            owner = getattr(owner, cls, None)
        found = inspect.getattr_static(owner, self.name, None)
        if found is None:
            # Modules of the runtime in C have their names by other means.
            found = getattr(owner, self.name, None)
        # A method is in its class; any other name may be given to its instances only.
        is_method = self.parameters is not None
        if found is None and (is_method or not _is_given_to_instances(owner, self.name)):
            return f"no {self.owner}.{self.name}"
        if self.parameters is None:
            return ""
        actual = list(signature_of(getattr(found, "__func__", found)).parameters)
        expected = self.parameters.split()
        if actual == expected:
            return ""
        return f"{self.owner}.{self.name}({', '.join(actual)}) instead of ({', '.join(expected)})"


def _is_given_to_instances(owner: Any, name: str) -> bool:
    """True if some method of a class mentions an attribute, as ``__init__`` does that sets it."""
    if not inspect.isclass(owner):
        return False
    members = (getattr(member, "__func__", member) for member in vars(owner).values())
    codes = (getattr(member, "__code__", None) for member in members)
    return any(code is not None and name in code.co_names for code in codes)


def _present(where: str, names: str, modes: Sequence[str]) -> list[Symbol]:
    """Symbols of one module or class that are only expected to be there."""
    return [Symbol(where, name, modes=modes) for name in names.split()]


_OP = "framework.ops:Operation"
_GRAPH = "framework.ops:Graph"
_CONCRETE = "eager.polymorphic_function.concrete_function:ConcreteFunction"
_TAPE_FUNCTIONS = "eager.polymorphic_function.concrete_function:_TapeGradientFunctions"
_ATOMIC = "eager.polymorphic_function.atomic_function:AtomicFunction"
_BASE_SESSION = "client.session:BaseSession"

SYMBOLS: tuple[Symbol, ...] = (
    # -- records on tapes and gradient functions
    Symbol(
        "eager.backprop",
        "_gradient_function",
        "op_name attr_tuple num_inputs inputs outputs out_grads skip_input_indices"
        " forward_pass_name_scope",
    ),
    Symbol(
        "eager.forwardprop",
        "_jvp_dispatch",
        "op_name attr_tuple inputs outputs tangents use_batch",
    ),
    Symbol("eager.execute", "record_gradient", "op_name inputs attrs outputs"),
    Symbol("eager.execute", "must_record_gradient", ""),
    Symbol(
        "eager.record",
        "record_operation",
        "op_type output_tensors input_tensors backward_function forward_function",
    ),
    Symbol("eager.record", "stop_recording"),
    Symbol("framework.ops", "get_gradient_function", "op"),
    Symbol("ops.gradients_util", "_SymGrad", "op out_grads"),
    # -- functions and classes
    *_present("framework.ops", "get_default_graph", _ALL),
    *_present("eager.context", "eager_mode", _ALL),
    *_present("ops.script_ops", "_py_funcs", _GRAPHS),
    *_present("ops.gen_resource_variable_ops", "assign_variable_op", _ALL),
    *_present("ops.resource_variable_ops", "BaseResourceVariable variable_accessed", _ALL),
    *_present("client.session", "Session", _SESSION),
    *_present(
        "client.pywrap_tf_session",
        "TF_SessionRun_wrapper TF_NewBufferFromString TF_GetBuffer TF_DeleteBuffer",
        _SESSION,
    ),
    *_present("framework.function_def_to_graph", "function_def_to_graph", _GRAPHS),
    # -- calls of modules
    Symbol("framework.func_graph", "func_graph_from_py_func"),
    *_present("util.tf_decorator", "unwrap", _ALL),
    Symbol(
        "ops.gradients_util",
        "_PendingCount",
        "to_ops from_ops colocate_gradients_with_ops func_graphs xs_set",
        _GRAPHS,
    ),
    Symbol("ops.gradients_util", "_MarkReachedOps", "from_ops reached_ops func_graphs", _GRAPHS),
    Symbol("framework.op_def_registry", "get", "name"),
    Symbol("ops.handle_data_util", "copy_handle_data", "source_t target_t"),
    Symbol(
        "eager.polymorphic_function.atomic_function",
        "from_func_graph",
        "name graph attrs function_type overwrite",
    ),
    *_present("framework.ops:EagerTensor", "_id _handle_data", _ALL),
    # -- eager
    *_present("pywrap_tfe", "TFE_Py_FastPathExecute", _EAGER),
    *_present(
        "ops.resource_variable_ops:BaseResourceVariable", "_trainable _handle _dtype", _EAGER
    ),
    Symbol("eager.execute", "execute", "op_name num_outputs inputs attrs ctx name", _EAGER),
    *_present("eager.context:Context", "_thread_local_data", _EAGER),
    Symbol(
        "eager.imperative_grad",
        "imperative_grad",
        "tape target sources output_gradients sources_raw unconnected_gradients",
        _EAGER,
    ),
    Symbol("ops.custom_gradient", "_eager_mode_decorator", "f args kwargs", _EAGER),
    Symbol("eager.backprop:GradientTape", "_tape", modes=_EAGER),
    # -- graphs
    Symbol(
        _GRAPH,
        "_create_op_internal",
        "self op_type inputs dtypes input_types name attrs op_def compute_device",
        _GRAPHS,
    ),
    Symbol(_GRAPH, "operations"),
    Symbol(_GRAPH, "_get_function", "self name", _GRAPHS),
    Symbol(_GRAPH, "_add_function_recursive", "self function overwrite", _GRAPHS),
    Symbol(_GRAPH, "_is_function", "self name", _GRAPHS),
    Symbol(_GRAPH, "_functions", modes=_GRAPHS),
    Symbol(_GRAPH, "_ControlDependenciesController", modes=_GRAPHS),
    Symbol(_OP, "_update_input", "self index tensor", _GRAPHS),
    Symbol(_OP, "_set_device", "self device", _GRAPHS),
    Symbol(_OP, "_set_attr", "self attr_name attr_value", _GRAPHS),
    Symbol(_CONCRETE, "_get_gradient_function", "self", _GRAPHS),
    *_present(
        _OP,
        "_add_control_input _input_types _is_stateful _original_op _c_op _get_control_flow_context",
        _GRAPHS,
    ),
    Symbol("framework.dtypes:DType", "_is_ref_dtype", modes=_GRAPHS),
    *_present("framework.func_graph:FuncGraph", "capture external_captures", _GRAPHS),
    Symbol("framework.func_graph:FuncGraph", "_weak_variables", modes=_FUNCTION),
    Symbol("framework.ops:SymbolicTensor", "_id", modes=_FUNCTION),
    Symbol("ops.script_ops:EagerFunc", "__call__", "self device token args", _GRAPHS),
    # -- functions
    Symbol(_CONCRETE, "_call_flat", "self tensor_inputs captured_inputs", _FUNCTION),
    Symbol(
        _CONCRETE,
        "from_func_graph",
        "cls graph function_type attrs shared_func_graph",
        _GRAPHS,
    ),
    Symbol(_ATOMIC, "call_flat", "self args", _FUNCTION),
    *_present(_ATOMIC, "graph function_type cached_definition", _FUNCTION),
    Symbol("framework.dtypes:DType", "_handle_data", modes=_FUNCTION),
    Symbol("ops.handle_data_util", "set_handle_data", "target_t handle_data", _FUNCTION),
    *_present(
        _CONCRETE, "_func_graph _attrs _delayed_rewrite_functions _garbage_collector", _FUNCTION
    ),
    Symbol(
        "eager.polymorphic_function.concrete_function:_DelayedRewriteGradientFunctions",
        "_num_inference_outputs",
        modes=_FUNCTION,
    ),
    Symbol(_TAPE_FUNCTIONS, "record", "self flat_outputs inference_args input_tangents", _FUNCTION),
    *_present(_TAPE_FUNCTIONS, "_backward _func_graph _func_graph_deleter", _FUNCTION),
    # -- sessions
    Symbol(
        _BASE_SESSION,
        "_call_tf_sessionrun",
        "self options feed_dict fetch_list target_list run_metadata",
        _SESSION,
    ),
    Symbol(_BASE_SESSION, "_call_tf_sessionprun", "self handle feed_dict fetch_list", _SESSION),
    Symbol(_BASE_SESSION, "partial_run_setup", "self fetches feeds", _SESSION),
    Symbol(_BASE_SESSION, "_extend_graph", "self", _SESSION),
    *_present(_BASE_SESSION, "_closed _config _session", _SESSION),
    Symbol("framework.ops:SymbolicTensor", "_as_tf_output", modes=_SESSION),
    Symbol(_GRAPH, "_unsafe_unfinalize", "self", _SESSION),
    Symbol(_GRAPH, "_as_graph_def", modes=_SESSION),
)


def missing(mode: str = "", symbols: Sequence[Symbol] = SYMBOLS) -> list[str]:
    """The differences of this TensorFlow from the expectations of a mode ("" for all modes)."""
    wanted = [symbol for symbol in symbols if mode in symbol.modes or not mode]
    return [problem for problem in (symbol.problem() for symbol in wanted) if problem]


def require(mode: str, symbols: Sequence[Symbol] = SYMBOLS) -> None:
    """Refuse a mode whose private symbols are not as expected.

    Raises:
        CapabilityError: it names the symbols.
    """
    problems = missing(mode, symbols)
    if problems:
        raise CapabilityError(
            f"TensorFlow {tf.__version__} has {'; '.join(problems)}, which the {mode} mode of "
            "amanda-tensorflow needs as it was; install a release of amanda-tensorflow for it"
        )
