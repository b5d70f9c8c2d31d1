"""Which functions of PyTorch are operators, and their names.

The boundary is PyTorch's own, between Python and C++: functions and methods written in C++,
``torch.ops`` and ``autograd.Function``s are operators. A function written in Python is not;
the operators that it calls are.
"""

from __future__ import annotations

import enum
import functools
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from amanda.interface.calls import ParameterName
from amanda.python.references import Reference, nothing
from amanda_torch import _internals


class Kind(enum.Enum):
    """The treatment of calls of a function."""

    LEAF = enum.auto()
    """The function is an operator."""
    COMPOSITE = enum.auto()
    """The function is written in Python: the operators that it calls are intercepted."""
    IGNORED = enum.auto()
    """The function is not an operator, and calls none."""


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

VIEW_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")
"""Properties that make a view, and are operators for that reason."""

IGNORED = frozenset(" ".join(_TABLES["no_operators"].values()).split())
"""Functions that are no operators, by name without the overload."""

_VIEWS = frozenset(_TABLES["views"].split())
"""Operators whose result may alias an input: an identity on the input would end that."""

_BACKWARD_ENTRIES = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@functools.cache
def _view_property(func: Any) -> str | None:
    """The name of a view property from its getter; None for other getters."""
    for name in VIEW_PROPERTIES:
        # Not that of torch.Tensor, which a program may have replaced.
        if func == vars(_internals.TENSOR_BASE)[name].__get__:
            return name
    return None


def base_name(name: str) -> str:
    """An operator's name without its overload: ``add`` of ``add.Tensor``."""
    return name.partition(".")[0]


def name_of(func: Any) -> str:
    """The operator's name: ``conv2d``, ``add``, ``T``, ``my_op.default``; ``quantized::linear``,
    which is another operator than PyTorch's own of that name."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name == "__get__":
        return _view_property(func) or name
    library = _internals.library_of(func)
    is_taken = library not in ("aten", "prims", "prim") and _is_of_pytorch(base_name(name))
    return f"{library}::{name}" if is_taken else str(name)


def function_name(cls: type[torch.autograd.Function]) -> str:
    """The name of an ``autograd.Function`` as an operator: that of its class, behind that of its
    module if PyTorch has an operator of the name."""
    name = cls.__name__
    return f"{cls.__module__.rpartition('.')[2]}::{name}" if _is_of_pytorch(name) else name


@functools.cache
def _is_of_pytorch(name: str) -> bool:
    return hasattr(torch.ops.aten, name)


def kind_of(func: Any) -> Kind:
    """The treatment of calls of `func`."""
    if func in _BACKWARD_ENTRIES:
        return Kind.COMPOSITE
    name = name_of(func)
    base = name.partition(".")[0]
    if base in IGNORED or base.startswith(("_record_function", "sym_")):
        return Kind.IGNORED
    if _internals.is_registered(func) and _internals.namespace_of(func) == "prims":
        # PyTorch's kernels in Python, which its dispatcher calls, consist of them.
        return Kind.IGNORED
    is_python = isinstance(func, types.FunctionType) and not _internals.is_collective(func)
    return Kind.COMPOSITE if is_python else Kind.LEAF


def is_builtin(func: Any) -> bool:
    """True if `func` is an operator of ATen, in C++."""
    if isinstance(func, (_internals.OpOverload, _internals.OpOverloadPacket)):
        return _internals.namespace_of(func) == "aten"
    return not isinstance(func, (types.FunctionType, functools.partial, type))


def is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if the operator writes into its first input or an ``out=`` tensor."""
    base = name.partition(".")[0]
    if base.startswith("__"):
        return base == "__setitem__" or (
            base.startswith("__i") and base not in ("__invert__", "__index__", "__int__")
        )
    return base.endswith("_") or kwargs.get("out") is not None


def may_alias(name: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """True if an operator writes into an input, or may return a view of one."""
    return is_in_place(name, kwargs or {}) or base_name(name) in _VIEWS


class OpView:
    """A callable view of an operator whose own object has another name."""

    def __init__(self, func: Callable[..., Any], name: str) -> None:
        self.__name__ = name
        self.func = func

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator {self.__name__}>"


def op_view(func: Any, name: str) -> Any:
    """Return `func` if its ``__name__`` is the operator's name, else a view of that name."""
    return func if getattr(func, "__name__", None) == name else OpView(func, name)


TRANSPARENT = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "CheckpointWrapper",
    "OffloadWrapper",
}
"""Wrappers of PyTorch that ids do not mention: a model has the same ids without them."""


def is_transparent(module: nn.Module) -> bool:
    """True if `module` is a wrapper of PyTorch that ids do not mention."""
    cls = type(module)
    return cls.__name__ in TRANSPARENT and cls.__module__.startswith("torch.")


class Member(Reference):
    """A weak reference to a parameter or buffer of a model.

    Attributes:
        name: the path of a parameter, without transparent wrappers; "" for a buffer.
    """

    __slots__ = ("name",)

    name: str


class Constants:
    """The parameters and buffers of models, looked up once per call of a model.

    Attributes:
        is_filled: True if those of a model are known.
        labels: the outermost modules that have run, in order, and the beginning of their ids.
    """

    def __init__(self) -> None:
        # By identity: a module may have no hash.
        self._found: Any = WeakIdKeyDictionary()
        self.labels: Any = WeakIdKeyDictionary()
        self.is_filled = False

    def forget(self, module: nn.Module) -> None:
        """Forget a model's constants at a new call: it may have been changed."""
        # In this order: another thread may look up a constant meanwhile.
        self.is_filled = False
        self._found.pop(module, None)
        if self._found:
            self.is_filled = True

    def clear(self) -> None:
        """Forget all models."""
        self._found.clear()
        self.is_filled = False

    def has(self, running: Sequence[nn.Module], tensor: torch.Tensor) -> bool:
        """True if a tensor belongs to the outermost of the modules that run.

        Args:
            running: innermost first.
        """
        if self._member(running[-1], tensor) is not None:
            return True
        # ``torch.func.functional_call`` may have replaced a parameter with it since then.
        for own in _internals.own_members(running[0]):
            # Called for each input of each new operator: generators would cost frames.
            for member in own.values():
                if member is tensor:
                    return True
        return False

    def name(self, running: Sequence[nn.Module], tensor: torch.Tensor) -> ParameterName | None:
        """The path of a parameter in the outermost running module, or without one in the first
        model that holds it; None for other tensors."""
        if running and self.has(running, tensor) and self._member(running[-1], tensor) is None:
            self._found.pop(running[-1], None)
        for top in running[-1:] or list(self.labels):
            known = self._member(top, tensor)
            if known is not None:
                return ParameterName(known.name, self.labels.get(top)) if known.name else None
        return None

    def _member(self, top: nn.Module, tensor: torch.Tensor) -> Member | None:
        found: dict[int, Member] | None = self._found.get(top)
        if found is None:
            found = self._found[top] = _members(top)
            self.is_filled = True
        known = found.get(id(tensor))
        return known if known is not None and known() is tensor else None


def _members(top: nn.Module) -> dict[int, Member]:
    """The parameters and buffers of a module and of those in it, by identity.

    A shared one has its first name.
    """
    # Not named_parameters(), whose generators are nested as deep as the modules: the stack may lack
    # room for them.
    waiting, seen = [("", top)], set()
    found: dict[int, Member] = {}
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        parameters, buffers = _internals.own_members(module)
        for name, member in (*parameters.items(), *buffers.items()):
            if member is not None and id(member) not in found:
                known = found[id(member)] = Member(member, nothing)
                known.name = prefix + name if name in parameters else ""
        below = reversed([*module.named_children()])
        is_wrapper = is_transparent(module)
        waiting += [(prefix if is_wrapper else f"{prefix}{name}.", child) for name, child in below]
    return found


CONSTANTS = Constants()


def is_constant(tensor: Any, modules: Callable[[], list[nn.Module]]) -> bool:
    """True if `tensor` is a parameter or buffer of one of the running modules, or a variable.

    A variable is a leaf that requires a gradient, outside of modules; within a module such a leaf
    is an input.
    """
    if isinstance(tensor, nn.Parameter):
        return True
    if not isinstance(tensor, torch.Tensor):
        return False
    running = modules()
    if running:
        return CONSTANTS.has(running, tensor)
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:
        # Reading is_leaf raises for a view that was made and changed under no_grad.
        return False


def parameter_name(tensor: Any, modules: Callable[[], list[nn.Module]]) -> ParameterName | None:
    """The path of a parameter of the running modules that `tensor` is, or is a view of with as many
    elements; None for other tensors."""
    if not isinstance(tensor, torch.Tensor):
        return None
    running = modules()
    found = CONSTANTS.name(running, tensor)
    if found is not None or type(tensor) not in _internals.PLAIN_TENSORS or tensor.is_inference():
        return found
    base = _internals.base_of(tensor)
    if base is None or base.numel() != tensor.numel():
        return None
    return CONSTANTS.name(running, base)
