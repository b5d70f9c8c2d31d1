"""An independent account of which operators run, to hold the driver's against.

Written from the definition of an operator in the driver's documents alone: it shares no
code with the driver.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, redispatch_function

VIEWS = {
    vars(torch.Tensor).get(name, getattr(torch.Tensor, name)).__get__: name
    for name in ("T", "mT", "H", "mH", "real", "imag")
}
NO_OPS = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset element_size
    is_contiguous is_floating_point is_complex is_same_size is_nonzero get_device
    item tolist numpy __len__ __bool__ __int__ __float__ __index__ __hash__ __repr__ __array__
    __format__ __get__ __set__ backward requires_grad_ retain_grad register_hook
    _set_grad_enabled _record_function_enter_new _record_function_exit untyped_storage data_ptr
    is_inference result_type can_cast promote_types is_pinned is_shared has_names
    """.split()
)


class Reference(TorchFunctionMode):
    """Counts the leaf operators that torch-function events report."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self._running: list[Any] = []

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = VIEWS.get(func) or getattr(func, "__name__", type(func).__name__)
        if name in NO_OPS:
            # The mode is off in here: what a backward pass runs is not reported.
            return func(*args, **kwargs)
        composite = isinstance(func, types.FunctionType)
        if composite and not (self._running and self._running[-1] is func):
            # A C-level twin may report the very same function: that one is the leaf.
            self._running.append(func)
            try:
                with self:
                    return redispatch_function(func, types_, args, kwargs)
            finally:
                self._running.pop()
        self.ops[name] += 1
        self._running.append(None)
        try:
            return func(*args, **kwargs)
        finally:
            self._running.pop()


@contextlib.contextmanager
def reference() -> Iterator[Reference]:
    """The operators of the with-block, with the native fast paths that a mode turns off."""
    vanilla = torch.overrides.has_torch_function

    def has_torch_function(values: Any) -> bool:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        asking = frame.f_back.f_globals["__name__"]
        return not asking.startswith("torch.nn.modules") and bool(vanilla(values))

    torch.overrides.has_torch_function = has_torch_function
    try:
        with Reference() as mode:
            yield mode
    finally:
        torch.overrides.has_torch_function = vanilla


def node_name(node: Any) -> str:
    """An autograd node's name without its C++ namespace."""
    return str(node.name()).split("::")[-1]


def nodes_before(*tensors: torch.Tensor) -> collections.Counter[str]:
    """Names of all autograd nodes that the gradient of `tensors` goes through."""
    waiting = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return collections.Counter(node_name(node) for node in seen)
