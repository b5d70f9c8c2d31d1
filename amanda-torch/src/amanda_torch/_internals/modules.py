"""Calls of modules, checkpoints, and the tracers of TorchScript, FX and export."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from amanda_torch._internals.python_frames import compile_in_place
from amanda_torch._internals.symbols import find_symbol, require, symbol

FUSED_OPERATORS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_nested_")
"""The beginnings of the names of operators that modules of ``torch.nn`` run in their fast paths."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The attributes with a module's hooks; only its instances have these attributes."""


def has_hooks(module: torch.nn.Module) -> bool:
    """True if hooks run before or after the forward pass of a module, or of one below it."""
    return any(vars(below).get(name) for below in module.modules() for name in _HOOKS)


_GLOBAL_HOOKS = [
    f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")
]
require(*(f"torch.nn.modules.module.{name}" for name in _GLOBAL_HOOKS))


def has_global_hooks() -> bool:
    """True if there are hooks on all modules, which Dynamo would capture with a model."""
    hooks = vars(torch.nn.modules.module)
    for name in _GLOBAL_HOOKS:  # noqa: SIM110 - likewise
        if hooks.get(name):
            return True
    return False


SWAPPING, SWAPPING_REFERENCES = torch.utils, "weakref"
"""The module of ``swap_tensors``, by which modules change the type of parameters of a subclass. It
refuses a parameter to which there are weak references (2.13)."""

require(f"{SWAPPING.__name__}.{SWAPPING_REFERENCES}")

CHECKPOINT = torch.utils.checkpoint
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(CHECKPOINT, CHECKPOINT_GENERATOR + "_impl"):
    # Since 2.14 checkpoint() calls this one, and so does the other.
    CHECKPOINT_GENERATOR += "_impl"
require(
    f"{CHECKPOINT.__name__}.{CHECKPOINT_GENERATOR}", "torch.utils.checkpoint.CheckpointFunction"
)
MODULE_CALL = symbol("torch.nn.Module._wrapped_call_impl")
"""``nn.Module.__call__`` as PyTorch defines it."""

require("torch.nn.Module._call_impl", "torch.nn.Module._compiled_call_impl")
COMPILED_CALL = operator.attrgetter("_compiled_call_impl")
PLAIN_CALL = operator.attrgetter("_call_impl")
"""The methods of which `MODULE_CALL` calls one: the first unless it is None. A direct call saves
the Python frame of `MODULE_CALL`, so that modules can be nested as deep as without our frame
(PyTorch 2.13)."""

PROFILER = "torch.autograd.profiler"
PROFILER_START = "_enable_profiler"
"""The function of `PROFILER` at whose first call with stacks PyTorch's profiler reads, for the rest
of the process, the code of ``nn.Module.__call__``. It recognizes calls of modules by their frame,
and takes the variable ``self`` in the frame for the module (2.13)."""


_MODULE_CALL = f"""
def make(enter):
    def {MODULE_CALL.__name__}(self, *args, **kwargs):
        with enter(self, args, kwargs) as call:
            call.result = call.run(*args, **kwargs)
            return call.result
    return {MODULE_CALL.__name__}
"""


def make_module_call(enter: Callable[[Any, Any, Any], Any]) -> Any:
    """Return an ``nn.Module.__call__`` in whose traceback and warnings `MODULE_CALL` is shown.

    Args:
        enter: called with the module, its positional arguments and its keywords. Returns a context
            manager with a callable ``run``, which gets the arguments, and a ``result`` to be set.
    """
    made = compile_in_place(_MODULE_CALL, MODULE_CALL, "_call_impl")(enter)
    # Dynamo recognizes our functions by this name.
    made.__module__ = __name__
    return made


FX = "torch.fx._symbolic_trace"
FX_TRACE = "Tracer.trace"
FX_MODULE_CALL = "_orig_module_call"
"""The function that `FX` calls as PyTorch's ``nn.Module.__call__``. While one thread traces, it
also runs the calls of modules in other threads."""
require(f"{FX}.{FX_MODULE_CALL}", f"{FX}.Tracer.trace")

_TRACE: types.CodeType | None = getattr(find_symbol(f"{FX}.Tracer.trace"), "__code__", None)


def threads_in(*codes: types.CodeType) -> Sequence[int]:
    """The threads that trace with `FX` or run one of these functions, once for each call."""
    found = []
    for thread, frame in sys._current_frames().items():
        caller: types.FrameType | None = frame
        while caller is not None:
            if caller.f_code is _TRACE or caller.f_code in codes:
                found.append(thread)
            caller = caller.f_back
    # One of these frames is this function's own: a cycle that would keep all callers until a
    # collection.
    del frame
    return found


SCRIPTED = {"functions": torch.jit.ScriptFunction, "modules": symbol("torch._C.ScriptMethod")}
"""What TorchScript runs, to the class whose objects are called."""

EXPORT = "_export"
TRACERS = {
    "torch.export._trace": (EXPORT,),
    "torch.fx.experimental.proxy_tensor": ("_MakefxTracer.trace",),
    "torch.jit._trace": ("_trace_impl", "trace_module"),
    "torch.jit": ("trace_module",),
    "torch.jit._script": ("_script_impl",),
    # It runs operators on fake tensors to find the shape of a distributed result (2.13).
    "torch.distributed.tensor._sharding_prop": (
        "ShardingPropagator._propagate_tensor_meta_non_cached",
    ),
}
"""Where PyTorch's tracers begin, also when their entry point was bound to another name.

The driver looks for each function when its module is imported; a warning names a missing one."""
