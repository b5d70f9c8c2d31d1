"""The nodes of gradient graphs, the engine, and ``autograd.Function``."""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from amanda.python.signatures import signature_of
from amanda_torch._internals.symbols import find_symbol, require, symbol
from amanda_torch._internals.threads import compiling_asked, dispatch_depth

AUTOGRAD = torch.autograd
AUTOGRAD_ENGINE = "_engine_run_backward"
"""The function of `AUTOGRAD` that ``Tensor.backward``, ``autograd.backward`` and ``grad`` call."""

FUNCTION_BASE = symbol("torch.autograd.function._SingleLevelFunction")
"""The class between ``autograd.Function`` and C, where ``Function.apply`` ends up,
also when it was bound to another name before."""

require("torch.autograd.Function._register_hook")

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


def native_versions() -> tuple[Any, ...] | None:
    """How the gate finds out how often tensors were changed in place: the arguments of its
    ``configure_versions()``; None where a library exports it no more.

    The function gives the reference of a tensor to its count, which is null in inference mode
    (``torch/csrc/autograd/variable.h``).
    """
    name = "_ZN5torch8autograd4impl15version_counterERKN2at6TensorE"
    try:
        library = ctypes.CDLL(torch._C.__file__)
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    with torch.inference_mode(mode=False), torch.no_grad():
        tensors = [torch.zeros(()) for _ in range(4)]
        for number, tensor in enumerate(tensors):
            for _ in range(7 * number):
                tensor.zero_()
    return tensors, [tensor._cdata for tensor in tensors], address


_parse_key = symbol("torch._C._dispatch_key_parse")

_PLAIN_KEYS = ("CUDA", "AutocastCUDA")
"""Keys of plain tensors on other devices than the CPU; a build of PyTorch may lack them."""


def native_shapes() -> tuple[Any, ...] | None:
    """How the gate finds the sizes of tensors: the arguments of its ``configure_shapes()``; None if
    PyTorch does not show dispatch keys.

    Tensors that have others, as those of transforms and of sparse and nested layouts, may keep
    their sizes elsewhere (``c10/core/TensorImpl.h``).
    """
    with torch.inference_mode(mode=False):
        tensors = [torch.ones(()), torch.ones(7), torch.ones(1, 2, 3, 4, 5), torch.ones(6, 3).T]
        tensors.append(torch.nn.Parameter(torch.ones(3, 0, 2)))
    with torch.inference_mode():
        tensors.append(torch.ones(8, 9))
    keys_of = find_symbol("torch._C._dispatch_keys")
    try:
        keys = [keys_of(tensor).raw_repr() for tensor in tensors]
        others = [torch._C.DispatchKeySet(_parse_key(name)).raw_repr() for name in _PLAIN_KEYS]
    except (AttributeError, TypeError, RuntimeError):
        return None
    plain = functools.reduce(operator.or_, [*keys, *others])
    return tensors, [tensor._cdata for tensor in tensors], keys, plain


_DISPATCH_KEYS = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Tracer")
"""Keys that are on wherever :data:`_is_transformed` or :data:`_tracing_state` finds something."""


def native_functions() -> tuple[Any, ...] | None:
    """The C++ functions that the gate calls, since their Python bindings take longer than the rest
    of its work: the arguments of its ``configure_native()``; None if a library no longer exports
    one.

    All are functions that take and return numbers.
    """
    names = (
        "_ZN2at15sequence_number4peekEv",
        "_ZN5torch8autograd25get_current_graph_task_idEv",
        "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
        "_ZN3c108GradMode10is_enabledEv",
        "_ZN3c108GradMode11set_enabledEb",
    )
    try:
        library = ctypes.CDLL(torch._C.__file__)
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
        keys = tuple(int(_parse_key(name)) for name in _DISPATCH_KEYS)
    except (OSError, AttributeError, RuntimeError):
        return None
    level = (vars(forward_ad), "_current_level")
    checks, plain = (compiling_asked,), (compiling_asked, level)
    return tuple(addresses), keys, dispatch_depth, checks, plain, torch.autograd.Function


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
            allocator = ctypes.CDLL(None)._Znwm
        except AttributeError:
            allocator = library._Znwm
    except (OSError, AttributeError, ValueError):
        return None
    return tuple(types), undefined[0], ctypes.cast(allocator, ctypes.c_void_p).value


FUNCTION_NODE = symbol("torch.autograd.function.BackwardCFunction")
"""The class of the nodes that ``autograd.Function``s make."""

FUNCTION_NODE_BOXED = "apply_boxed"
"""The method of `FUNCTION_NODE` by which autograd runs functions that AOTAutograd has compiled."""

FUNCTORCH_FUNCTION: Any = symbol("torch.autograd.function.custom_function_call")
"""The operator that ``autograd.Function.apply`` calls under a functorch transform."""

HOOK_FUNCTION = symbol("torch.nn.modules._functions.BackwardHookFunction")
"""An identity by which ``nn.Module`` carries its full backward hooks."""

sequence_number: Callable[[], int] = symbol("torch._C._autograd._get_sequence_nr")
"""The number that the next autograd node of this thread will have."""


node_sequence: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The sequence number of an autograd node. A function of C: it is asked of each node."""

current_node: Callable[[], Any] = symbol("torch._C._current_autograd_node")
"""The autograd node that a backward pass runs in this thread, its hooks included."""


require("torch.autograd.graph.Node._input_metadata")


class GradientMetadata(NamedTuple):
    """The shape of a gradient, None for a nested one, with its element type and device."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


def produced_gradients(node: Any) -> list[GradientMetadata | None]:
    """The expected outputs of an autograd node, according to the nodes that consume them; None
    without any."""
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
    require(*(f"{FUNCTIONS.__name__}.{name}" for name in (FUNCTION_DEFAULTS, FUNCTION_TRANSFORM)))
    _TRANSFORM = symbol("torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode")
    _include_key = symbol("torch._C._dispatch_tls_set_dispatch_key_included")


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


require("torch.nn.Module._call_impl")
