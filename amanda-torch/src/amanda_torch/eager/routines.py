"""The context in which an instrumentation routine is called."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from amanda.errors import InPlaceWarning
from amanda.interface.action import Action
from amanda_torch import _internals
from amanda_torch.thread.local import LOCAL


class RoutineCall:
    """Around a routine: vanilla, isolated from AD, and watched for in-place changes.

    It does what ``muted`` does by itself: every routine at every execution comes by.
    """

    __slots__ = ("_action", "_forward", "_grad", "_interceptor", "_isolated", "_tensors")

    def __init__(self, action: Action, selected: Sequence[Any], isolated: bool) -> None:
        self._action = action
        self._isolated = isolated
        self._tensors = _versions(selected) if isolated and selected else ()

    def __enter__(self) -> None:
        interceptor = self._interceptor = LOCAL.interceptor
        if interceptor is not None:
            interceptor.muted += 1
            interceptor.stale = True
        if self._isolated:
            self._grad = torch.is_grad_enabled()
            _internals.set_grad_enabled(False)
            self._forward = _internals.in_forward_ad()
            if self._forward:
                _internals.set_forward_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        if self._isolated:
            _internals.set_grad_enabled(self._grad)
            if self._forward:
                _internals.set_forward_grad_enabled(True)
        if self._interceptor is not None:
            self._interceptor.unmute()
        if not self._tensors:
            return
        tensors, self._tensors = self._tensors, ()
        if raised[0] is None and any(_internals.version_of(t) != v for t, v in tensors):
            warn_of_change(self._action)


def warn_of_change(action: Action) -> None:
    """Say that a routine has changed a tensor of the model in place."""
    warnings.warn(
        f"{action.routine} changed a tensor of op {action.op_id} in place; "
        "the change outlives the scope if it is a parameter, and breaks the backward "
        "pass if autograd has saved it: return a new tensor instead",
        InPlaceWarning,
        stacklevel=6,
    )


def _versions(selected: Sequence[Any]) -> Sequence[tuple[torch.Tensor, int]]:
    if _internals.in_functorch():
        return ()
    return [
        (tensor, _internals.version_of(tensor))
        for tensor in selected
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    ]
