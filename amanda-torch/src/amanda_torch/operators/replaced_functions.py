"""PyTorch's functions in whose places a program has put functions of its own.

PyTorch tells a mode of an operator by the name that it has in ``torch.Tensor``. Where a program has
set ``torch.Tensor.exp``, and its function calls the method that was there before, the mode is told
of the program's function, and to run that would do its work twice (PyTorch 2.13 to 2.15; any
``TorchFunctionMode``, ``torch.device`` as a context too, does so). The same holds of functions in
Python, which report themselves by their global names::

    exp = torch.Tensor.exp
    torch.Tensor.exp = lambda tensor: 2 * exp(tensor)
    original_of(torch.Tensor.exp)  # <method 'exp' of 'torch._C.TensorBase' objects>
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amanda_torch import _internals

_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
"""The types of PyTorch's functions in C."""

_OWNERS = (
    torch.Tensor,
    *_internals.BUILTIN_FUNCTIONS,
    torch.functional,
    torch.autograd,
    nn.functional,
    nn.init,
)
"""Where functions are kept that report themselves to modes."""

_VANILLA: Sequence[tuple[Any, Mapping[str, Any]]] = [
    (owner, dict(vars(owner))) for owner in _OWNERS if hasattr(owner, "__dict__")
]
"""What was there when this module was imported. Methods in C that a program has replaced before are
found in the base class of ``torch.Tensor``."""


_FOUND: weakref.WeakKeyDictionary[Any, tuple[Any, str, Any]] = weakref.WeakKeyDictionary()
"""Of a program's function, where it was found under which name, and what was there before."""


def original_of(func: Any) -> Any:
    """PyTorch's own function, if a program has put `func` in the place of one; else None."""
    if _is_own(func):
        return None
    if not isinstance(func, types.FunctionType):
        getter = isinstance(func, types.MethodWrapperType)
        found = _place_of(func.__self__ if getter else func)
        return found and (found[2].__get__ if getter else found[2])
    found = _FOUND.get(func)
    # It may stand elsewhere by now.
    if found is None or vars(found[0]).get(found[1]) is not func:
        found = _place_of(func)
        if found is not None:
            _FOUND[func] = found
    return found and found[2]


def _place_of(value: Any) -> tuple[Any, str, Any] | None:
    """Where a function or property of the program stands, its name there, and what was there."""
    for owner, vanilla in _VANILLA:
        for name, now in vars(owner).items():
            if now is not value and getattr(now, "__func__", None) is not value:
                continue
            original = vanilla.get(name, now)
            if original is now and owner is torch.Tensor:
                original = vars(_internals.TENSOR_BASE).get(name, now)
            if original is not now:
                return owner, name, original
    return None


def _is_own(func: Any) -> bool:
    """Whether a function is of PyTorch, so that it stands for itself."""
    if isinstance(func, types.FunctionType):
        # Not __module__, which functools.wraps() copies.
        module = str(func.__globals__.get("__name__"))
        return module.partition(".")[0] == "torch"
    if isinstance(func, types.MethodWrapperType):
        return not isinstance(func.__self__, property) or _is_own(func.__self__.fget)
    return isinstance(func, _BUILTIN) or _internals.is_registered(func)
