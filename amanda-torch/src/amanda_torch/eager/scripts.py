"""TorchScript: calls of its functions and modules are counted, as is what differentiates them."""

from __future__ import annotations

import functools
from typing import Any

from amanda.python.patching import PatchSet
from amanda_torch import _internals
from amanda_torch.autograd.leaves import is_owned
from amanda_torch.autograd.nodes import new_nodes
from amanda_torch.eager.interceptors import LOCAL
from amanda_torch.operators.calls import tensors_of
from amanda_torch.routines import RoutineDispatcher

_COUNTED = "amanda_script"
"""Key in the metadata of nodes that are counted when a backward pass runs them."""


def patch(dispatcher: RoutineDispatcher, patches: PatchSet) -> None:
    """Count from now on."""
    for kind, cls in _internals.SCRIPTED.items():
        patches.wrap(cls, "__call__", functools.partial(_counted, dispatcher, kind))


def _counted(dispatcher: RoutineDispatcher, kind: str, vanilla: Any) -> Any:
    """Return the ``__call__`` of a class of TorchScript's.

    Args:
        kind: what is called, in the plural.
    """
    count = functools.partial(_count_backward, dispatcher)

    def __call__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807
        interceptor = LOCAL.interceptor
        if interceptor is None or not interceptor.is_listening():
            return vanilla(*args, **kwargs)
        dispatcher.not_seen(f"TorchScript {kind}: their operators run in C++")
        start = _internals.sequence_number()
        result = vanilla(*args, **kwargs)
        if any(scope.analyses_backward() for scope in dispatcher.scopes()):
            for node in new_nodes(tensors_of(result), start):
                # Several calls may lead to the accumulation of one leaf.
                if _COUNTED not in node.metadata:
                    node.metadata[_COUNTED] = True
                    node.register_hook(count)
        return result

    return __call__


def _count_backward(dispatcher: RoutineDispatcher, *_: Any) -> None:
    """A posthook."""
    node = _internals.current_node()
    if not (dispatcher.is_paused() or is_owned(node)):
        dispatcher.not_seen("backward operators of TorchScript")
