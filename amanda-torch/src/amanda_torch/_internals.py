"""Every private symbol of PyTorch that this package uses.

Named by what they do. :func:`missing` is asked when the driver attaches, so
that a PyTorch in which one has gone gives one clear error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad

OVERRIDE_CHECKS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)
OVERRIDE_CHECKERS = (torch.functional, torch.nn.functional)
"""Modules of Python-level operators that ask these before they do their work."""

PRIVATE_SYMBOLS: tuple[tuple[str, Any, str], ...] = (
    ("torch._C", torch._C, "_push_on_torch_function_stack"),
    ("torch._C", torch._C, "_pop_torch_function_stack"),
    ("torch._C", torch._C, "_len_torch_function_stack"),
    ("torch._C", torch._C, "_get_function_stack_at"),
    ("torch._C", torch._C, "_skip_one_hop_torch_function"),
    ("torch._C", torch._C, "_current_graph_task_id"),
    ("torch._C", torch._C, "_set_grad_enabled"),
    ("torch._C", torch._C, "_set_fwd_grad_enabled"),
    ("torch.autograd.forward_ad", forward_ad, "_current_level"),
    ("torch._C", torch._C, "_get_tracing_state"),
    ("torch._C", torch._C, "_get_dispatch_mode"),
    ("torch._C", torch._C, "_len_torch_dispatch_stack"),
    ("torch._C", torch._C, "_TorchDispatchModeKey"),
    ("torch._C", torch._C, "_FunctionBase"),
    ("torch._C", torch._C, "_is_alias_of"),
    ("torch._C", torch._C, "_storage_Use_Count"),
    ("torch._C", torch._C, "_jit_get_schemas_for_operator"),
    ("torch._C._autograd", torch._C._autograd, "_get_sequence_nr"),
    ("torch._C._functorch", torch._C._functorch, "peek_interpreter_stack"),
    ("torch.autograd", torch.autograd, "_engine_run_backward"),
    ("torch.autograd.function", torch.autograd.function, "_SingleLevelFunction"),
    ("torch.autograd.function", torch.autograd.function, "BackwardCFunction"),
    ("torch.autograd.function", torch.autograd.function, "custom_function_call"),
    (
        "torch.utils.checkpoint",
        torch.utils.checkpoint,
        "_checkpoint_without_reentrant_generator",
    ),
    ("torch.utils.checkpoint", torch.utils.checkpoint, "CheckpointFunction"),
    *((m.__name__, m, name) for m in OVERRIDE_CHECKERS for name in OVERRIDE_CHECKS),
    ("torch.overrides", torch.overrides, "has_torch_function"),
)


def missing(symbols: Iterable[tuple[str, Any, str]] = PRIVATE_SYMBOLS) -> list[str]:
    """The names of the private symbols that this PyTorch does not have."""
    return [f"{where}.{name}" for where, owner, name in symbols if not hasattr(owner, name)]


def _symbol(owner: Any, name: str) -> Any:
    """A private symbol, or a function that says which one is gone when it is called."""
    if hasattr(owner, name):
        return getattr(owner, name)

    def gone(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"PyTorch {torch.__version__} has no {owner.__name__}.{name}")

    return gone


push_mode = _symbol(torch._C, "_push_on_torch_function_stack")
pop_mode = _symbol(torch._C, "_pop_torch_function_stack")
mode_depth = _symbol(torch._C, "_len_torch_function_stack")
mode_at = _symbol(torch._C, "_get_function_stack_at")
call_composite = _symbol(torch._C, "_skip_one_hop_torch_function")
"""What ``torch.overrides.redispatch_function`` calls: saves a Python frame per composite."""
set_grad_enabled = _symbol(torch._C, "_set_grad_enabled")
"""``torch.set_grad_enabled`` without the context object, six times cheaper."""
set_forward_grad_enabled = _symbol(torch._C, "_set_fwd_grad_enabled")
sequence_number = _symbol(getattr(torch._C, "_autograd", torch._C), "_get_sequence_nr")
"""The number that the next autograd node of this thread will have."""
shares_storage: Callable[[torch.Tensor, torch.Tensor], bool] = _symbol(torch._C, "_is_alias_of")
schemas_of: Callable[[str], list[Any]] = _symbol(torch._C, "_jit_get_schemas_for_operator")

_tracing_state = _symbol(torch._C, "_get_tracing_state")
_dispatch_mode = _symbol(torch._C, "_get_dispatch_mode")
_dispatch_depth = _symbol(torch._C, "_len_torch_dispatch_stack")
_PROXY = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "PROXY", None)
_peek_transform = _symbol(torch._C._functorch, "peek_interpreter_stack")

PYTHON_EVENT = torch.overrides.handle_torch_function.__code__
"""The code that reports a Python-level function to a mode; C-level ones come straight from C."""

getitem = operator.getitem
OPERATORS_MODULE = torch._ops.__name__
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

AUTOGRAD = torch.autograd
AUTOGRAD_ENGINE = "_engine_run_backward"
FUNCTION_BASE = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
"""The class between ``autograd.Function`` and C, where ``Function.apply`` ends up,
also when it was bound to another name before."""
HOOK_FUNCTION = torch.nn.modules._functions.BackwardHookFunction
"""An identity by which ``nn.Module`` carries its full backward hooks."""
SCRIPT_FUNCTION = torch.jit.ScriptFunction
FUNCTION_NODE = torch.autograd.function.BackwardCFunction
FUNCTORCH_FUNCTION: Any = getattr(torch.autograd.function, "custom_function_call", None)
CHECKPOINT = torch.utils.checkpoint
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
TRACERS = {
    "torch.export._trace": ("_export",),
    "torch.fx.experimental.proxy_tensor": ("_MakefxTracer.trace",),
    "torch.fx._symbolic_trace": ("Tracer.trace",),
    "torch.jit._trace": ("_trace_impl", "trace_module"),
    "torch.jit": ("trace_module",),
    "torch.jit._script": ("_script_impl",),
}
"""Where PyTorch's tracers begin, also when their entry point was bound to another name."""
COMPILER_MODULE = "torch._dynamo.eval_frame"
COMPILED_MODULE = "_orig_mod"
"""Where a module compiled with ``torch.compile`` keeps the module itself."""
COMPILED_MODULE_SETUP = "OptimizedModule._initialize"
"""What binds the call of the module that is compiled."""
COMPILER_CALLBACK = "_callback_from_stance"


def hide_modes() -> Sequence[Any]:
    """Take all function modes off the current thread; what they were, outermost first."""
    return [pop_mode() for _ in range(mode_depth())][::-1] if mode_depth() else ()


def show_modes(modes: Sequence[Any]) -> None:
    """Put hidden modes back."""
    for mode in modes:
        push_mode(mode)


def in_backward() -> bool:
    """Whether the current thread is running a node of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_functorch() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) is active."""
    return _peek_transform() is not None


def in_forward_ad() -> bool:
    """Whether tensors may carry tangents: in ``torch.autograd.forward_ad`` or ``func.jvp``."""
    return forward_ad._current_level >= 0


def is_bare() -> bool:
    """Whether no function mode is on in this thread, and no forward-mode AD."""
    return not mode_depth() and forward_ad._current_level < 0


def is_plain() -> bool:
    """Whether operators that are called now go straight to PyTorch's eager kernels: no
    mode is on, and no transform, forward-mode AD or tracer is active."""
    return (
        not (mode_depth() or _dispatch_depth())
        and forward_ad._current_level < 0
        and _peek_transform() is None
        and _tracing_state() is None
        and not torch.compiler.is_compiling()
    )


def is_traced() -> bool:
    """Whether the current operators are being recorded by a tracer of PyTorch:
    ``jit.trace``, ``make_fx``, ``export`` or Dynamo."""
    return (
        _tracing_state() is not None
        or _dispatch_mode(_PROXY) is not None
        or torch.compiler.is_compiling()
    )


def apply_function(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """``cls.apply(*args)`` without PyTorch's Python layer and without our interception."""
    return _function_apply().__get__(None, cls)(*args)


@functools.cache
def _function_apply() -> Any:
    return vars(torch._C._FunctionBase)["apply"]


def compiled_frame() -> Any:
    """Which frame Dynamo is compiling: the same for a recompilation of it."""
    current = torch._guards.CompileContext.current_compile_id()
    return getattr(current, "frame_id", None)


def lookup_compiler(name: str) -> Any:
    """One of Dynamo's backends by name.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is none of that name.
    """
    import torch._dynamo

    return torch._dynamo.lookup_backend(name)


def announce_buffer(module: torch.fx.GraphModule, name: str) -> None:
    """Tell Dynamo of a buffer that was added to a graph after its capture."""
    from torch._dynamo.source import LocalSource

    sources: dict[str, Any] = module._param_name_to_source  # type: ignore[assignment]
    sources[name] = LocalSource(name)


def node_sequence(node: Any) -> int:
    """The sequence number of an autograd node."""
    return cast(int, node._sequence_nr())


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats `tensor` as a view."""
    return tensor._is_view()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which `tensor` is a view."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` has been changed in place."""
    return tensor._version


def versions_of(tensors: Sequence[Any]) -> list[int | None]:
    """How often each tensor has been changed in place; None for an absent one, and for
    those of inference mode, which do not count it."""
    try:
        return [tensor._version for tensor in tensors]
    except (AttributeError, RuntimeError):
        return [
            None if tensor is None or tensor.is_inference() else tensor._version
            for tensor in tensors
        ]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether others than `tensor` and what autograd has saved of it use its storage."""
    # One each for the tensor, for autograd, and for the storage object made here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 3


def saves_result(node: Any) -> bool:
    """Whether an autograd node keeps its operator's result for the backward pass."""
    return hasattr(node, "_saved_result")


def forward_class(node: Any) -> Any:
    """The ``autograd.Function`` that a Python node belongs to, None for a builtin one."""
    return getattr(node, "_forward_cls", None)
