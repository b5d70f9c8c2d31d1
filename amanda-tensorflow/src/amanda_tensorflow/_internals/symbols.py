"""What the drivers expect of TensorFlow's private symbols, compared when one attaches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session, session
from tensorflow.python.eager import (
    backprop,
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
    gen_script_ops,
    gradients_util,
    handle_data_util,
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
        modes: the modes that need it; "records" stands for the passive tag of gradients.
    """

    where: str
    owner: Any
    name: str
    parameters: Sequence[str] | None = None
    modes: Sequence[str] = ("records", "eager", "function", "graph")

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
    Symbol(
        "tensorflow.Operation",
        ops.Operation,
        "_set_attr",
        ("self", "attr_name", "attr_value"),
        _GRAPH_MODES,
    ),
    Symbol("tensorflow.Operation", ops.Operation, "_is_stateful", modes=_GRAPH_MODES),
    Symbol("tensorflow.Graph", ops.Graph, "_is_function", ("self", "name"), _GRAPH_MODES),
    Symbol("tensorflow.Graph", ops.Graph, "_unsafe_unfinalize", ("self",), ("graph",)),
    Symbol("tensorflow.Graph", ops.Graph, "_as_graph_def", modes=("graph",)),
    Symbol(
        "tensorflow.python.ops.gradients_util",
        gradients_util,
        "_GradientsHelper",
        modes=_GRAPH_MODES,
    ),
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
