"""PyTorch's functions that a program has replaced by its own.

PyTorch reports an operator to a mode by its name in ``torch.Tensor``. If a program has set
``torch.Tensor.exp`` to a function that calls the original method, the mode gets the program's
function, and running it would do its work twice (PyTorch 2.13 to 2.15; with any
``TorchFunctionMode``, including ``torch.device`` as a context). The same holds for functions in
Python, which report themselves by their global names::

    exp = torch.Tensor.exp
    torch.Tensor.exp = lambda tensor: 2 * exp(tensor)
    original_of(torch.Tensor.exp)  # <method 'exp' of 'torch._C.TensorBase' objects>
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from amanda.python.memo import Memo
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
"""The namespaces of functions that report themselves to modes."""

_VANILLA: Sequence[tuple[Any, Mapping[str, Any]]] = [
    (owner, dict(vars(owner))) for owner in _OWNERS if hasattr(owner, "__dict__")
]
"""Their attributes at the import of this module. Methods in C that a program has replaced before
are found in the base class of ``torch.Tensor``."""


class _Place(NamedTuple):
    """An attribute of PyTorch that a program has set.

    Attributes:
        owner: the module or class.
        name: name of the attribute.
        original: its value before.
    """

    owner: Any
    name: str
    original: Any

    def holds(self, value: Any) -> bool:
        """True if the attribute is now this function, property or callable of the program."""
        return _is_of(vars(self.owner).get(self.name), value)


_FOUND: Memo[int, _Place] = Memo(4096)
"""The place where a program's object was last found, by identity, which keeps nothing alive: it may
be out of date."""


def original_of(func: Any) -> Any:
    """PyTorch's own function, if a program has replaced it by `func`; else None."""
    if _is_own(func):
        return None
    # A property reports itself by its method, which each access creates.
    is_getter = isinstance(func, types.MethodWrapperType)
    place = _place_of(func.__self__ if is_getter else func)
    if place is None:
        return None
    return place.original.__get__ if is_getter else place.original


def _place_of(value: Any) -> _Place | None:
    """The place where a function, property or callable of the program replaces PyTorch's."""
    place = _FOUND.get(id(value))
    if place is None or not place.holds(value):
        place = _search(value)
        if place is not None:
            _FOUND[id(value)] = place
    return place


def _search(value: Any) -> _Place | None:
    """Look for an object of the program in all of PyTorch's namespaces."""
    for owner, vanilla in _VANILLA:
        for name, now in vars(owner).items():
            if not _is_of(now, value):
                continue
            original = vanilla.get(name, now)
            if original is now and owner is torch.Tensor:
                original = vars(_internals.TENSOR_BASE).get(name, now)
            if original is not now:
                return _Place(owner, name, original)
    return None


def _is_of(attribute: Any, value: Any) -> bool:
    """True if an attribute is the object, or a static method of it."""
    return attribute is value or getattr(attribute, "__func__", None) is value


def _is_own(func: Any) -> bool:
    """True if a function is PyTorch's own."""
    if isinstance(func, types.FunctionType):
        # Not __module__, which functools.wraps() copies.
        module = str(func.__globals__.get("__name__"))
        return module.partition(".")[0] == "torch"
    if isinstance(func, types.MethodWrapperType):
        return not isinstance(func.__self__, property) or _is_own(func.__self__.fget)
    return isinstance(func, _BUILTIN) or _internals.is_registered(func)
