"""The nodes of gradient graphs, the engine, and ``autograd.Function``."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from amanda.python.signatures import signature_of
from amanda_torch._internals.symbols import require, symbol

AUTOGRAD = torch.autograd
AUTOGRAD_ENGINE = "_engine_run_backward"
"""The function of `AUTOGRAD` that ``Tensor.backward``, ``autograd.backward`` and ``grad`` call."""

FUNCTION_BASE = symbol("torch.autograd.function._SingleLevelFunction")
"""The class between ``autograd.Function`` and C, whose ``apply`` runs also where the program has
bound ``Function.apply`` to another name."""

FUNCTION_OBJECT = symbol("torch._C._FunctionBase")
"""The class of the contexts (``ctx``) of ``autograd.Function``s."""

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
"""The sequence number of an autograd node. A function of C, since it is called for each node."""

current_node: Callable[[], Any] = symbol("torch._C._current_autograd_node")
"""The autograd node that a backward pass runs in this thread, its hooks included."""


def run_last(hook: torch.utils.hooks.RemovableHandle, _: Any = None) -> None:
    """Have a posthook of a node run after the node's other ones; a prehook of the node."""
    hooks: Any = hook.hooks_dict_ref()
    # PyTorch reads the values of the plain dictionary, whose order OrderedDict.move_to_end() does
    # not change.
    hooks[hook.id] = hooks.pop(hook.id)


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
    """True if an autograd node keeps its operator's result for the backward pass."""
    return hasattr(node, "_saved_result")


def is_compiled_backward(node: Any) -> bool:
    """True if a node runs the backward pass of code that a compiler has made."""
    # The only name of this class in 2.13.
    return str(node.name()) == "CompiledFunctionBackward"


def stands_for_leaf(node: Any) -> bool:
    """True for the node that a compiler puts before an input of a graph while it traces (2.13)."""
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
"""The two functions of Python that the ``Function.apply`` of C calls: one binds the defaults of a
function with a ``setup_context``, the other makes the whole call under a functorch transform."""

FUNCTIONS_ENTER_IN_C = not isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
"""True if ``Function.apply`` is a function of C, as it is since 2.14; before, it is Python's."""

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
        """True if the call is the driver's own; called once per call."""
        found, self.vanilla = self.vanilla, False
        return found

    def divert(self) -> None:
        """Make C believe that a functorch transform is active, so that it hands the call over."""
        self._diverted = True
        _include_key(_TRANSFORM, True)

    def take_diverted(self) -> bool:
        """True if the call was diverted; C sees the real state again."""
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
