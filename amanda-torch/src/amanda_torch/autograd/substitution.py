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

_OF_GRADIENTS = (ActionKind.BEFORE_BACKWARD_OP, ActionKind.AFTER_BACKWARD_OP)


def reason_to_keep(old: Any, action: Action) -> str:
    """The reason why a routine cannot replace a tensor, for the count of unseen executions; "" if
    it can.

    Args:
        old: None where the routine supplies a tensor that was absent.
    """
    if type(old) in _internals.PLAIN and not (old is not None and old.is_nested):
        return ""
    if _internals.refuses_reads(old):
        # Such a tensor also collects the gradients of the samples.
        return f"values that routines returned for an {type(old).__name__}"
    passes_gradient = torch.is_grad_enabled() and not action.differentiable
    if passes_gradient and _internals.is_strided_nested(old) and old.requires_grad:
        return "values that routines returned for nested tensors with gradients"
    return ""


def substitute(old: Any, new: torch.Tensor, action: Action) -> torch.Tensor:
    """The tensor to use where a routine returned `new` for `old` (contract rule 7).

    Args:
        old: None where the routine supplies a tensor that was absent.

    Returns:
        `new` with the gradient passing straight through to `old`, unless the action is
        differentiable.

    Raises:
        RoutineResultError: the shape differs, so that the gradient cannot pass; or a gradient has
            another layout or device, which autograd takes from no hook.
    """
    if old is None:
        return new
    if action.kind in _OF_GRADIENTS and (old.layout, old.device) != (new.layout, new.device):
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must keep layout and device of the gradient "
            f"that it replaces, {old.layout} on {old.device}; got {new.layout} on {new.device}"
        )
    if action.differentiable:
        return _with_attributes(new, old, new)
    nested = old.is_nested or new.is_nested
    if not nested and old.shape != new.shape:
        raise RoutineResultError(
            f"{action.routine} at op {action.op_id} must keep the shape of what it replaces, "
            f"{tuple(old.shape)}, since the gradient passes straight through; got "
            f"{tuple(new.shape)}. Record it under amanda.ad_enabled() to change the shape"
        )
    if action.kind in _OF_GRADIENTS:
        new = new.to(old.dtype)
    return _with_attributes(_passing_through(old, new), old, new)


def _passing_through(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, with the gradient passing straight through to `old`."""
    transformed = _internals.in_functorch() or _internals.in_forward_ad()
    if transformed and is_differentiable(new):
        passed: torch.Tensor = AmandaSubstituteInTransform.apply(old, new)
        return passed
    if not (torch.is_grad_enabled() and old.requires_grad and is_differentiable(new)):
        return _value_of(new) if new.requires_grad else new
    value = new.detach()
    if _internals.shares_storage(old, new):
        # A later in-place operator on the result would change `old`, which autograd may have saved.
        value = value.clone()
    result: torch.Tensor = _internals.apply_function(AmandaSubstitute, old, [_as_value(new, value)])
    return result


def _value_of(new: torch.Tensor) -> torch.Tensor:
    """A tensor of the same class and values, outside of autograd's graph."""
    return _as_value(new, new.detach())


def _as_value(new: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, which has no place in autograd's graph, as a tensor of the class of `new`.

    As :func:`of_class`, but no view: PyTorch forbids to write into a view that an
    ``autograd.Function`` returns.
    """
    cls = type(new)
    is_other = type(value) is not cls and _internals.overrides(new)
    return _internals.make_subclass(cls, value) if is_other else value


def _with_attributes(value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`value` with the Python attributes of `old` that it lacks, which the program may read.

    Args:
        value: takes the place of `old`.
        new: what the routine has returned.
    """
    missing = _attributes_lacking(value, old)
    if missing and value is new and not new.requires_grad:
        # It may be a tensor of the tool's, or another one of the program's.
        value = _value_of(new)
        missing |= vars(new)
    vars(value).update(missing)
    return value


def _attributes_lacking(value: torch.Tensor, old: torch.Tensor) -> dict[str, Any]:
    """The Python attributes of a tensor that its substitute lacks.

    Attributes of PyTorch's own classes are left out: fake tensors keep caches in them.
    """
    cls = type(old)
    if cls in _internals.PLAIN_TENSORS:
        is_kept = type(value) in _internals.PLAIN_TENSORS
    else:
        is_kept = type(value) is cls and not cls.__module__.startswith("torch.")
    if not (is_kept and vars(old)):
        return {}
    has = vars(value)
    return {name: item for name, item in vars(old).items() if name not in has}


def alias_for(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, an alias of `old` that takes its place, with its class and its attributes."""
    alias = of_class(old, value)
    vars(alias).update(_attributes_lacking(alias, old))
    return alias


def of_class(new: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, which PyTorch has made from `new`, with the class of `new`: classes that override
    operators would have set it, but overriding is off here."""
    cls = type(new)
    return value.as_subclass(cls) if type(value) is not cls and _internals.overrides(new) else value


def write_back(target: torch.Tensor, value: torch.Tensor, differentiable: bool) -> None:
    """Write the value that a routine returned into `target`, the result of an in-place operator.

    `target` keeps its place in autograd's graph, so that the gradient passes straight through.

    Args:
        differentiable: True to record the copy for differentiation.
    """
    if differentiable:
        target.copy_(value)
        return
    node = target.grad_fn
    saved = node is not None and _internals.saves_result(node)
    if saved and not _internals.is_view(target) and not _internals.is_shared(target):
        # The operator's backward needs the values that it has saved (exp_, sigmoid_): they keep
        # the storage, and `target` gets another one.
        target.data = value.detach().to(target.dtype)
    else:
        _internals.without_gradients(target.copy_, value)
