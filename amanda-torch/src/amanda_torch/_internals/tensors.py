"""Tensors: their versions, hooks and storage."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amanda.interface.specs import LocalPart
from amanda_torch._internals.symbols import require, symbol

_set_versions = symbol("torch._C._autograd._unsafe_set_version_counter")


_local_tensor = operator.attrgetter("_local_tensor")


def shown_part(tensor: Any) -> Any:
    """The part of a distributed tensor that this process has, for its specs; others as they are.

    ``DTensor.to_local()`` is an operator.
    """
    dtensors = sys.modules.get("torch.distributed.tensor")
    if not dtensors or not isinstance(tensor, dtensors.DTensor):
        return tensor
    local, placements = _local_tensor(tensor), map(repr, tensor.placements)
    words = ", ".join(placements).replace("dim=", "").replace("()", "")
    return LocalPart(local.shape, local.dtype, local.device, tuple(tensor.shape), words)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set how often a tensor counts as changed in place."""
    _set_versions((tensor,), (version,))


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """True if a backward pass that reaches a tensor calls hooks on it, or keeps its gradient."""
    # Hooks that run after an accumulation are not called if a pass returns the gradient.
    return bool(tensor._backward_hooks) or tensor.retains_grad


def random_state(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Functions that get and set the state of the generator of a device other than the CPU."""
    module = torch.get_device_module(device)
    return (
        functools.partial(module.get_rng_state, device),
        lambda state: module.set_rng_state(state, device),
    )


def unused_accelerator() -> str:
    """The type of the accelerator that the process does not use, such as ``cuda``; "" without one.

    A request for its generator, or for whether it is available, initializes it. That takes memory
    and time, and processes that are forked later cannot use it.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ""
    # A type without this function is in use from the start.
    is_used = getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)
    return "" if is_used() else accelerator.type


def accelerator_in_use() -> set[torch.device]:
    """The current device of the accelerator, in a set; an empty one where the process uses none."""
    if unused_accelerator():
        return set()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return set()
    return {torch.device(accelerator.type, torch.accelerator.current_device_index())}


# Both are called several times per operator: functions of C cost no Python frame.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""The number of in-place changes of a tensor so far."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that another one is a view of; None if it is not a view."""

is_view: Callable[[torch.Tensor], bool] = symbol("torch.Tensor._is_view")
"""True if autograd treats a tensor as a view."""

# ``as_subclass`` makes a view for autograd also of a tensor without gradients.
make_subclass: Callable[[type, torch.Tensor], torch.Tensor] = symbol("torch.Tensor._make_subclass")
"""An alias of a tensor as one of another class: outside of autograd's graph, and no view."""

shares_storage: Callable[[torch.Tensor, torch.Tensor], bool] = symbol("torch._C._is_alias_of")

_use_count = symbol("torch._C._storage_Use_Count")


def versions_of(tensors: Sequence[Any]) -> list[int | None]:
    """The number of in-place changes of each tensor; None for an absent tensor, and for tensors of
    inference mode, which have no such counter."""
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
    """True if the storage of `tensor` is used by more than `tensor` and autograd's saved copy of
    it."""
    # One reference each of the tensor, of autograd, and of the storage object made here.
    return bool(_use_count(tensor.untyped_storage()._cdata) > 3)


require("torch.nn.Module._parameters", "torch.nn.Module._buffers")

own_members: Callable[[torch.nn.Module], tuple[Mapping[str, Any], Mapping[str, Any]]] = (
    operator.attrgetter("_parameters", "_buffers")
)
"""The parameters and buffers of a module itself, by name; some may be None. ``parameters()`` goes
through six Python functions (2.13)."""
