"""Every private symbol of PyTorch that this package uses, under a name that says what it does.

The other modules call what is defined here and touch nothing private themselves (ruff's
SLF001 checks that)::

    if _internals.in_backward():
        ...

A symbol is declared where it is used, with :func:`_symbol` or :func:`_require`. The drivers
ask :func:`missing` when they attach, so that a PyTorch without one of them gives an error
that names it. Observations in comments were made with PyTorch 2.13.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import logging
import operator
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad

from amanda.signatures import annotations_of, signature_of

# -- declaring symbols, and looking for them --------------------------------

_EAGER: list[str] = []
_COMPILER: list[str] = []
_ABSENT: Any = object()


def missing(*, compiler: bool = False) -> list[str]:
    """The dotted names of the private symbols that this PyTorch does not have.

    Args:
        compiler: look for those of the compiler instead, which imports ``torch._dynamo``
            (about two seconds).
    """
    return [path for path in (_COMPILER if compiler else _EAGER) if _find(path) is _ABSENT]


def _find(path: str) -> Any:
    """The object of a dotted name; ``_ABSENT`` if any part of the name is missing."""
    first, *names = path.split(".")
    found: Any = sys.modules[first]
    for name in names:
        owner, found = found, getattr(found, name, _ABSENT)
        if found is _ABSENT and isinstance(owner, type):
            # An attribute of instances is among the annotations of the class.
            found = annotations_of(owner).get(name, _ABSENT)
        if found is _ABSENT:
            break
    return found


def _require(*paths: str) -> None:
    """Declare symbols that are read where they are needed."""
    _EAGER.extend(paths)


def _symbol(path: str) -> Any:
    """Declare a symbol and look it up; if it is missing, a function that says so when called."""
    _require(path)
    found = _find(path)
    if found is not _ABSENT:
        return found

    def gone(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"PyTorch {torch.__version__} has no {path}")

    return gone


# -- function modes ---------------------------------------------------------

# The public way to push a mode is a with-statement around all that it is to see, and a scope
# begins and ends in functions of its own.
push_mode: Callable[[Any], None] = _symbol("torch._C._push_on_torch_function_stack")
pop_mode: Callable[[], Any] = _symbol("torch._C._pop_torch_function_stack")
mode_depth: Callable[[], int] = _symbol("torch._C._len_torch_function_stack")
mode_at: Callable[[int], Any] = _symbol("torch._C._get_function_stack_at")

call_composite = _symbol("torch._C._skip_one_hop_torch_function")
"""The C function behind ``torch.overrides.redispatch_function``: a Python frame less per call."""

PYTHON_EVENT = torch.overrides.handle_torch_function.__code__
"""The code that reports a Python-level function to a mode; C-level ones come straight from C."""

caller_frame: Callable[[int], Any] = sys._getframe
"""The frame that many levels above the function that asks. The only way to tell whether an
event comes from :data:`PYTHON_EVENT` or from C: ``func`` can be the same in both."""


MODE_BUILTINS = (
    push_mode,
    pop_mode,
    mode_depth,
    mode_at,
    _symbol("torch._C._is_torch_function_all_disabled"),
    _symbol("torch._C.DisableTorchFunction.__enter__"),
    _symbol("torch._C.DisableTorchFunction.__exit__"),
    torch.device.__enter__,
    torch.device.__exit__,
)
"""Everything by which Python changes a thread's stack of modes, and asks about it."""


def modes() -> Sequence[Any]:
    """The function modes of the current thread, outermost first."""
    depth = mode_depth()
    return [mode_at(index) for index in range(depth)] if depth else ()


def hide_modes() -> None:
    """Take all function modes off the current thread."""
    while mode_depth():
        pop_mode()


def show_modes(hidden: Sequence[Any]) -> None:
    """Put hidden modes back."""
    for mode in hidden:
        push_mode(mode)


def set_modes(wanted: Sequence[Any]) -> None:
    """Make these the function modes of the current thread, also if an interrupt comes between."""
    try:
        hide_modes()
        show_modes(wanted)
    except BaseException:
        hide_modes()
        show_modes(wanted)
        raise


def without_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with no function mode on."""
    # Not a with-statement: an interrupt that comes as its body ends keeps it from its exit.
    depth = mode_depth()
    if not depth:
        return function(*args)
    # For each backward operator with a routine: calls of Python functions would show.
    outer = (mode_at(0),) if depth == 1 else modes()
    try:
        if depth == 1:
            pop_mode()
        else:
            hide_modes()
        result = function(*args)
        if depth == 1:
            push_mode(outer[0])
        else:
            show_modes(outer)
    except BaseException:
        set_modes(outer)
        raise
    return result


_without_overrides = _symbol("torch._C.DisableTorchFunctionSubclass")
no_overrides: Callable[[], AbstractContextManager[Any]] = _without_overrides
"""No ``__torch_function__`` of a tensor's class is called within it. It costs a tenth of a
microsecond, and may be entered once."""

_with_overrides = _symbol("torch._C._EnableTorchFunction")
_overrides_are_on = _symbol("torch._C._is_torch_function_enabled")
_inherited = _symbol("torch._C._disabled_torch_function_impl")

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""The classes of tensors that override no operator."""

PLAIN = PLAIN_TENSORS | {type(None), bool, int, float, str}
"""Types of arguments and results that neither override operators nor hold what does."""


def overrides(value: Any) -> bool:
    """Whether a value is, or holds, a tensor with a ``__torch_function__`` of its class's own."""
    cls = type(value)
    if cls in PLAIN_TENSORS:
        return False
    if isinstance(value, torch.Tensor):
        return cls.__torch_function__ is not _inherited
    if not isinstance(value, (list, tuple)):
        return False
    # The second for what is nested, or overrides.
    return not PLAIN.issuperset(map(type, value)) and any(map(overrides, value))


def takes_few(value: Any) -> bool:
    """Whether a tensor's class raises for nearly every function, reads included.

    That of ``ExpandedWeight`` does (2.13), which PyTorch imports for gradients of samples only.
    """
    return type(value).__module__.startswith("torch.nn.utils._expanded_weights.")


def take_no_identity(values: Iterable[Any]) -> bool:
    """Whether no ``autograd.Function`` of the driver's may stand before some of these tensors.

    The class of one that overrides operators would not find it behind. For nested tensors of the
    strided layout PyTorch raises in every ``autograd.Function`` (2.13).
    """
    for value in values:
        if type(value) in PLAIN_TENSORS:
            if value.is_nested and value.layout is torch.strided:
                return True
        elif value is not None and (overrides(value) or is_strided_nested(value)):
            return True
    return False


def is_strided_nested(value: Any) -> bool:
    """Whether a value is a nested tensor of the older of the two layouts."""
    return isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided


class _Reading(threading.local):
    is_on = False
    is_refused = False


READING = _Reading()
"""``is_on`` says whether the current thread is within :class:`reading`."""


class reading:  # noqa: N801 - reads as a statement
    """Within it, what the driver reads of tensors reaches no ``__torch_function__`` of a class.

    Args:
        values: the tensors; without an overriding one among them nothing is done.
    """

    __slots__ = ("_guard", "_is_refused")

    def __init__(self, values: Sequence[Any]) -> None:
        overriding: list[Any] = []
        if not PLAIN.issuperset(map(type, values)):
            overriding = list(filter(overrides, values))
        is_needed = bool(overriding) and _overrides_are_on()
        self._guard = _without_overrides() if is_needed else None
        self._is_refused = is_needed and any(map(takes_few, overriding))

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()
            READING.is_on = True
            READING.is_refused = self._is_refused

    def __exit__(self, *raised: Any) -> None:
        if self._guard is not None:
            READING.is_on = READING.is_refused = False
            self._guard.__exit__(*raised)


class running:  # noqa: N801 - reads as a statement
    """Within it, code of the program, or of a tool that acts, runs; it undoes :class:`reading`."""

    __slots__ = ("_guard",)

    def __init__(self) -> None:
        self._guard: Any = None

    def __enter__(self) -> None:
        self._guard = _with_overrides() if READING.is_on else None
        if self._guard is not None:
            self._guard.__enter__()
            READING.is_on = False

    def __exit__(self, *_: object) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__(None, None, None)
            READING.is_on = True


# -- what the current thread is doing ---------------------------------------

_graph_task = _symbol("torch._C._current_graph_task_id")
_tracing_state = _symbol("torch._C._get_tracing_state")
_dispatch_mode = _symbol("torch._C._get_dispatch_mode")
_dispatch_depth = _symbol("torch._C._len_torch_dispatch_stack")
_PROXY = _symbol("torch._C._TorchDispatchModeKey.PROXY")
_OWN_MODES = (
    _PROXY,
    _symbol("torch._C._TorchDispatchModeKey.FAKE"),
    _symbol("torch._C._TorchDispatchModeKey.FUNCTIONAL"),
)
_is_wrapped = _symbol("torch._C._functorch.is_functorch_wrapped_tensor")
_unwrapped = _symbol("torch._C._functorch.get_unwrapped")
# Not ``_functorch.peek_interpreter_stack``: asking it gives the thread a stack of transforms, which
# autograd copies with each state of the thread, several times per node (2.13).
_is_transformed: Callable[[], bool] = _symbol("torch._C._are_functorch_transforms_active")
_require("torch.autograd.forward_ad._current_level")

# ``torch.compiler.is_compiling()`` by what it returns, where that is kept as in 2.13: two functions
# in Python, and it is asked for each operator with a gradient.
_is_compiling: Callable[[], bool] = (
    functools.partial(vars(torch.compiler).__getitem__, "_is_compiling_flag")
    if "_is_compiling_flag" in vars(torch.compiler)
    else torch.compiler.is_compiling
)

set_grad_enabled: Callable[[bool], None] = _symbol("torch._C._set_grad_enabled")
"""``torch.set_grad_enabled`` without the context object, six times cheaper."""

set_forward_grad_enabled: Callable[[bool], None] = _symbol("torch._C._set_fwd_grad_enabled")


_disable_dispatch_modes = _symbol("torch.utils._python_dispatch._disable_current_modes")


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """The ``TorchDispatchMode``s of the program see nothing of what runs within it."""
    return _disable_dispatch_modes() if _dispatch_depth() else nullcontext()


dispatch_depth: Callable[[], int] = _dispatch_depth
"""How many dispatch modes are on in this thread, PyTorch's own among them."""

_pop_dispatch_mode = _symbol("torch._C._pop_torch_dispatch_stack")
_push_dispatch_mode = _symbol("torch._C._push_on_torch_dispatch_stack")


def hide_dispatch_modes(hidden: list[Any]) -> None:
    """Take the dispatch modes of the program off the stack of this thread.

    PyTorch's own, that of fake tensors and those of its tracers, stay: without them tensors that
    code makes would not go with those that it is given. They are below the others (2.13).

    Args:
        hidden: gets them, innermost first, for :func:`show_dispatch_modes`.
    """
    if not _dispatch_depth():
        return
    own = sum([_dispatch_mode(key) is not None for key in _OWN_MODES])
    while _dispatch_depth() > own:
        # In one line, between whose parts no interrupt is tried.
        hidden.append(_pop_dispatch_mode(None))


def show_dispatch_modes(hidden: list[Any]) -> None:
    """Undo :func:`hide_dispatch_modes`. After an interrupt it may be called again."""
    while hidden:
        _ = _push_dispatch_mode(hidden[-1]), hidden.pop()


def without_dispatch_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with no dispatch mode of the program's on."""
    # Not a with-statement, as for without_modes().
    hidden: list[Any] = []
    try:
        hide_dispatch_modes(hidden)
        result = function(*args)
        show_dispatch_modes(hidden)
    except BaseException:
        show_dispatch_modes(hidden)
        raise
    return result


graph_task: Callable[[], int] = _graph_task
"""The number of the backward pass that runs in this thread; -1 outside of one."""


def in_backward() -> bool:
    """Whether the current thread is running a node of a backward pass."""
    return bool(_graph_task() != -1)


def in_functorch() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) is active."""
    return _is_transformed()


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether some functorch transform, or autograd outside of them, differentiates a tensor."""
    while not tensor.requires_grad and _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor.requires_grad


def in_forward_ad() -> bool:
    """Whether tensors may carry tangents: in ``torch.autograd.forward_ad`` or ``func.jvp``."""
    return forward_ad._current_level >= 0


def is_bare() -> bool:
    """Whether no mode is on in this thread, and no forward-mode AD."""
    return not (mode_depth() or _dispatch_depth()) and forward_ad._current_level < 0


is_autocasting: Callable[[], bool] = _symbol("torch._C._is_any_autocast_enabled")
"""Whether autocast is on for any device: nodes of their own may then cast an operator's inputs."""


_require("torch._guards.tracing")
_tracing_context = _symbol("torch._guards.TracingContext.try_get")
_traced_code = _symbol("torch._guards.TracingContext.get_traced_code")


def traced_code() -> Sequence[types.CodeType]:
    """The code that Dynamo has followed for the graph that it hands to a compiler now."""
    return _traced_code() or ()


def is_compiling() -> bool:
    """Whether Dynamo or what it hands its graphs to runs in this thread."""
    # The flag behind the public function is one for all threads; Dynamo takes both calls in code
    # that it captures for True.
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling() or _tracing_context() is not None
    )


def is_plain() -> bool:
    """Whether operators that are called now go straight to PyTorch's eager kernels: no
    mode is on, and no transform, forward-mode AD or tracer is active."""
    return (
        not (mode_depth() or _dispatch_depth())
        and forward_ad._current_level < 0
        and not _is_transformed()
        and _tracing_state() is None
        and not (torch.compiler.is_compiling() and is_compiling())
    )


def is_traced() -> bool:
    """Whether the current operators are being recorded by a tracer of PyTorch:
    ``jit.trace``, ``make_fx``, ``export`` or Dynamo."""
    return (
        _tracing_state() is not None
        or _dispatch_mode(_PROXY) is not None
        or (torch.compiler.is_compiling() and is_compiling())
    )


Question = Callable[[], Any] | tuple[dict[str, Any], str]
"""What the gate asks: a function, or a dictionary for one of its keys, which takes less time."""

_compiling_asked: Question = (
    (vars(torch.compiler), "_is_compiling_flag")
    if "_is_compiling_flag" in vars(torch.compiler)
    else torch.compiler.is_compiling
)

RECORDERS: Sequence[Question] = (
    _is_transformed,
    _tracing_state,
    functools.partial(_dispatch_mode, _PROXY),
    _compiling_asked,
)
"""What :func:`is_only_run` asks: all are None or False where operators run as they are."""

TRANSFORMERS: Sequence[Question] = (
    _is_transformed,
    _tracing_state,
    _compiling_asked,
    _dispatch_depth,
    (vars(forward_ad), "_current_level"),
)
"""What :func:`is_plain` asks beside the depth of function modes: all are None, False, 0 or -1 where
it holds."""


def is_only_run() -> bool:
    """Whether the current operators are neither recorded nor transformed."""
    return (
        not _is_transformed()
        and _tracing_state() is None
        and _dispatch_mode(_PROXY) is None
        and not (_is_compiling() and is_compiling())
    )


_saving_hooks = _symbol("torch._C._autograd._top_saved_tensors_default_hooks")


def is_eager() -> bool:
    """Whether operators go straight to PyTorch's kernels, function modes aside: no other mode,
    transform, forward-mode AD, tracer or hook on saved tensors is there, and no backward pass."""
    return (
        is_only_run()
        and not _dispatch_depth()
        and forward_ad._current_level < 0
        and _graph_task() == -1
        and _saving_hooks(True) is None
    )


# -- tensors ----------------------------------------------------------------

_require("torch.Tensor._version", "torch.Tensor._base", "torch.UntypedStorage._cdata")

_require("torch.Tensor._backward_hooks")
_set_versions = _symbol("torch._C._autograd._unsafe_set_version_counter")


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often a tensor counts as changed in place."""
    _set_versions((tensor,), (version,))


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether a backward pass to a tensor calls hooks on it, or keeps its gradient there."""
    # Those that run after an accumulation are not called where a pass returns the gradient.
    return bool(tensor._backward_hooks) or tensor.retains_grad


def random_state(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Functions that get and set the state of the generator of a device other than the CPU."""
    module = torch.get_device_module(device)
    return (
        functools.partial(module.get_rng_state, device),
        lambda state: module.set_rng_state(state, device),
    )


# These two are asked several times per operator: functions of C cost no Python frame.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor has been changed in place."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor of which another is a view; None for one that is no view."""

is_view: Callable[[torch.Tensor], bool] = _symbol("torch.Tensor._is_view")
"""Whether autograd treats a tensor as a view."""

shares_storage: Callable[[torch.Tensor, torch.Tensor], bool] = _symbol("torch._C._is_alias_of")

_use_count = _symbol("torch._C._storage_Use_Count")


def versions_of(tensors: Sequence[Any]) -> list[int | None]:
    """How often each tensor has been changed in place; None for an absent one, and for
    tensors of inference mode, which do not count it."""
    try:
        if len(tensors) == 1:
            # Half the time of the general form.
            return [tensors[0]._version]
        return [*map(version_of, tensors)]
    except (AttributeError, RuntimeError):
        return [
            None if tensor is None or tensor.is_inference() else version_of(tensor)
            for tensor in tensors
        ]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether others than `tensor` and what autograd has saved of it use its storage."""
    # One each for the tensor, for autograd, and for the storage object made here.
    return bool(_use_count(tensor.untyped_storage()._cdata) > 3)


_require("torch.nn.Module._parameters", "torch.nn.Module._buffers")

own_members: Callable[[torch.nn.Module], tuple[Mapping[str, Any], Mapping[str, Any]]] = (
    operator.attrgetter("_parameters", "_buffers")
)
"""The parameters and buffers of a module itself, by name; some may be None. ``parameters()`` goes
through six Python functions (2.13)."""


# -- operators --------------------------------------------------------------

OPERATORS_MODULE = "torch._ops"
"""The module of higher-order operators and of ``torch.ops``."""

OpOverload = _symbol("torch._ops.OpOverload")
OpOverloadPacket = _symbol("torch._ops.OpOverloadPacket")
getitem = operator.getitem

TENSOR_BASE = _symbol("torch._C.TensorBase")
BUILTIN_METHODS = (TENSOR_BASE, torch.Tensor)
BUILTIN_FUNCTIONS = tuple(
    _symbol(f"torch._C.{name}")
    for name in "_VariableFunctionsClass _nn _fft _linalg _special _sparse _nested".split()
)
"""Where PyTorch keeps the operators that are written in C++, of its own namespaces."""

VERSION = vars(TENSOR_BASE)["_version"]
"""The property behind :func:`version_of`, which the gate reads without an attribute lookup."""

OPERATOR_CLASSES = (
    OpOverload,
    _symbol("torch._ops.TorchBindOpOverload"),
    OpOverloadPacket,
    _symbol("torch._ops.HigherOrderOperator"),
)
"""The classes of operators whose ``__call__`` is written in Python."""

schemas_of: Callable[[str], list[Any]] = _symbol("torch._C._jit_get_schemas_for_operator")
"""The schemas of all overloads of ``aten::add`` or another operator."""


_is_dispatched = _symbol("torch._C._dispatch_has_kernel")
_has_kernel = _symbol("torch._C._dispatch_has_kernel_for_dispatch_key")


@functools.cache
def is_one_node(name: str) -> bool:
    """Whether autograd has a formula for all overloads of an operator of ATen, and so makes one
    node for it: no overload is made of other operators that have nodes of their own."""
    schemas = schemas_of(f"aten::{name}")
    names = [f"{s.name}.{s.overload_name}".rstrip(".") for s in schemas]
    # Some schemas are TorchScript's only (`aten::mul.left_t` repeats a list).
    names = [full for full in names if _is_dispatched(full)]
    # Those on lists of tensors have a node for each of them.
    if not names or name.startswith("_foreach_"):
        return False
    return not any(_has_kernel(full, "CompositeImplicitAutograd") for full in names)


_require("torch.ops.aten.add.Tensor._schema", "torch.ops.aten.add._qualified_op_name")


def namespace_of(operator_: Any) -> str:
    """The namespace of an operator of ``torch.ops``, or of one of its overloads: ``aten``."""
    packet = getattr(operator_, "overloadpacket", operator_)
    return cast(str, packet._qualified_op_name.partition("::")[0])


def is_registered(function: Any) -> bool:
    """Whether a function is an operator of ``torch.ops``, of which :func:`namespace_of` asks."""
    return isinstance(function, (OpOverload, OpOverloadPacket))


def schema_of(overload: Any) -> Any:
    """The schema of one of ``torch.ops``' overloads, such as ``torch.ops.aten.add.Tensor``."""
    return overload._schema


OVERRIDE_CHECKS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)
OVERRIDE_CHECKERS = (torch.functional, torch.nn.functional)
"""Modules of Python-level operators that ask these before they do their work."""

_require(*(f"{m.__name__}.{check}" for m in OVERRIDE_CHECKERS for check in OVERRIDE_CHECKS))
_require("torch.overrides.has_torch_function")


# -- autograd ---------------------------------------------------------------

_require(
    "torch.autograd._engine_run_backward",
    "torch._C._functions.AccumulateGrad._sequence_nr",
    "torch._C._functions.ExpBackward0._saved_result",
    "torch._C._FunctionBase.apply",
    "torch.utils.checkpoint.CheckpointFunction._backward_cls._forward_cls",
)

AUTOGRAD = torch.autograd
AUTOGRAD_ENGINE = "_engine_run_backward"
"""The function of `AUTOGRAD` that ``Tensor.backward``, ``autograd.backward`` and ``grad`` call."""

FUNCTION_BASE = _symbol("torch.autograd.function._SingleLevelFunction")
"""The class between ``autograd.Function`` and C, where ``Function.apply`` ends up,
also when it was bound to another name before."""

_require("torch.autograd.Function._register_hook")

REGISTER_HOOK = "_register_hook"
"""The function of ``torch.autograd.Function`` by which C puts a hook into a node's dict of hooks:
``(dict or None, hook) -> (dict, handle)``. The handle, an object of Python, takes most of the
1.4 us of ``register_prehook`` in 2.13."""


def sample_tensors() -> list[torch.Tensor]:
    """A leaf, and tensors that have autograd nodes of different classes."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.ones(2, requires_grad=True)
        product, constant = leaf * 2.0, torch.ones(2)
        total = torch.addcmul(product, leaf, product)
        parts = torch.stack([total, constant, product]).unbind()
        return [leaf, product, total, parts[0], parts[1] - parts[2], torch.cat([*parts, product])]


def sample_nodes() -> list[Any]:
    """Some autograd nodes of different classes, by which the gate finds out where nodes keep their
    numbers and their edges."""
    return [tensor.grad_fn for tensor in sample_tensors()[1:]]


def native_tensors() -> tuple[Any, ...] | None:
    """How the gate finds the nodes of tensors: the arguments of its ``configure_tensors()``; None
    where a library exports it no more.

    The first function gives the node that was set last, without making that of a view anew, which
    may raise (``torch/csrc/autograd/variable.h``).
    """
    names = (
        "_ZN5torch8autograd4impl14grad_fn_unsafeERKN2at6TensorE",
        (
            "_ZN5torch8autograd18functionToPyObjectERKN3c1013intrusive_ptrINS0_4NodeENS1_6detail"
            "34intrusive_target_default_null_typeIS3_EEEE"
        ),
    )
    try:
        library = ctypes.CDLL(torch._C.__file__)
        functions = tuple(
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names
        )
    except (OSError, AttributeError):
        return None
    tensors = sample_tensors()
    return tensors, [tensor._cdata for tensor in tensors], functions


_parse_key = _symbol("torch._C._dispatch_key_parse")

_PLAIN_KEYS = ("CUDA", "AutocastCUDA")
"""Those that plain tensors of other devices than the processor have, which need not be there."""


def native_shapes() -> tuple[Any, ...] | None:
    """How the gate finds the sizes of tensors: the arguments of its ``configure_shapes()``; None
    where PyTorch does not tell dispatch keys.

    Tensors that have others, as those of transforms and of sparse and nested layouts, may keep
    their sizes elsewhere (``c10/core/TensorImpl.h``).
    """
    with torch.inference_mode(mode=False):
        tensors = [torch.ones(()), torch.ones(7), torch.ones(1, 2, 3, 4, 5), torch.ones(6, 3).T]
        tensors.append(torch.nn.Parameter(torch.ones(3, 0, 2)))
    with torch.inference_mode():
        tensors.append(torch.ones(8, 9))
    keys_of = _find("torch._C._dispatch_keys")
    try:
        keys = [keys_of(tensor).raw_repr() for tensor in tensors]
        others = [torch._C.DispatchKeySet(_parse_key(name)).raw_repr() for name in _PLAIN_KEYS]
    except (AttributeError, TypeError, RuntimeError):
        return None
    plain = functools.reduce(operator.or_, [*keys, *others])
    return tensors, [tensor._cdata for tensor in tensors], keys, plain


_DISPATCH_KEYS = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Tracer")
"""Those that are on wherever :data:`_is_transformed` or :data:`_tracing_state` finds something."""


def native_functions() -> tuple[Any, ...] | None:
    """What the gate calls in C++, since the bindings for Python take longer than all that it does
    itself: the arguments of its ``configure_native()``; None where a library exports it no more.

    All are functions that take and return numbers.
    """
    names = (
        "_ZN2at15sequence_number4peekEv",
        "_ZN5torch8autograd25get_current_graph_task_idEv",
        "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
        "_ZN3c108GradMode10is_enabledEv",
    )
    try:
        library = ctypes.CDLL(torch._C.__file__)
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
        keys = tuple(int(_parse_key(name)) for name in _DISPATCH_KEYS)
    except (OSError, AttributeError, RuntimeError):
        return None
    level = (vars(forward_ad), "_current_level")
    checks, plain = (_compiling_asked,), (_compiling_asked, level)
    return tuple(addresses), keys, _dispatch_depth, checks, plain, torch.autograd.Function


def native_hooks() -> tuple[Any, ...] | None:
    """How the gate finds what autograd calls the hooks of nodes by: the arguments of its
    ``configure_hooks()``; None where a library exports it no more.

    The order of the virtual functions of both classes of hooks was compared in the headers of
    PyTorch 2.13, 2.14 and 2.15 (``torch/csrc/autograd/function_hook.h``).
    """
    try:
        library = ctypes.CDLL(torch._C.__file__)
        types, undefined = (
            [ctypes.addressof(ctypes.c_char.in_dll(library, name)) for name in names]
            for names in (
                [
                    "_ZTIN5torch8autograd15FunctionPreHookE",
                    "_ZTIN5torch8autograd16FunctionPostHookE",
                ],
                ["_ZN3c1019UndefinedTensorImpl10_singletonE"],
            )
        )
        # As the dynamic linker looks for it: a program may bring an allocator of its own.
        try:
            process = ctypes.CDLL(None)
            allocator = process._Znwm, process._ZdlPv
        except AttributeError:
            allocator = library._Znwm, library._ZdlPv
    except (OSError, AttributeError, ValueError):
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in allocator]
    return tuple(types), undefined[0], tuple(addresses)


FUNCTION_NODE = _symbol("torch.autograd.function.BackwardCFunction")
"""The class of the nodes that ``autograd.Function``s make."""

FUNCTION_NODE_BOXED = "apply_boxed"
"""The method of `FUNCTION_NODE` by which autograd runs functions that AOTAutograd has compiled."""

FUNCTORCH_FUNCTION: Any = _symbol("torch.autograd.function.custom_function_call")
"""The operator that ``autograd.Function.apply`` calls under a functorch transform."""

HOOK_FUNCTION = _symbol("torch.nn.modules._functions.BackwardHookFunction")
"""An identity by which ``nn.Module`` carries its full backward hooks."""

sequence_number: Callable[[], int] = _symbol("torch._C._autograd._get_sequence_nr")
"""The number that the next autograd node of this thread will have."""


node_sequence: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The sequence number of an autograd node. A function of C: it is asked of each node."""

current_node: Callable[[], Any] = _symbol("torch._C._current_autograd_node")
"""The autograd node that a backward pass runs in this thread, its hooks included."""


_require("torch.autograd.graph.Node._input_metadata")


class GradientMetadata(NamedTuple):
    """The shape of a gradient, None for a nested one, with its element type and device."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


def produced_gradients(node: Any) -> list[GradientMetadata | None]:
    """What an autograd node is to produce, as the nodes say that take it; None where none does."""
    found: list[GradientMetadata | None] = []
    for following, number in node.next_functions:
        if following is None:
            found.append(None)
            continue
        taken = following._input_metadata[number]
        try:
            shape = tuple(taken.shape)
        except RuntimeError:
            shape = None
        found.append(GradientMetadata(shape, taken.dtype, taken.device))
    return found


def saves_result(node: Any) -> bool:
    """Whether an autograd node keeps its operator's result for the backward pass."""
    return hasattr(node, "_saved_result")


def is_compiled_backward(node: Any) -> bool:
    """Whether a node runs the backward pass of code that a compiler has made."""
    # It is the only name that 2.13 gives to it.
    return str(node.name()) == "CompiledFunctionBackward"


def stands_for_leaf(node: Any) -> bool:
    """Whether a node is what a compiler gives to an input of a graph that it traces (2.13)."""
    return str(node.name()).rpartition("::")[2] == "Error"


def node_class(function: type[torch.autograd.Function]) -> Any:
    """The class of the nodes that an ``autograd.Function`` makes."""
    return getattr(function, "_backward_cls", None)


def forward_class(node: Any) -> Any:
    """The ``autograd.Function`` that a Python node belongs to, None for a builtin one."""
    return getattr(node, "_forward_cls", None)


FUNCTIONS = torch.autograd.function
FUNCTION_DEFAULTS = "_bind_default_args"
FUNCTION_TRANSFORM = "_call_custom_function_call"
"""What the ``Function.apply`` of C asks Python for: the positional arguments with their defaults,
for functions with a ``setup_context``; and the whole call, under a functorch transform."""

FUNCTIONS_ENTER_IN_C = not isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
"""Whether ``Function.apply`` is a function of C, as it is since 2.14; before, it is Python's."""

if FUNCTIONS_ENTER_IN_C:
    _require(*(f"{FUNCTIONS.__name__}.{name}" for name in (FUNCTION_DEFAULTS, FUNCTION_TRANSFORM)))
    _TRANSFORM = _symbol("torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode")
    _include_key = _symbol("torch._C._dispatch_tls_set_dispatch_key_included")


def bind_defaults(forward: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of an ``autograd.Function`` with its defaults, as two values."""
    bind = signature_of(forward).bind(*args, **(kwargs or {}))
    bind.apply_defaults()
    return bind.args, bind.kwargs


class Entering(threading.local):
    """The call of an ``autograd.Function`` that is on its way through PyTorch's C code.

    Attributes:
        vanilla: the call is the driver's own and goes on as it is.
    """

    vanilla = False
    _diverted = False

    def take_vanilla(self) -> bool:
        """Whether the call is the driver's own; asked once per call."""
        found, self.vanilla = self.vanilla, False
        return found

    def divert(self) -> None:
        """Make C believe that a functorch transform is active, so that it hands the call over."""
        self._diverted = True
        _include_key(_TRANSFORM, True)

    def take_diverted(self) -> bool:
        """Whether the call was diverted; C sees the truth again."""
        found, self._diverted = self._diverted, False
        if found:
            _include_key(_TRANSFORM, False)
        return found


ENTERING = Entering()


def apply_function(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """``cls.apply(*args)`` without PyTorch's Python layer and without our interception."""
    ENTERING.vanilla = FUNCTIONS_ENTER_IN_C
    try:
        return _function_apply().__get__(None, cls)(*args, **kwargs)
    finally:
        # It is still there where nothing was patched.
        ENTERING.vanilla = False


@functools.cache
def _function_apply() -> Any:
    return vars(torch._C._FunctionBase)["apply"]


# -- modules, checkpoints, tracers ------------------------------------------

_require("torch.nn.Module._call_impl")

FUSED_OPERATORS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_nested_")
"""The beginnings of the names of operators that modules of ``torch.nn`` run in their fast paths."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks; only its instances have these attributes."""


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run before or after the forward pass of a module, or of one below it."""
    return any(vars(below).get(name) for below in module.modules() for name in _HOOKS)


_OWN_HOOKS = (*_HOOKS, *_BACKWARD_HOOKS)


def has_own_hooks(module: torch.nn.Module) -> bool:
    """Whether a module itself has hooks, on its forward or its backward pass."""
    attributes = vars(module)
    for name in _OWN_HOOKS:  # noqa: SIM110 - at each call of a module: a generator would cost frames
        if attributes.get(name):
            return True
    return False


_GLOBAL_HOOKS = [
    f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")
]
_require(*(f"torch.nn.modules.module.{name}" for name in _GLOBAL_HOOKS))


def has_global_hooks() -> bool:
    """Whether there are hooks on all modules, which Dynamo would capture with a model."""
    hooks = vars(torch.nn.modules.module)
    for name in _GLOBAL_HOOKS:  # noqa: SIM110 - likewise
        if hooks.get(name):
            return True
    return False


SWAPPING, SWAPPING_REFERENCES = torch.utils, "weakref"
"""The module of ``swap_tensors``, by which modules change the type of parameters that are of a
subclass, and where it asks whether there are weak references to one: it refuses those (2.13)."""

_require(f"{SWAPPING.__name__}.{SWAPPING_REFERENCES}")

CHECKPOINT = torch.utils.checkpoint
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(CHECKPOINT, CHECKPOINT_GENERATOR + "_impl"):
    # Since 2.14 checkpoint() calls this one, and so does the other.
    CHECKPOINT_GENERATOR += "_impl"
_require(
    f"{CHECKPOINT.__name__}.{CHECKPOINT_GENERATOR}", "torch.utils.checkpoint.CheckpointFunction"
)
MODULE_CALL = _symbol("torch.nn.Module._wrapped_call_impl")
"""``nn.Module.__call__`` as PyTorch defines it."""

_require("torch.nn.Module._call_impl", "torch.nn.Module._compiled_call_impl")
COMPILED_CALL = operator.attrgetter("_compiled_call_impl")
PLAIN_CALL = operator.attrgetter("_call_impl")
"""The methods of which `MODULE_CALL` calls one: the first unless it is None. Called directly they
save its Python frame, so that modules can be nested as deep as without our own (PyTorch 2.13)."""

PROFILER = "torch.autograd.profiler"
PROFILER_START = "_enable_profiler"
"""The function of `PROFILER` at whose first call with stacks PyTorch's profiler reads, for the rest
of the process, the code of ``nn.Module.__call__``. It tells calls of modules by their frame, and
takes what is called ``self`` in it for the module (2.13)."""


class _Reached(Exception):
    pass


class _NoModule:
    """What `MODULE_CALL` takes for a module that raises."""

    _compiled_call_impl = None

    def _call_impl(self) -> None:
        raise _Reached

    def __repr__(self) -> str:
        return "(see the next frame)"


_NO_MODULE: Any = _NoModule()


def add_call_frame(error: BaseException) -> None:
    """Put the frame of `MODULE_CALL`, where it was left out, into the traceback of an exception.

    To be called by the function that has left it out. Programs and people know a traceback by its
    frames. A frame can only be had from a call.
    """
    entry, made = error.__traceback__, None
    try:
        MODULE_CALL(_NO_MODULE)
    except RecursionError:
        # There is none left for it.
        pass
    except _Reached as reached:
        made = reached.__traceback__ and reached.__traceback__.tb_next
        if entry is not None and made is not None:
            following = entry.tb_next
            place = made.tb_lasti, made.tb_lineno
            entry.tb_next = types.TracebackType(following, made.tb_frame, *place)
            del following
    finally:
        # The frame leads back to this one, which is to hold nothing then.
        del error, entry, made


FX = "torch.fx._symbolic_trace"
FX_TRACE = "Tracer.trace"
FX_MODULE_CALL = "_orig_module_call"
"""What `FX` takes for the ``nn.Module.__call__`` of PyTorch. While one thread traces, the modules
that others call are called by it."""
_require(f"{FX}.{FX_MODULE_CALL}", f"{FX}.Tracer.trace")

_TRACE: types.CodeType = torch.fx.Tracer.trace.__code__


def threads_in(*codes: types.CodeType) -> Sequence[int]:
    """The threads that trace with `FX` or run one of these functions, once for each call."""
    found = []
    for thread, frame in sys._current_frames().items():
        caller: types.FrameType | None = frame
        while caller is not None:
            if caller.f_code is _TRACE or caller.f_code in codes:
                found.append(thread)
            caller = caller.f_back
    return found


SCRIPT_FUNCTION = torch.jit.ScriptFunction

TRACERS = {
    "torch.export._trace": ("_export",),
    "torch.fx.experimental.proxy_tensor": ("_MakefxTracer.trace",),
    "torch.jit._trace": ("_trace_impl", "trace_module"),
    "torch.jit": ("trace_module",),
    "torch.jit._script": ("_script_impl",),
}
"""Where PyTorch's tracers begin, also when their entry point was bound to another name.

They are looked for when their module is imported; a warning names one that is missing."""

COMPILER = "torch._dynamo"
COMPILER_MODULE = "torch._dynamo.eval_frame"
COMPILER_CALLBACK = "_callback_from_stance"
"""The function of `COMPILER_MODULE` that Dynamo asks, at each call of a compiled function, for the
compiler to use: None runs the function eagerly."""

COMPILER_MODES = "utils.set_torch_function_mode_stack"
"""The function in `COMPILER` by which captured code sets the function modes of its thread, where it
has entered or left one, to those that were on when it was captured, and the changes."""

COMPILER_CAPTURES = {"optimize": "guard_export_fn", "optimize_assert": "export"}
"""The functions of `COMPILER_MODULE` by which ``torch._dynamo.explain`` and ``export`` capture a
function, with the keyword that tells their calls from those of ``torch.compile``."""

COMPILER_MODULES = "torch._dynamo.variables.nn_module"
COMPILER_MODULE_CALL = "unpatched_nn_module_call"
"""The ``nn.Module.__call__`` in `COMPILER_MODULES` that Dynamo looks through, to ``forward``. It
captures the code of any other one."""

MADE_MODULE = "made"
"""In the place of an expression that leads to a module, for one that the captured code makes."""


class _Made:
    """What Dynamo asks for the expression that leads to a module."""

    name = MADE_MODULE


@torch.fx.node.has_side_effect
def module_mark(call: int, is_exit: bool, tensors: Sequence[Any]) -> None:
    """Stands in a captured graph where a module is called, and where it returns.

    Args:
        call: the same number at both places, and at no other one of the graph.
        tensors: those that the module is given, or has returned.
    """


class _Marks:
    """Has Dynamo write :func:`module_mark` into what it captures; to be used with Dynamo's lock.

    Attributes:
        is_on: whether it does.
        refused: why what it has captured cannot be marked; "" if it can.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.refused = ""
        self.calls: list[_MarkedCall] = []

    def note_stack(self, tx: Any, module: Any) -> None:
        """Dynamo has noted the call of a module for the nodes that follow."""
        call = self.calls[-1] if self.calls else None
        if self.is_on and call is not None and call.module is module and call.entry is None:
            call.begin(tx)


class _MarkedCall:
    """A call of a module that Dynamo captures.

    Attributes:
        module: it.
        entry: the node of its mark; None before it is written.
    """

    def __init__(self, module: Any, given: Sequence[Any]) -> None:
        self.module = module
        self._given = given
        self.entry: Any = None

    def begin(self, tx: Any) -> None:
        """Write the mark of its entry, among whose modules this one is by now."""
        self.entry = self._write(tx, next(_MARK_NUMBERS), False, self._given)

    def end(self, tx: Any, result: Any) -> None:
        """Write that of its exit, which is in the module, too."""
        stack = None if self.entry is None else self.entry.meta.get("nn_module_stack")
        if stack is None:
            MODULE_MARKS.refused = "a module is called of which Dynamo notes no calls"
            return
        node = self._write(tx, self.entry.args[0], True, [result])
        node.meta["nn_module_stack"] = dict(stack)

    def _write(self, tx: Any, number: int, is_exit: bool, values: Sequence[Any]) -> Any:
        proxies: list[Any] = []
        try:
            for value in values:
                proxies += _proxies_in(tx, value)
        except Exception as error:
            MODULE_MARKS.refused = (
                f"a module takes or gives what Dynamo says nothing of ({type(error).__name__})"
            )
        args = number, is_exit, proxies
        return tx.output.create_proxy("call_function", module_mark, args, {}).node


_MARK_NUMBERS = itertools.count()
MODULE_MARKS = _Marks()


def _proxies_in(tx: Any, value: Any) -> list[Any]:
    """The tensors in a value that Dynamo captures, as a module is given or gives them.

    In the order of :func:`amanda_torch.operators.calls.tensors_in`.
    """
    value = value.realize() if hasattr(value, "realize") else value
    kind = value.python_type()
    if issubclass(kind, torch.Tensor):
        return [value.as_proxy()]
    items: Sequence[Any] = ()
    if issubclass(kind, (list, tuple)):
        items = value.unpack_var_sequence(tx)
    elif issubclass(kind, Mapping):
        items = value.call_method(tx, "values", [], {}).unpack_var_sequence(tx)
    elif dataclasses.is_dataclass(kind):
        # 2.15 has the first of the two, 2.13 the second.
        get = getattr(value, "tp_getattro_impl", None) or value.var_getattr
        items = [get(tx, field.name) for field in dataclasses.fields(kind)]
    return [proxy for item in items for proxy in _proxies_in(tx, item)]


def _noting_calls(vanilla: Any) -> Any:
    """Dynamo's capture of a module's call, which also notes calls of modules that code makes."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.source and not MODULE_MARKS.is_on:
            return vanilla(self, tx, args, kwargs)
        if not MODULE_MARKS.is_on:
            with _record_call(tx, self.value):
                return vanilla(self, tx, args, kwargs)
        call = _MarkedCall(self.value, [*args, *kwargs.values()])
        MODULE_MARKS.calls.append(call)
        try:
            result = vanilla(self, tx, args, kwargs)
        finally:
            MODULE_MARKS.calls.pop()
        call.end(tx, result)
        return result

    return call_function


def _noting_stacks(vanilla: Any) -> Any:
    """Dynamo's note of a module's call for the nodes within, which are marked if that is wanted."""

    @contextmanager
    def record_nn_module_stack(key: str, source: Any, tx: Any, module: Any) -> Iterator[None]:
        with vanilla(key, source, tx, module):
            MODULE_MARKS.note_stack(tx, module)
            yield

    return record_nn_module_stack


def _noting_loss(vanilla: Any) -> Any:
    """Dynamo's capture of ``nn.CrossEntropyLoss(...)``, for which it makes a function."""

    def call_cross_entropy_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        MODULE_MARKS.refused = "it makes a module"
        variable = vanilla(self, tx, args, kwargs)
        compute, loss = variable.fn, torch.nn.CrossEntropyLoss()

        def compute_within(*args: Any, **kwargs: Any) -> Any:
            with _record_call(tx.output.current_tx, loss):
                return compute(*args, **kwargs)

        variable.fn = compute_within
        return variable

    return call_cross_entropy_loss


def _record_call(tx: Any, module: torch.nn.Module) -> AbstractContextManager[Any]:
    record: Any = vars(sys.modules[COMPILER_MODULES])["record_nn_module_stack"]
    return cast(AbstractContextManager[Any], record(str(id(module)), _Made, tx, module))


COMPILER_NOTES: dict[str, dict[str, Callable[[Any], Any]]] = {
    COMPILER_MODULES: {
        "UnspecializedNNModuleVariable.call_function": _noting_calls,
        "record_nn_module_stack": _noting_stacks,
    },
    "torch._dynamo.variables.user_defined": {
        "UserDefinedClassVariable._call_cross_entropy_loss": _noting_loss
    },
}
"""What to wrap, where it is there, for Dynamo to note all calls of modules with what it captures.

Of itself it leaves out those of modules to which no expression leads: ``nn.CrossEntropyLoss()`` in
a forward (2.13)."""

FRAMES_UP = "_frames_up"
"""The parameter of a tracer that says how many Python frames are between it and the program."""

COMPILED_MODULE = "_orig_mod"
"""Where a module compiled with ``torch.compile`` keeps the module itself."""
COMPILED_MODULE_SETUP = "OptimizedModule._initialize"
"""The method that binds the call of the module that is compiled."""


# -- the compiler -----------------------------------------------------------

_HANDLERS = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers"
_COMPILER.extend(
    (
        _HANDLERS,
        "torch._dynamo.lookup_backend",
        "torch._subclasses.FakeTensor",
        "torch._dynamo.source.LocalSource",
        "torch._dynamo.convert_frame.catch_errors_wrapper",
        "torch._dynamo.convert_frame.convert_frame",
        "torch._dynamo.convert_frame.convert_frame_assert",
        "torch._dynamo.convert_frame.compile_lock",
        "torch._dynamo.convert_frame.input_codes",
        "torch._dynamo.hooks.Hooks",
        "torch._dynamo.types.ConvertFrameReturn",
        "torch._dynamo.variables.torch.tracing_state_functions",
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "torch._ops.HigherOrderOperator",
        "torch.utils._pytree.tree_map",
    )
)


def look_up_handlers() -> None:
    """Let Dynamo look up the functions of PyTorch that it evaluates itself, among them the checks
    for overrides. It does so once per process, and takes what it finds in their places."""
    handlers = _find(_HANDLERS)
    if handlers is not _ABSENT:
        handlers()


_MODE_GUARDS = frozenset({"TORCH_FUNCTION_STATE"})
"""The guards by which Dynamo compiles anew under other function modes."""


_VANILLA_CHECKS = [getattr(torch.overrides, check) for check in OVERRIDE_CHECKS]

_OURS = f"{__package__}."
"""What the modules of the functions begin with that take the place of PyTorch's."""
_OUR_GLOBALS = f"G['__import_{_OURS.replace('.', '_dot_')}"
"""The globals of these modules, as they are named in guards."""


def _without_guards_of_ours(entries: Sequence[Any]) -> Sequence[bool]:
    # Nor by the checks and the call of modules that the driver replaces, which Dynamo looks into
    # where a module has hooks, nor by what is asked in them, of which something is another where
    # the code runs: it would be captured at each call.
    return [
        entry.guard_type not in _MODE_GUARDS
        and not entry.name.startswith(_OUR_GLOBALS)
        and not str(getattr(entry.value, "__module__", None)).startswith(_OURS)
        and not any(entry.value is check for check in (*_VANILLA_CHECKS, MODULE_CALL))
        for entry in entries
    ]


class _Refused(set[type[Any]]):
    """Stands for the classes of tensors that Dynamo does not look into, of which it asks for each
    tensor of a subclass before it reads one: it is told of no answer, but of an error."""

    def __init__(self, refuse: Callable[[type[Any]], Any]) -> None:
        super().__init__()
        self._refuse = refuse

    def __contains__(self, cls: Any) -> bool:
        self._refuse(cls)
        return False


def frame_converter(
    backend: Callable[..., Any],
    eager: bool = False,
    marks: bool = False,
    refuse: Callable[[type[Any]], Any] | None = None,
) -> Callable[..., Any]:
    """Dynamo's own callback for frames, which hands captured graphs to `backend`.

    What it captures is used under any function modes: whoever lets it capture takes care of them.

    Args:
        eager: capture code that nobody has compiled: as one graph or not at all, as it runs where
            it is not compiled, and with all guards.
        refuse: called with the class of each tensor of a subclass that a frame uses, before
            anything is read of it; an error of it ends the attempt.
    """
    from torch._dynamo import config, convert_frame, hooks

    own = hooks.Hooks(guard_filter_fn=_without_guards_of_ours)
    if eager:
        inner: Any = convert_frame.convert_frame_assert(backend, one_graph=True)
    else:
        inner = convert_frame.convert_frame(backend, own)
    convert: Callable[..., Any] = convert_frame.catch_errors_wrapper(inner, own)
    # Else it makes tensors of floats that change, in code around the graph.
    options: dict[str, Any] = {"specialize_float": True, **(_EAGER_CAPTURE if eager else {})}
    # The program's wishes are for what it compiles; ours runs as it is where there is a limit.
    wishes = ("error_on_recompile", "fail_on_recompile_limit_hit")
    # Two calls at each run, by which profilers are told of the code before a graph (2.13).
    marks_of_profilers = ("record_runtime_overhead",)
    names = (*wishes, *marks_of_profilers)
    options.update((name, False) for name in names if hasattr(config, name))
    if refuse is not None:
        options["nontraceable_tensor_subclasses"] = _Refused(refuse)

    def converter(*args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(convert_frame.compile_lock)
            stack.enter_context(config.patch(options))
            if eager:
                stack.enter_context(_told_not_compiled())
                stack.enter_context(_fakes_uncached())
                stack.enter_context(_errors_unlogged())
                # Dynamo looks at `grad` of the inputs, for one, of which PyTorch warns.
                stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(_transforms_as_they_were())
            stack.enter_context(_marked(marks))
            return convert(*args)

    setattr(converter, FRAME_CALLBACK_OF, convert)
    return converter


@contextmanager
def _marked(marks: bool) -> Iterator[None]:
    """Whether Dynamo writes marks of modules."""
    # What it captures within, as for a higher-order operator, has others.
    outer = vars(MODULE_MARKS).copy()
    try:
        vars(MODULE_MARKS).update(is_on=marks, refused="", calls=[])
        yield
    finally:
        vars(MODULE_MARKS).update(outer)


_transform_depth = _symbol("torch._C._functorch.get_dynamic_layer_stack_depth")
_leave_transforms = _symbol("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth")


@contextmanager
def _transforms_as_they_were() -> Iterator[None]:
    """Leave the functorch transforms that Dynamo has entered where it gives up (2.13)."""
    depth = _transform_depth()
    try:
        yield
    finally:
        if _transform_depth() != depth:
            _leave_transforms(depth)


_EAGER_CAPTURE = {
    # It would compute with torch what the program computes with NumPy.
    "trace_numpy": False,
    "optimize_ddp": False,
    # Both leave guards out, by default: hooks that are added to a module, and `Tensor.data` that
    # becomes another one (as in `Module.double()`), would not be noticed.
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
}
"""Dynamo's settings where it captures code that nobody has compiled."""


_TOLD_COMPILED = "transformers."
"""The package whose code is told the truth. 5.23 keeps a context variable, which Dynamo cannot
capture, and an attribute instead where it is compiled; it looks at values for warnings and for
attention masks that it could leave out, and does not where it is compiled. Where that makes a
difference, the operators are others than those of eager mode."""


@contextmanager
def _errors_unlogged() -> Iterator[None]:
    """Log no errors of operators meanwhile: the module then runs as it is, and raises them.

    PyTorch 2.13 logs a traceback of each operator whose inputs do not fit; to be used with
    Dynamo's lock."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


_ASKING_FOR_OTHERS = frozenset({"transformers.utils.import_utils"})
"""Modules whose functions ask for their callers."""

_TRACERS_STATE = "tracing_state_functions"


class _EagerAnswers(dict[Any, Any]):
    """What code is told that asks whether it is compiled: no, as in eager mode."""

    def __getitem__(self, question: Any) -> Any:
        answer = super().__getitem__(question)
        if answer is not True:
            return answer
        # Dynamo's descriptions of the function that asks, and of those that call it.
        asking = sys._getframe(1).f_locals.get("tx")
        while asking is not None and asking.f_globals.get("__name__") in _ASKING_FOR_OTHERS:
            asking = asking.parent
        name = "" if asking is None else str(asking.f_globals.get("__name__"))
        return name.startswith(_TOLD_COMPILED)


@contextmanager
def _told_not_compiled() -> Iterator[None]:
    """Code that Dynamo captures meanwhile runs as in eager mode; to be used with Dynamo's lock."""
    from torch._dynamo.variables import torch as variables

    vanilla = getattr(variables, _TRACERS_STATE)
    answers = _EagerAnswers(vanilla())
    setattr(variables, _TRACERS_STATE, lambda: answers)
    try:
        yield
    finally:
        setattr(variables, _TRACERS_STATE, vanilla)


@contextmanager
def _fakes_uncached() -> Iterator[None]:
    """What PyTorch keeps of operators on tensors without values is dropped with the capture; to be
    used with Dynamo's lock.

    Its table is one for the process and has no end (2.13): with symbolic sizes each capture would
    leave its own, and all that these sizes lead to.
    """
    modes = torch._subclasses.fake_tensor.FakeTensorMode
    kept = modes.cache
    modes.cache = {}
    try:
        yield
    finally:
        modes.cache = kept


_REGIONS = 1 << 40
"""Where the numbers of our regions begin: Dynamo counts its own up from 0."""


def count_captures_apart() -> None:
    """Have Dynamo count what it captures in the present call of a compiled function by itself.

    The code that it has captured counts towards ``recompile_limit`` and ``error_on_recompile`` by
    regions, one for each function compiled with ``isolate_recompiles`` and one for all others
    (2.13). It sets the region before it asks for the frame callback, and resets it afterwards.
    """
    set_region = _region_setter()
    if set_region is not _ABSENT:
        region = set_region(_REGIONS)
        if region < _REGIONS:
            set_region(_REGIONS + 1 + region)


@functools.cache
def _region_setter() -> Any:
    # Asked for by Dynamo, which is imported then.
    return _find("torch._C._dynamo.eval_frame.set_eval_frame_isolate_recompiles_id")


@contextmanager
def captures_uncounted() -> Iterator[None]:
    """What Dynamo does meanwhile is not in the counters that programs read; to be used with
    Dynamo's lock."""
    counters = _find("torch._dynamo.utils.counters")
    if counters is _ABSENT:
        yield
        return
    before = {name: dict(found) for name, found in counters.items()}
    try:
        yield
    finally:
        for name in list(counters):
            if name not in before:
                del counters[name]
                continue
            counters[name].clear()
            counters[name].update(before[name])


FRAME_CALLBACK_OF = "_torchdynamo_orig_backend"
"""The attribute of a frame callback that leads Dynamo, step by step, to its compiler: the code that
it has captured with one compiler is not run with another one."""


def compiler_of(callback: Any) -> Any:
    """The compiler that a frame callback hands its graphs to."""
    while hasattr(callback, FRAME_CALLBACK_OF):
        callback = getattr(callback, FRAME_CALLBACK_OF)
    return callback


def not_captured(*, recursive: bool = False, always: bool = False) -> Any:
    """What a frame callback returns for a frame that is to run as it is.

    Args:
        recursive: whether the functions that it calls run as they are, too.
        always: whether all later frames of its code do, under any callback; else this once.
    """
    from torch._C._dynamo import eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    actions = eval_frame._FrameAction
    inner = actions.SKIP if recursive else actions.DEFAULT
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, inner)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=always)


def has_reached_limit(converted: Any) -> bool:
    """Whether Dynamo has given a frame up because its code was captured too often."""
    from torch._C._dynamo import eval_frame

    strategy = getattr(converted, "frame_exec_strategy", None)
    return strategy is not None and strategy.cur_action == eval_frame._FrameAction.RUN_ONLY


def is_unsupported(error: BaseException) -> bool:
    """Whether an error of Dynamo says what of a function it cannot take."""
    return isinstance(error, torch._dynamo.exc.Unsupported)


def not_taken() -> dict[str, int]:
    """What Dynamo could not take, each with how often; empty with a PyTorch that does not count it.

    PyTorch 2.13 counts the explanations that ``torch._dynamo.explain`` and its logs show.
    """
    counters = _find("torch._dynamo.utils.counters")
    return {} if counters is _ABSENT else dict(counters["unimplemented"])


def is_layer_called_as_is(frame: Any) -> bool:
    """Whether a frame is that of a recurrent layer which the code made by Dynamo calls as it is.

    PyTorch 2.15 breaks the graph before such a layer and counts no reason for the layer's frame;
    2.13 and 2.14 leave the function alone that calls it, and count why.
    """
    from torch._dynamo import config

    layer = frame.f_locals.get("self")
    return (
        _VERSION >= (2, 15)
        and isinstance(layer, _RECURRENT)
        and frame.f_code is getattr(type(layer).forward, "__code__", None)
        and not config.allow_rnn
    )


_RECURRENT = (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)
_VERSION: Any = torch.__version__


def runs_higher_order(frame: Any) -> bool:
    """Whether a frame is of a function by which PyTorch runs a higher-order operator eagerly.

    ``torch.cond`` and its like have Dynamo capture a function that calls the operator, whose
    gradients want what Dynamo makes of the branches: functions that return tuples (2.13).
    """
    function = frame.f_locals.get("fn")
    names = frame.f_globals.get("__name__"), getattr(function, "__module__", None)
    return any(str(name).startswith("torch._higher_order_ops.") for name in names)


def captured_alone(found: Any) -> Any:
    """What a frame callback returns for captured code, when functions that this calls run as they
    are: Dynamo asks nothing about their frames, which would cost microseconds for each."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    actions = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(actions.DEFAULT, actions.SKIP)
    return ConvertFrameReturn(
        frame_exec_strategy=strategy, apply_to_code=True, guarded_code=found.guarded_code
    )


def call_captured(callback: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as Dynamo captures it.

    Args:
        callback: what Dynamo asks about frames.
    """
    from torch._C._dynamo import eval_frame

    before = eval_frame.set_eval_frame(callback)
    try:
        return function(*args)
    finally:
        eval_frame.set_eval_frame(before)


def guards_of(found: Any) -> weakref.ref[Any]:
    """The guards of what a frame callback has captured."""
    return weakref.ref(found.guarded_code.guard_manager)


def forget_captured(
    code: types.CodeType,
    guards: Sequence[weakref.ref[Any]],
    loaded: dict[str, Any] = sys.modules,
) -> None:
    """Drop what Dynamo has captured of some code, which keeps the callback that it was captured by.

    That is memory of C++: the garbage collector finds no cycle through it. Guards are kept by each
    module, class and function that they name, such as ``torch.nn.functional``, for Dynamo is to be
    told when one of these is gone (2.13): they are emptied.

    Args:
        code: the code.
        guards: those of all that was captured of it.
        loaded: the loaded modules; at the end of the process nothing else leads to them.
    """
    eval_frame = loaded.get("torch._C._dynamo.eval_frame")
    if eval_frame is not None:
        eval_frame.reset_code(code)
    for reference in guards:
        guard = reference()
        if guard is not None:
            vars(guard).clear()
            # Looked at where one of these is gone.
            guard.cache_entry = guard.extra_state = None


class Uncompiled:
    """Has what is left of a compiled function, in the current thread, run as it is.

    It is Dynamo's frame callback meanwhile: whether it still is tells whether that function has
    ended.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def __call__(self, frame: Any, *args: Any) -> Any:
        """Leave a frame alone."""
        return not_captured(recursive=True)

    def begin(self) -> None:
        """Do so from now on."""
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        if eval_frame is None:
            return
        before = eval_frame.set_eval_frame(None)
        if before is not None:
            self._before = before
            eval_frame.set_eval_frame(self)

    def end(self) -> None:
        """Do so no longer; harmless when called twice, or after the compiled function."""
        before, self._before = self._before, None
        if before is not None:
            from torch._C._dynamo import eval_frame

            now: Any = eval_frame.set_eval_frame(None)
            eval_frame.set_eval_frame(before if now is self else now)


def is_compiled_code(code: Any) -> bool:
    """Whether Dynamo has met some code since it was last reset."""
    from torch._dynamo import convert_frame

    return code in convert_frame.input_codes


_AROUND_GRAPHS = (COMPILER_MODULE, "torch._dynamo.output_graph")
"""The modules of Dynamo whose functions stand around a graph; of the second one where a graph holds
operators that a ``__torch_function__`` of the program has called (2.13)."""


def program_frame() -> Any:
    """The frame of the program that runs a captured graph, asked for by a method of what Dynamo
    calls, which calls this."""
    frame: Any = sys._getframe(3)
    while frame.f_globals.get("__name__") in _AROUND_GRAPHS:
        frame = frame.f_back
    return frame


def is_higher_order(function: Any) -> bool:
    """Whether the function of a graph's node has graphs among its arguments."""
    return isinstance(function, torch._ops.HigherOrderOperator)


def count_eager_as_compiled() -> None:
    """Let a function compiled with ``fullgraph=True`` run eagerly in this thread.

    Dynamo counts the frames that it has compiled within a call of such a function, and raises an
    error where there is none. -1 means that nothing is counted. PyTorch's own higher-order
    operators set the counter likewise, where their body has to run eagerly.
    """
    set_count = _find(f"{COMPILER_MODULE}.set_fullgraph_compiled_frame_count")
    if set_count is not _ABSENT:
        count = set_count(-1)
        set_count(count if count < 0 else count + 1)


def lookup_compiler(name: str) -> Any:
    """One of Dynamo's backends by name.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is none of that name.
    """
    import torch._dynamo

    return torch._dynamo.lookup_backend(name)


def without_values(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Operators meanwhile compute no values, only what a graph's symbolic inputs have as well."""
    # Not that of the tracing context: Dynamo makes another one for compilers.
    modes = [value.fake_mode for value in inputs if hasattr(value, "fake_mode")]
    return modes[0] if modes else nullcontext()


def symbolic_inputs(graph: torch.fx.Graph) -> Sequence[Any]:
    """The inputs of a graph as Dynamo has captured it: numbers, and tensors without values."""
    return [node.meta["example_value"] for node in graph.nodes if node.op == "placeholder"]


def has_numbers(graph: torch.fx.Graph) -> bool:
    """Whether a node of a graph that Dynamo has captured gives a number: a symbolic size, or what
    ``item()`` gives where Dynamo captures that; or a tensor of such a size."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, symbols):
            return True
        if isinstance(value, torch.Tensor) and any(isinstance(n, symbols) for n in value.shape):
            return True
    return False


def example_of(node: torch.fx.Node) -> Any:
    """What Dynamo notes that a node gives, with symbolic sizes."""
    return node.meta.get("example_value")


def expression_of(size: Any) -> Any:
    """A size as a number, or as an expression of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def symbol_of(value: Any) -> Any:
    """The symbol that a number of Dynamo's is; None for another one."""
    expression = expression_of(value)
    return expression if getattr(expression, "is_Symbol", False) else None


def symbols_in(size: Any) -> Any:
    """The symbols in what :func:`expression_of` gives."""
    return getattr(size, "free_symbols", ())


def size_of(size: Any, values: Mapping[Any, int]) -> int:
    """What :func:`expression_of` gives as a number, where symbols have these values."""
    return int(size.xreplace(values)) if hasattr(size, "xreplace") else int(size)


def takes_wrapped_numbers(graph: torch.fx.Graph) -> bool:
    """Whether a graph takes numbers as tensors, which code around it makes with operators of its
    own: Dynamo does so with what functions of Python's ``random`` give, in 2.13 those but
    ``random.random``, in 2.14 and 2.15 all.
    """
    taken = [node.meta.get("grapharg") for node in graph.nodes if node.op == "placeholder"]
    return any(getattr(argument, "pass_arg_as_tensor", False) for argument in taken)


def copied_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph that Dynamo has captured, which its compilers take."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = torch.fx.GraphModule(module, graph)
    copied.meta.update(module.meta)
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied._param_name_to_source = dict(module._param_name_to_source)  # type: ignore[arg-type,assignment]
    return copied


class WithoutValues(torch.Tensor):
    """A tensor that has a shape, a dtype and a device, and nothing else."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """No operator can run on it."""
        raise TypeError(f"{func} needs values of a tensor that is told of by its shape and dtype")


_require("torch.Tensor._make_wrapper_subclass")


def valueless(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor that is like another one, and has no values.

    Args:
        device: that it tells; that of the other one without.
    """
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        WithoutValues, tensor.shape, dtype=tensor.dtype, device=device or tensor.device
    )
    return made


def without_marks(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A captured graph without :func:`module_mark`."""
    found = copied_graph(module)
    for node in list(found.graph.nodes):
        if node.target is module_mark:
            found.graph.erase_node(node)
    found.recompile()
    return found


def tracing_context() -> Any:
    """What Dynamo has noted about the graph that it hands to a compiler now."""
    return _tracing_context()


_compile_session = _symbol("torch.compiler._compile_session_context")


def compile_later(
    context: Any,
    compiler: Any,
    module: Any,
    inputs: Sequence[Any],
    *,
    with_backward: bool = False,
) -> Any:
    """Compile a captured graph after Dynamo has captured it.

    Args:
        context: the :func:`tracing_context` of its capture.
        inputs: those that Dynamo gave to the compiler.
        with_backward: whether the backward pass is compiled now, so that what fails in that fails
            here, and not in the program's first backward pass, as AOTAutograd has it.
    """
    import torch._functorch.config

    backward = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    # Without the session, compiled functions refuse to be called in other threads meanwhile: they
    # take what a compiler traces here for torch.fx.symbolic_trace (2.13).
    with (
        torch._guards.tracing(context),
        _compile_session(),
        backward if with_backward else nullcontext(),
    ):
        return compiler(module, list(inputs))


def undisabled(function: Any) -> Any:
    """A function that a compiler has made, without what keeps Dynamo off it: to be called where
    Dynamo is off, as in what it runs for a graph."""
    while getattr(function, "_torchdynamo_disable", False):
        function = function._torchdynamo_orig_callable
    return function


_OBSERVING: list[Callable[[Sequence[Any], int], None]] = []


def set_observing(function: Callable[[Sequence[Any], int], None]) -> None:
    """Set what :func:`observing_operator` runs.

    Args:
        function: called with tensors and a number.
    """
    _OBSERVING[:] = [function]


@functools.cache
def observing_operator() -> Any:
    """``amanda_torch::observe(Tensor[], int) -> ()``, which compilers neither trace nor remove."""
    from torch._library.effects import EffectType

    def observe(tensors: Sequence[Any], number: int) -> None:
        _OBSERVING[0](tensors, number)

    operator = torch.library.custom_op(
        "amanda_torch::observe",
        observe,
        mutates_args=(),
        schema="(Tensor[] tensors, int number) -> ()",
    )
    operator.register_fake(lambda tensors, number: None)
    # Without it inductor drops what returns nothing, and may change the order.
    operator.register_effect(EffectType.ORDERED)
    return torch.ops.amanda_torch.observe.default


def announce_buffer(module: torch.fx.GraphModule, name: str) -> None:
    """Tell Dynamo of a buffer that was added to a graph after its capture."""
    from torch._dynamo.source import LocalSource

    # Dynamo puts this attribute on each graph that it captures; no class has it.
    sources: dict[str, Any] = module._param_name_to_source  # type: ignore[assignment]
    sources[name] = LocalSource(name)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree`, of nested lists, tuples and dicts, with each leaf replaced by `function` of it."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


# -- Python -----------------------------------------------------------------


_EVENTS = 1000
"""Calls and returns of functions until an operator has ended for certain."""


def call_soon(function: Callable[[], bool]) -> None:
    """Call a function in the current thread at the next calls and returns, until it gives True.

    For what PyTorch does not allow within an operator. Nothing where the thread is profiled.
    """
    if sys.getprofile() is not None:
        return
    left = iter(range(_EVENTS))

    def profile(*_: Any) -> None:
        if function() or next(left, None) is None:
            sys.setprofile(None)

    sys.setprofile(profile)


_PENDING: list[Callable[[], Any]] = []


def _call_all(_: Any) -> int:
    while _PENDING:
        _PENDING.pop()()
    return 0


_call_pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_call_all)


def call_in_main_thread(function: Callable[[], Any]) -> None:
    """Call a function in the main thread, before that runs more Python code."""
    _PENDING.append(function)
    ctypes.pythonapi.Py_AddPendingCall(_call_pending, None)


# -- Keras ------------------------------------------------------------------

KERAS_INFERENCE = "compute_output_spec"
"""The function of Keras' backend that runs layers to learn the shapes of their results."""


def keras_backend() -> types.ModuleType | None:
    """The module by which Keras calls its backend; None where it is not imported."""
    return sys.modules.get("keras.src.backend")
