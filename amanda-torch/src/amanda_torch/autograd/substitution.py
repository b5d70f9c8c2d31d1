"""Substitution of a tensor by the result of a routine, in the autograd graph."""

from __future__ import annotations

from typing import Any

import torch

from amanda.errors import RoutineResultError
from amanda.interface.action import Action, ActionKind
from amanda_torch import _internals
from amanda_torch.autograd.functions import (
    AmandaSubstitute,
    AmandaSubstituteInTransform,
    is_differentiable,
)


def substitute(old: Any, new: torch.Tensor, action: Action) -> torch.Tensor:
    """What stands for `new` in the model where a routine returned it in place of `old`.

    Raises:
        RoutineResultError: the shape differs, so that the gradient cannot pass.
    """
    if action.differentiable or old is None:
        return new
    nested = old.is_nested or new.is_nested
    if not nested and old.shape != new.shape:
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must keep the shape of what it replaces, "
            f"{tuple(old.shape)}, since the gradient passes straight through; got "
            f"{tuple(new.shape)}. Record it under amanda.ad_enabled() to change the shape"
        )
    if action.kind in (ActionKind.BEFORE_BACKWARD_OP, ActionKind.AFTER_BACKWARD_OP):
        new = new.to(old.dtype)
    transformed = _internals.in_functorch() or _internals.in_forward_ad()
    if transformed and is_differentiable(new):
        passed: torch.Tensor = AmandaSubstituteInTransform.apply(old, new)
        return passed
    if not (torch.is_grad_enabled() and old.requires_grad and is_differentiable(new)):
        return new.detach() if new.requires_grad else new
    if _internals.shares_storage(old, new):
        # Else a later in-place operator would change what others have saved.
        new = new.clone()
    result: torch.Tensor = _internals.apply_function(AmandaSubstitute, old, [new.detach()])
    return result


def write_back(target: torch.Tensor, value: torch.Tensor, differentiable: bool) -> None:
    """Give `target`, the result of an in-place operator, the value of a routine.

    Its place in autograd's graph stays, so that the gradient passes straight through.
    """
    if differentiable:
        target.copy_(value)
        return
    node = target.grad_fn
    with torch.no_grad():
        saved = node is not None and _internals.saves_result(node)
        if saved and not _internals.is_view(target) and not _internals.is_shared(target):
            # The operator's own backward needs the old values: leave it their storage.
            target.data = value.detach().to(target.dtype)
        else:
            target.copy_(value)
