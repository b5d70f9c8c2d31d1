"""Dispatch modes, and what the current thread is doing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from amanda.state import STATE, unwind
from amanda_torch._internals.function_modes import mode_depth
from amanda_torch._internals.symbols import require, symbol

_tracing_state = symbol("torch._C._get_tracing_state")
_dispatch_mode = symbol("torch._C._get_dispatch_mode")
_PROXY = symbol("torch._C._TorchDispatchModeKey.PROXY")
_OWN_MODES = (
    _PROXY,
    symbol("torch._C._TorchDispatchModeKey.FAKE"),
    symbol("torch._C._TorchDispatchModeKey.FUNCTIONAL"),
)
_is_wrapped = symbol("torch._C._functorch.is_functorch_wrapped_tensor")
_unwrapped = symbol("torch._C._functorch.get_unwrapped")
_transforms = symbol("torch._C._functorch.get_interpreter_stack")
_level_of = symbol("torch._C._functorch.maybe_get_level")
_BATCHING = symbol("torch._C._functorch.TransformType.Vmap")
# Not ``_functorch.peek_interpreter_stack``, which gives the thread a stack of transforms. Autograd
# copies that with each state of the thread, several times per node (2.13).
in_functorch: Callable[[], bool] = symbol("torch._C._are_functorch_transforms_active")
"""True if a functorch transform (vmap, grad, jvp) is active."""
require("torch.autograd.forward_ad._current_level")

set_grad_enabled: Callable[[bool], None] = symbol("torch._C._set_grad_enabled")
"""``torch.set_grad_enabled`` without the context object, six times cheaper."""


def without_gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as within ``torch.no_grad()``."""
    outer, undo = torch.is_grad_enabled(), STATE.undo
    mark = len(undo)
    undo.append((set_grad_enabled, (outer,)))
    try:
        set_grad_enabled(False)
        return function(*args, **kwargs)
    finally:
        unwind(undo, mark)


set_forward_grad_enabled: Callable[[bool], None] = symbol("torch._C._set_fwd_grad_enabled")


_disable_dispatch_modes = symbol("torch.utils._python_dispatch._disable_current_modes")


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Within it, code is hidden from the program's ``TorchDispatchMode``s."""
    return _disable_dispatch_modes() if dispatch_depth() else nullcontext()


dispatch_depth: Callable[[], int] = symbol("torch._C._len_torch_dispatch_stack")
"""The number of dispatch modes that are on in this thread, PyTorch's own included."""

_pop_dispatch_mode = symbol("torch._C._pop_torch_dispatch_stack")
_push_dispatch_mode = symbol("torch._C._push_on_torch_dispatch_stack")


def hide_dispatch_modes(hidden: list[Any]) -> None:
    """Take the dispatch modes of the program off the stack of this thread.

    PyTorch's own modes, of fake tensors and of its tracers, stay: without them the code would make
    real tensors, which cannot be combined with its fake inputs. PyTorch's modes are below the
    program's (2.13).

    Args:
        hidden: the modes are appended to it, innermost first, for :func:`show_dispatch_modes`.
    """
    if not dispatch_depth():
        return
    own = sum([_dispatch_mode(key) is not None for key in _OWN_MODES])
    while dispatch_depth() > own:
        hidden.append(_pop_dispatch_mode(None))


def show_dispatch_modes(hidden: list[Any]) -> None:
    """Undo :func:`hide_dispatch_modes`. The list is emptied."""
    while hidden:
        _push_dispatch_mode(hidden[-1])
        del hidden[-1]


def without_dispatch_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with no dispatch mode of the program's on."""
    hidden: list[Any] = []
    undo = STATE.undo
    mark = len(undo)
    undo.append((show_dispatch_modes, (hidden,)))
    try:
        hide_dispatch_modes(hidden)
        return function(*args)
    finally:
        unwind(undo, mark)


graph_task: Callable[[], int] = symbol("torch._C._current_graph_task_id")
"""The number of the backward pass that runs in this thread; -1 outside of one."""


# The engine hands these values to the threads that run a pass.
keep_in_thread: Callable[[str, Any], None] = symbol("torch._C._stash_obj_in_tls")
is_kept_in_thread: Callable[[str], bool] = symbol("torch._C._is_key_in_tls")
kept_in_thread: Callable[[str], Any] = symbol("torch._C._get_obj_in_tls")


def in_backward() -> bool:
    """True if the current thread is running a node of a backward pass."""
    return bool(graph_task() != -1)


def is_within_differentiation(root: Any) -> bool:
    """True if ``torch.func`` also differentiates the gradients that it computes, as for a Hessian.

    The caller is within a transform.

    Args:
        root: the tensor at which the backward pass begins. ``vjp`` may have left its own level.
    """
    own = _level_of(root) if isinstance(root, torch.Tensor) else -1
    levels = [one.level() for one in _transforms() or () if one.key() != _BATCHING]
    return any(level != own for level in levels)


def differentiated(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of a graph behind one of a transform of functorch: the outermost one that is
    differentiated."""
    inner = tensor
    while not inner.requires_grad and _is_wrapped(inner):
        inner = _unwrapped(inner)
    return inner if inner.requires_grad else tensor


def needs_gradient(tensor: torch.Tensor) -> bool:
    """True if some functorch transform, or autograd outside of them, differentiates a tensor."""
    while not tensor.requires_grad and _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor.requires_grad


def in_forward_ad() -> bool:
    """True if tensors may carry tangents: in ``torch.autograd.forward_ad`` or ``func.jvp``."""
    return forward_ad._current_level >= 0


is_autocasting: Callable[[], bool] = symbol("torch._C._is_any_autocast_enabled")
"""True if autocast is on for any device: further nodes may then cast an operator's inputs."""


require("torch._guards.tracing")
tracing_context: Callable[[], Any] = symbol("torch._guards.TracingContext.try_get")
"""Dynamo's notes about the graph that it hands to a compiler now."""


def is_compiling() -> bool:
    """True if Dynamo or its compiler runs in this thread."""
    # The public function reads one flag for all threads. In captured code Dynamo evaluates both
    # calls to True.
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling() or tracing_context() is not None
    )


def is_untransformed() -> bool:
    """True if operators reach PyTorch's eager kernels directly, apart from function modes: no
    dispatch mode is on, and no transform, forward-mode AD or tracer is active."""
    return (
        not dispatch_depth()
        and forward_ad._current_level < 0
        and not in_functorch()
        and _tracing_state() is None
        and not (torch.compiler.is_compiling() and is_compiling())
    )


def is_plain() -> bool:
    """:func:`is_untransformed`, and no function mode is on."""
    return not mode_depth() and is_untransformed()


def is_traced() -> bool:
    """True if the current operators are being recorded by a tracer of PyTorch:
    ``jit.trace``, ``make_fx``, ``export`` or Dynamo."""
    return (
        _tracing_state() is not None
        or _dispatch_mode(_PROXY) is not None
        or (torch.compiler.is_compiling() and is_compiling())
    )


Question = Callable[[], Any] | tuple[dict[str, Any], str]
"""A condition that the gate checks: a function, or a key of a dictionary, which is faster."""

compiling_asked: Question = (
    (vars(torch.compiler), "_is_compiling_flag")
    if "_is_compiling_flag" in vars(torch.compiler)
    else torch.compiler.is_compiling
)

FORWARD_LEVEL: Question = (vars(forward_ad), "_current_level")
"""Not negative in forward-mode AD."""


_saving_hooks = symbol("torch._C._autograd._top_saved_tensors_default_hooks")


def is_eager() -> bool:
    """:func:`is_untransformed`, without hooks on saved tensors, and outside of a backward pass."""
    return is_untransformed() and graph_task() == -1 and _saving_hooks(True) is None


require("torch.Tensor._version", "torch.Tensor._base", "torch.UntypedStorage._cdata")

require("torch.Tensor._backward_hooks")
