"""Private symbols of eager execution, tapes, and calls of Python from graphs."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType, FunctionType
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import autograph_artifact, tf_convert
from tensorflow.python.eager import (
    backprop,
    backprop_util,
    context,
    core,
    execute,
    forwardprop,
    imperative_grad,
    record,
)
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget
from tensorflow.python.framework import func_graph, op_def_registry, ops
from tensorflow.python.ops import (
    custom_gradient,
    default_gradient,
    gen_array_ops,
    gen_math_ops,
    gen_resource_variable_ops,
    gradients_util,
    handle_data_util,
    resource_variable_ops,
    script_ops,
)
from tensorflow.python.util import tf_decorator

EagerTensor: Any = ops.EagerTensor

Graph: Any = ops.Graph

FuncGraph: Any = func_graph.FuncGraph

FUNC_GRAPH = func_graph

ConcreteFunction: Any = concrete_function.ConcreteFunction

TapeGradientFunctions: Any = concrete_function._TapeGradientFunctions
"""The functions that a tape records for a call of a concrete function."""

AtomicFunction: Any = atomic_function.AtomicFunction

EagerFunc: Any = script_ops.EagerFunc

AttrValue: Any = attr_value_pb2.AttrValue

PYWRAP = pywrap_tfe

EXECUTE = execute

RECORD = record

OPS = ops

IMPERATIVE_GRAD = imperative_grad

CUSTOM_GRADIENT = custom_gradient

GRADIENTS = gradients_util

FallbackException: Any = core._FallbackException

vanilla_gradient_function: Any = backprop._gradient_function

vanilla_jvp: Any = forwardprop._jvp_dispatch

is_tangent: Any = re.compile(r"(__inference_)?_jvp_(exact|relaxed)_shapes(_\d+)?").fullmatch
"""Whether a function of this name computes the tangents of an operator (2.16 to 2.21)."""

register_gradient_function: Any = pywrap_tfe.TFE_Py_RegisterGradientFunction

register_jvp_function: Any = pywrap_tfe.TFE_Py_RegisterJVPFunction

op_def_of: Any = op_def_registry.get

copy_handle_data: Any = handle_data_util.copy_handle_data

is_trainable: Any = backprop_util.IsTrainable

zeros_like: Any = default_gradient.zeros_like

gradients_in_graph: Any = gradients_util._GradientsHelper

identity_n: Any = gen_array_ops.identity_n

identity: Any = gen_array_ops.identity

ensure_shape: Any = gen_array_ops.ensure_shape

read_variable: Any = gen_resource_variable_ops.read_variable_op

function_from_graph: Any = atomic_function.from_func_graph

add_n: Any = gen_math_ops.add_n

context_of_process: Any = context.context

executing_eagerly: Any = context.executing_eagerly


def local_data() -> Any:
    """What TensorFlow's context keeps for each thread: `is_eager`, `scope_name`, `op_callbacks`.

    One object for all threads, in C. Properties of the context that read it are Python functions.
    """
    return context.context()._thread_local_data


no_tape_records: Any = pywrap_tfe.TFE_Py_TapeSetIsEmpty

recording_is_stopped: Any = pywrap_tfe.TFE_Py_TapeSetIsStopped

stop_recording_here: Any = pywrap_tfe.TFE_Py_TapeSetStopOnThread

restart_recording_here: Any = pywrap_tfe.TFE_Py_TapeSetRestartOnThread

record_on_tapes: Any = pywrap_tfe.TFE_Py_TapeSetRecordOperation


def register_routine(function: Any) -> str:
    """Let the runtime call a function, which it holds weakly. Returns the token for it."""
    token: str = script_ops._py_funcs.insert(function)
    return token


def registered_routine(token: Any) -> Any:
    """The function that was registered under a token."""
    return script_ops._py_funcs.get(token if isinstance(token, str) else token.decode())


def eager_mode() -> AbstractContextManager[Any]:
    """Within it, operators run at once, also while a graph is built."""
    mode: AbstractContextManager[Any] = context.eager_mode()
    return mode


def stop_recording() -> AbstractContextManager[Any]:
    """Within it, no tape records."""
    stopped: AbstractContextManager[Any] = record.stop_recording()
    return stopped


def default_graph() -> Any:
    """The graph that operators are being added to."""
    return ops.get_default_graph()


def variable_dtype(handle: Any) -> Any:
    """The dtype of the variable that a resource tensor is the handle of; None for others."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def write_variable(handle: Any, value: Any) -> None:
    """Write a tensor into the variable that a resource handle stands for."""
    gen_resource_variable_ops.assign_variable_op(handle, value)


def note_handles(function: Any, outputs: Sequence[Any]) -> None:
    """Note what the outputs of an atomic function that are resources are handles of."""
    for output, declared in zip(outputs, function.function_type.flat_outputs, strict=True):
        data = declared.dtype._handle_data
        if data:
            handle_data_util.set_handle_data(output, data.shape_inference)


@attrs.frozen
class KnownVariable:
    """The variable of a resource handle.

    Attributes:
        handle: a weak reference to the handle.
        name: its name, of Keras' variables their path; "" for an unknown one.
        is_parameter: whether it was made as one that is trained, or is a weight of a Keras layer.
    """

    handle: weakref.ref[Any]
    name: str = ""
    is_parameter: bool = False


_VARIABLES: dict[int, KnownVariable] = {}
"""By ``id`` of a handle."""


def variable_of(handle: Any) -> KnownVariable:
    """The variable of a resource handle.

    A handle does not lead to its variable, so that all objects of the process are looked through
    for a handle that has not been asked for before. One without a value is of a variable that is
    being made, which no object has yet.
    """
    known = _VARIABLES.get(id(handle))
    if known is not None and known.handle() is handle:
        return known
    # Asked while a graph is built, too.
    with eager_mode():
        has_value = bool(gen_resource_variable_ops.var_is_initialized_op(handle))
    if has_value:
        _VARIABLES.clear()
        _VARIABLES.update(_named_variables())
        return _VARIABLES.setdefault(id(handle), KnownVariable(weakref.ref(handle)))
    return KnownVariable(weakref.ref(handle))


def _named_variables() -> dict[int, KnownVariable]:
    keras = sys.modules.get("keras")
    variables = _kinds(resource_variable_ops.BaseResourceVariable)
    wrappers, layers = (_kinds(getattr(keras, name, None)) for name in ("Variable", "Layer"))
    kinds = variables | wrappers | layers
    # By type: isinstance() would run code of lazy objects, and take three times as long.
    values = [value for value in gc.get_objects() if type(value) in kinds]
    found: dict[int, KnownVariable] = {}
    state = set[int]()
    for value in values:
        if type(value) in variables:
            handle = getattr(value, "_handle", None)
            if isinstance(handle, EagerTensor):
                name = str(value.name).partition(":")[0]
                found[id(handle)] = KnownVariable(weakref.ref(handle), name, bool(value.trainable))
        elif type(value) in layers:
            # Such as moving averages; metrics and random generators are elsewhere (Keras 3.15).
            state.update(map(id, vars(value).get("_non_trainable_variables", ())))
    for variable in (value for value in values if type(value) in wrappers):
        handle = getattr(getattr(variable, "_value", None), "_handle", None)
        if id(handle) in found:
            known = found[id(handle)]
            is_parameter = known.is_parameter or id(variable) in state
            found[id(handle)] = KnownVariable(known.handle, str(variable.path), is_parameter)
    return found


def _kinds(base: Any) -> set[Any]:
    """A class, if there is one, with all that are derived from it."""
    if base is None:
        return set()
    return {base}.union(*map(_kinds, type.__subclasses__(base)))


def is_on_tape(target: Sequence[Any], output_gradients: Sequence[Any] | None = None) -> bool:
    """True if a tape, no accumulator, records what is computed with some of these tensors."""
    tensors = [t for t in (*target, *(output_gradients or ())) if t is not None]
    return bool(pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop(tensors))


_OWN_PIPELINES = "tensorflow.python.data.", "keras.src.trainers.", "tf_keras.src.engine."


def pipeline_functions(dataset: Any) -> set[Any]:
    """The functions that the runtime runs to make the elements of a data set, without those by
    which TensorFlow and the trainers of Keras hand them on."""
    waiting, met, found = [dataset], set[int](), set[Any]()
    while waiting:
        part = waiting.pop()
        if id(part) not in met:
            met.add(id(part))
            waiting += part._inputs()
            found.update(f for f in part._functions() if not _is_own(f._func))
    return found


def _is_own(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_OWN_PIPELINES)


def handle_key(handle: Any) -> int:
    """A number that no other tensor of the process has."""
    return int(handle._id)


def execute_now(kind: str, count: int, inputs: list[Any], attributes: tuple[Any, ...]) -> list[Any]:
    """Run an operator eagerly, recorded by the active tapes. Returns its outputs.

    Args:
        count: how many outputs it has.
        attributes: names and values, in turn.
    """
    outputs = execute.execute(kind.encode(), count, inputs, attributes, context.context())
    if outputs and execute.must_record_gradient():
        execute.record_gradient(kind, inputs, attributes, outputs)
    return list(outputs or ())


def named(error: Any, name: str | None) -> Any:
    """An error of an operator on the slow path as the fast path raises it (2.16 to 2.21): with the
    name that the caller gave, also where that is None, in its message."""
    message = f"{error.message} name: {name or ''}"
    made = type(error)(error.node_def, error.op, message, *error.args[3:])
    return made.with_traceback(error.__traceback__)


def is_recomputed(function: Any) -> bool:
    """True if a function with a custom gradient was made by ``tf.recompute_grad``."""
    return getattr(function, "__qualname__", "") == "recompute_grad.<locals>.inner"


def is_tape_of(inner: Any, tape: Any) -> bool:
    """True if `inner` is the runtime's tape behind a ``tf.GradientTape``."""
    return inner is not None and inner is getattr(tape, "_tape", None)


def value_of(value: Any) -> Any:
    """The value of a variable, read by the operator that the fast path runs in C to read it; any
    other value itself."""
    if not isinstance(value, resource_variable_ops.BaseResourceVariable):
        return value
    resource_variable_ops.variable_accessed(value)
    return gen_resource_variable_ops.read_variable_op(value.handle, value.dtype)


class _InputCounts(dict[str, int]):
    """The number of arguments of the fast path that are inputs; attributes follow them."""

    def __missing__(self, op_type: str) -> int:
        op_def = op_def_of(op_type)
        # An operator that is not registered: all its arguments may be inputs.
        count = sys.maxsize if op_def is None else len(op_def.input_arg)
        return self.setdefault(op_type, count)


INPUT_COUNTS = _InputCounts()
"""By operator type. A list of tensors is one argument."""

FAST = frozenset(
    {ops.EagerTensor, np.ndarray, bool, int, float, resource_variable_ops.ResourceVariable}
)
"""Types of inputs that the fast path takes (``CheckInputsOk``, 2.16 to 2.21)."""


def takes_fast_path(op_type: str, args: Sequence[Any]) -> bool:
    """True if an operator with these arguments runs on the fast path."""
    op_def = op_def_of(op_type)
    declared = () if op_def is None else op_def.input_arg
    for arg, value in zip(declared, args, strict=False):
        if arg.number_attr or arg.type_list_attr:
            if type(value) in (list, tuple):
                if not FAST.issuperset(map(type, value)):
                    return False
            elif not (is_sequence(value) or isinstance(value, np.ndarray)):
                return False
        elif type(value) not in FAST:
            return False
    return True


@attrs.frozen
class Declared:
    """The arguments of an operator that the slow path checks and converts.

    Attributes:
        fixed: the dtypes, by position, of the inputs whose dtype is the same in all calls.
        lists: the positions of the inputs that are lists of tensors.
        attributes: names of those that are dtypes or shapes and do not follow from the inputs.
    """

    fixed: dict[int, int]
    lists: frozenset[int]
    attributes: frozenset[str]


class _Declared(dict[str, Declared]):
    """By operator type."""

    def __missing__(self, op_type: str) -> Declared:
        op_def = op_def_of(op_type)
        inputs = () if op_def is None else op_def.input_arg
        fixed = {i: arg.type for i, arg in enumerate(inputs) if arg.type}
        lists = frozenset(
            i for i, arg in enumerate(inputs) if arg.number_attr or arg.type_list_attr
        )
        given = {arg.type_attr for arg in inputs}
        declared = () if op_def is None else op_def.attr
        attributes = {attr.name for attr in declared if attr.type in ("type", "shape")} - given
        return self.setdefault(op_type, Declared(fixed, lists, frozenset(attributes)))


DECLARED = _Declared()
"""The arguments that the slow path checks and converts, by operator type."""

TENSORS_ONLY = frozenset({ops.EagerTensor})


def needs_no_conversion(op_type: str, args: Sequence[Any]) -> bool:
    """True if the slow path passes arguments on as they are: tensors of the types that it expects,
    and attributes that it does not have to convert."""
    declared, count = DECLARED[op_type], INPUT_COUNTS[op_type]
    for position, value in enumerate(args[:count]):
        is_list = position in declared.lists
        if is_list and not (isinstance(value, (list, tuple)) and value):
            return False
        tensors = value if is_list else (value,)
        if not TENSORS_ONLY.issuperset(map(type, tensors)):
            return False
        dtype = declared.fixed.get(position)
        if dtype and any(tensor._datatype_enum() != dtype for tensor in tensors):
            return False
    return not declared.attributes or all(
        name not in declared.attributes or type(value) is tf.DType
        for name, value in zip(args[count::2], args[count + 1 :: 2], strict=False)
    )


_SLOW_PATH = "_eager_fallback"


def slow_path_of(frame: FrameType) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The slow path of one of TensorFlow's generated functions (2.16 to 2.21), and the arguments
    that it would be called with; None for other functions.

    Args:
        frame: the function, which is calling the fast path.
    """
    function = frame.f_globals.get(frame.f_code.co_name + _SLOW_PATH)
    if not isinstance(function, FunctionType):
        return None
    code, values = function.__code__, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: values["_ctx" if name == "ctx" else name] for name in names}
    return function, arguments


def is_sequence(value: Any) -> bool:
    """True if the fast path takes a value for a list of tensors that the slow path refuses.

    Its items are not looked at: an iteration over a tensor runs operators.
    """
    unlike = (list, tuple, str, bytes, dict, np.ndarray)
    return hasattr(type(value), "__getitem__") and not isinstance(value, unlike)


NO_VARIABLES = frozenset({ops.EagerTensor, tf.DType, str, bytes, bool, int, float, type(None)})
"""Types of most arguments of operators: among others, the fast path may read variables in C."""


def is_read_by_runtime(value: Any) -> bool:
    """True if `value` is a variable, or a list with one, which the fast path reads in C."""
    if isinstance(value, (list, tuple)):
        return any(is_read_by_runtime(item) for item in value)
    if isinstance(value, ops.EagerTensor):
        return False
    return isinstance(value, resource_variable_ops.BaseResourceVariable) or hasattr(
        value, "_should_act_as_resource_variable"
    )


def converted(function: Any) -> Any:
    """A function as AutoGraph lets the code that runs now call it: converted where that is."""
    return tf_convert(function, control_status_ctx(), convert_by_default=False)


def undecorated(method: FunctionType) -> FunctionType:
    """A method that AutoGraph converts as it is, with what decorates it.

    A converted caller's calls are. :func:`converted` would convert what a decorator of TensorFlow's
    has wrapped, in place of what runs.
    """
    if not hasattr(method, "_tf_decorator"):
        return method
    found = FunctionType(
        method.__code__, method.__globals__, method.__name__, None, method.__closure__
    )
    found.__defaults__, found.__kwdefaults__ = method.__defaults__, method.__kwdefaults__
    found.__module__, found.__qualname__ = method.__module__, method.__qualname__
    return found


def leave_unconverted(called: Any) -> None:
    """Let AutoGraph call a function as it is, also as the ``__call__`` of an object."""
    autograph_artifact(called)
    # Of an object AutoGraph asks for that method's code alone (2.16 to 2.21), and does not convert
    # code of this file's name, which it takes for generated.
    called.__code__ = called.__code__.replace(co_filename="<string>")


def is_in_name_scope(function: Any) -> bool:
    """True if a function is a method that ``tf.Module.with_name_scope`` has wrapped."""
    decorators, _ = tf_decorator.unwrap(function)
    return any(found.decorator_name == "with_name_scope" for found in decorators)


def called_instance(function: Any) -> Any:
    """The object that a ``tf.function`` calls; None for a function that is no call of one.

    A call is one of ``__call__``, and of a method in :func:`is_in_name_scope`.
    """
    decorators, target = tf_decorator.unwrap(function)
    for found in (target, *(decorator.decorated_target for decorator in decorators)):
        owner = getattr(found, "__self__", None)
        if isinstance(owner, TfMethodTarget):
            is_call = found.__name__ == "__call__" or is_in_name_scope(function)
            return owner.target if is_call else None
    return None
