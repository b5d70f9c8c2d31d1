"""Every private symbol of PyTorch that this package uses, and what was observed about it.

Nothing is imported before it is needed: functions are called for PyTorch's own objects only. Each
works without its symbol, with less; a test fails where one is gone in the supported versions.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import attrs

from amanda.interface.specs import LocalPart
from amanda.python.patching import PatchSet

SYMBOLS: list[str] = []
"""The symbols, as ``module.name``."""


def _symbol(path: str) -> Callable[[], Any]:
    """Return a function that returns a private symbol, or None where it is gone."""
    SYMBOLS.append(path)
    module, _, name = path.rpartition(".")
    # Looked up here, since some are read at each operator.
    return functools.cache(lambda: getattr(importlib.import_module(module), name, None))


_profiler_enabled = _symbol("torch.autograd._profiler_enabled")
_graph_task = _symbol("torch._C._current_graph_task_id")
_transforms = _symbol("torch._C._functorch.peek_interpreter_stack")
_is_old_batch = _symbol("torch._C._functorch.is_legacy_batchedtensor")
_no_transforms = _symbol("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
_takes_hooks = _symbol("torch._C._autograd._saved_tensors_hooks_is_enabled")
_saving_hooks = _symbol("torch._C._autograd._top_saved_tensors_default_hooks")
_no_overrides = _symbol("torch._C.DisableTorchFunctionSubclass")
_schemas = _symbol("torch._C._jit_get_schemas_for_operator")
_is_wrapped = _symbol("torch._C._functorch.is_functorch_wrapped_tensor")
_unwrapped = _symbol("torch._C._functorch.get_unwrapped")
_is_stacked = _symbol("torch._C._functorch.is_batchedtensor")
_stacked_axis = _symbol("torch._C._functorch.maybe_get_bdim")
_level = _symbol("torch._C._functorch.maybe_get_level")
_in_transforms = _symbol("torch._C._are_functorch_transforms_active")
_tree_leaves = _symbol("torch.utils._pytree.tree_leaves")
_local_tensor = operator.attrgetter("_local_tensor")
_PROFILERS = (
    ("torch.autograd.profiler", "_prepare_profiler", "_enable_profiler"),
    ("torch.autograd.profiler_legacy", "_enable_profiler_legacy"),
)
SYMBOLS += [f"{module}.{name}" for module, *names in _PROFILERS for name in names]
_SAVED_PREFIX = "_raw_saved_"

version_of: Callable[[Any], int] = operator.attrgetter("_version")
"""Number of in-place changes of a tensor, of all its views together: what autograd checks.

Public documentation mentions it ("In-place correctness checks", notes on autograd), without a
public name.
"""

_stored_in_coo: Callable[[Any], Any] = operator.methodcaller("_values")


def stored_values(tensor: Any) -> Any:
    """Return the elements that a sparse tensor stores, in any layout.

    The public ``values()`` of the layout COO needs a coalesced tensor, in which elements of one
    place are summed, and a sum may be an infinity that the tensor does not hold (2.13).
    """
    return _stored_in_coo(tensor) if tensor.is_sparse else tensor.values()


own_parts: Callable[[Any], tuple[Any, Any]] = operator.attrgetter("_modules", "_parameters")
"""The modules and the parameters of a module itself, by name; some may be None.

The public methods also give the parts of inner modules, by generators as deep as the tree, or
leave out the second place of a shared module (2.13).
"""


def takes_saved_tensor_hooks() -> bool:
    """True if hooks on saved tensors can be entered here.

    Under ``torch.func.grad`` and its like, and where a program has turned them off by
    ``torch.autograd.graph.disable_saved_tensors_hooks``, entering them raises. There is no public
    way to ask (2.13). Without the symbol the answer is True.
    """
    enabled = _takes_hooks()
    return enabled is None or bool(enabled())


def has_saved_tensor_hooks() -> bool:
    """True if hooks on saved tensors are on in this thread, as in a checkpoint's second run.

    There is no public way to ask (2.13). Without the symbol the answer is False.
    """
    top = _saving_hooks()
    return top is not None and top(False) is not None


def writes_into_tensors(name: str) -> bool:
    """True if PyTorch's own operator of that name writes into tensors that it is given.

    Of operators without an underscore at the end, such as ``fused_moving_avg_obs_fake_quant``, the
    versions of these tensors do not change (2.13). Without the symbol the answer is False.
    """
    schemas_of = _schemas()
    return schemas_of is not None and any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.is_out
        and str(argument.type) == "Tensor"
        for schema in schemas_of(f"aten::{name}")
        for argument in schema.arguments
    )


@attrs.frozen
class DeclaredArgument:
    """An argument of an operator of ``torch.ops``, as its schema declares it.

    Attributes:
        name: its name.
        default: its default value; None without one.
        is_tensor: True for a tensor, which may be optional.
        is_list: True for a list of tensors.
        is_keyword: True if it is given by name only.
    """

    name: str
    default: Any
    is_tensor: bool
    is_list: bool
    is_keyword: bool


def declared_arguments(packet: Any) -> list[DeclaredArgument]:
    """Return the arguments of an operator of ``torch.ops``, those of its first overload.

    There is no public way to ask (2.13). Without the symbol there are none.
    """
    schemas_of = _schemas()
    schemas = [] if schemas_of is None else schemas_of(str(packet).replace(".", "::"))
    return [
        DeclaredArgument(
            name=argument.name,
            default=argument.default_value,
            is_tensor=(kind := str(argument.type)) in ("Tensor", "Optional[Tensor]"),
            is_list=kind in ("List[Tensor]", "List[Optional[Tensor]]"),
            is_keyword=argument.kwarg_only,
        )
        for schema in schemas[:1]
        for argument in schema.arguments
    ]


def cuda_device_name() -> str:
    """Return the name of the CUDA device that the program uses; "" if it uses none."""
    torch = sys.modules.get("torch")
    is_used = torch is not None and torch.cuda.is_initialized()
    return str(torch.cuda.get_device_name()) if torch is not None and is_used else ""


def is_profiling() -> bool:
    """True if PyTorch's profiler runs in this thread, whoever started it.

    There is no public way to ask, and ``torch.profiler.profile.start`` (2.13) silently takes over
    from a profiler that runs. Without the symbol the answer is False, and the profiler may be taken
    over.
    """
    enabled = _profiler_enabled()
    return enabled is not None and bool(enabled())


def prepare_profiler(profiler: Any) -> None:
    """Prepare the backend of a ``torch.profiler.profile``, as before a start.

    ``prepare_trace()``, which is public, gives a warning where the profiler was used before (2.13).
    """
    profiler.profiler._prepare_trace()


def watch_profilers(patches: PatchSet, begins: Callable[[], None]) -> None:
    """Call a function before PyTorch's profiler, or the writer of its execution traces, starts.

    There is no public way: the classes of 2.13 call functions of C. A missing function is left out.

    Args:
        patches: the set that undoes the patches.
        begins: called before a start, once or more often.
    """

    def wrapper(vanilla: Any) -> Any:
        @functools.wraps(vanilla)
        def told(*args: Any, **kwargs: Any) -> Any:
            begins()
            return vanilla(*args, **kwargs)

        return told

    patches.wrap(importlib.import_module("torch.profiler").ExecutionTraceObserver, "start", wrapper)
    for module, *names in _PROFILERS:
        owner = importlib.import_module(module)
        for name in names:
            if hasattr(owner, name):
                patches.wrap(owner, name, wrapper)


def is_in_backward() -> bool:
    """True if this thread runs a part of a backward pass, such as what a checkpoint recomputes.

    There is no public way to ask; the number is -1 outside of backward passes (2.13).
    Without the symbol the answer is False.
    """
    current = _graph_task()
    return current is not None and current() != -1


def transform_check() -> Callable[[], Any]:
    """Return a function that gives None outside of the transforms of ``torch.func``.

    Called for each tensor that is read; without the symbol the result is always None.
    """
    return _transforms() or (lambda: None)


@functools.cache
def old_batch_check() -> Callable[[Any], bool]:
    """Return a function that says whether a tensor stands for the batch of the older ``vmap``.

    PyTorch 2.13 computes ``autograd.grad(is_grads_batched=True)`` and vectorized jacobians with it.
    Its tensors have no memory, and no function returns the tensor inside. Without the symbol the
    answer is False.
    """
    return _is_old_batch() or (lambda tensor: False)


def below_transforms(tensor: Any) -> tuple[Any, int]:
    """Return the tensor inside of the wrappers that ``torch.func`` has put around one.

    The numbers of a wrapped tensor cannot be read, and no public function returns the tensor inside
    (2.13). The caller is within :func:`no_transforms`.

    Returns:
        The tensor, and the number of its first axes that ``torch.vmap`` maps over: the wrapped
        tensor does not have these.
    """
    *wrappers, tensor = inside(tensor)
    axes = [_stacked_axis()(wrapper) for wrapper in wrappers if _is_stacked()(wrapper)]
    for moved, axis in enumerate(reversed(axes)):
        tensor = tensor.movedim(axis + moved, 0)
    return tensor, len(axes)


def is_stacked(tensor: Any) -> bool:
    """True if ``torch.vmap`` maps over an axis of the tensor inside of a wrapper."""
    return any(map(_is_stacked(), inside(tensor)))


def may_be_batched(tensors: Iterable[Any]) -> bool:
    """True if tensors may have axes that their shapes do not show; only PyTorch's may."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    is_old = old_batch_check()
    # Not _transforms(), which gives a thread a stack of transforms (2.13).
    # A generator would be a frame for each tensor.
    are_old = [isinstance(t, torch.Tensor) and is_old(t) for t in tensors]
    return any(are_old) or bool(_in_transforms()())


def batch_sizes(tensor: Any) -> dict[int, int]:
    """Return the sizes of the axes that ``torch.vmap`` maps over, by the level of each.

    Raises:
        LookupError: the tensor is of the older ``vmap``, which does not report sizes.
    """
    if old_batch_check()(tensor):
        raise LookupError("the size of an older vmap")
    found: dict[int, int] = {}
    for wrapper, inner in itertools.pairwise(inside(tensor)):
        if _is_stacked()(wrapper):
            found[_level()(wrapper)] = int(inner.shape[_stacked_axis()(wrapper)])
    return found


def local_part(tensor: Any) -> Any:
    """Return the part of a distributed tensor that this process has; other tensors as they are.

    ``DTensor.to_local()`` is an operator.
    """
    dtensors = sys.modules.get("torch.distributed.tensor")
    return _local_tensor(tensor) if dtensors and isinstance(tensor, dtensors.DTensor) else tensor


def shown_part(tensor: Any) -> Any:
    """Return the :func:`local_part` of a distributed tensor with what it is a part of; others as
    they are."""
    local = local_part(tensor)
    if local is tensor:
        return tensor
    words = ", ".join(map(repr, tensor.placements)).replace("dim=", "").replace("()", "")
    return LocalPart(local.shape, local.dtype, local.device, tuple(tensor.shape), words)


def inside(tensor: Any) -> Iterator[Any]:
    """Yield a tensor and the tensors inside its wrappers of ``torch.func``, the outermost first."""
    yield tensor
    while _is_wrapped()(tensor):
        tensor = _unwrapped()(tensor)
        yield tensor


def no_transforms() -> AbstractContextManager[Any]:
    """Within it ``torch.func`` wraps nothing.

    Within a transform the copy of a plain tensor is a wrapped one (2.13).
    """
    context: AbstractContextManager[Any] = _no_transforms()()
    return context


def no_overrides() -> AbstractContextManager[Any]:
    """Within it no ``__torch_function__`` of a tensor's class is called."""
    context: AbstractContextManager[Any] = _no_overrides()()
    return context


def takes_no_arithmetic(cls: type) -> bool:
    """True for PyTorch's own classes that stand for a computation, and hold no values to change.

    ``ExpandedWeight`` computes the gradients of the samples for ``call_for_per_sample_grads``, and
    raises for nearly every function; ``CausalBias`` is a mask by its attributes, which the results
    of arithmetic lack (2.13).
    """
    module = cls.__module__
    return module.startswith("torch.nn.utils._expanded_weights.") or (
        module == "torch.nn.attention.bias"
    )


# Weakly: the nodes of ``autograd.Function``s have classes of the program's.
_saved_names: Any = weakref.WeakKeyDictionary()


def raw_saved_tensors(node: Any) -> Iterator[Any]:
    """Yield the ``SavedTensor`` objects of an autograd node, without unpacking them.

    The attributes ``_saved_*`` unpack: they call the program's hooks, and raise after the backward
    pass. ``_raw_saved_*`` (since 1.10) do neither.
    """
    cls = type(node)
    names = _saved_names.get(cls)
    if names is None:
        names = _saved_names[cls] = [n for n in dir(cls) if n.startswith(_SAVED_PREFIX)]
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:
            # The backward pass has freed it.
            continue
        yield from value if isinstance(value, (list, tuple)) else (value,)


def leaves_of(outputs: Any) -> list[Any]:
    """The leaves of what a PyTorch model takes or returns, in the order in which it is exported."""
    found: list[Any] = _tree_leaves()(outputs)
    return found


def quantizing_operators() -> Any:
    """The operators that quantize and dequantize, in which PyTorch's exporters write quantization.

    Importing this module registers them (2.13): no public one does.
    """
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    return importlib.import_module("torch").ops.quantized_decomposed


def is_onnx_operator(target: Any) -> bool:
    """True for what ``torch.onnx.ops.symbolic`` puts into a program (2.13): it computes zeros."""
    return str(target) == "onnx_symbolic._symbolic.default"
