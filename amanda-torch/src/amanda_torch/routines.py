"""Routines and automatic differentiation: isolation, substitution, whole-operator gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from amanda.action import Action, ActionKind
from amanda.errors import InPlaceWarning, RoutineResultError
from amanda_torch import _internals
from amanda_torch.scopes import LOCAL

Gradients = Callable[[list[Any]], Sequence[Any]]


class AmandaSubstitute(torch.autograd.Function):
    """The identity, except that the value is another one: straight-through."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.dtype = original.dtype
        # The list keeps autograd from looking at the new value.
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        return None if tangent is None else tangent.view_as(tangent)


class AmandaSubstituteInTransform(torch.autograd.Function):
    """:class:`AmandaSubstitute` in the form that functorch transforms need (three times dearer)."""

    @staticmethod
    def forward(original: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.view_as(new)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, original: Any, new: Any) -> Any:
        return AmandaSubstituteInTransform.apply(original, new), in_dims[1]

    @staticmethod
    def jvp(ctx: Any, original_tangent: Any, new_tangent: Any) -> Any:
        return original_tangent.view_as(original_tangent)


class AmandaGradients(torch.autograd.Function):
    """The identity on several tensors; all their gradients meet in one call of `change`."""

    @staticmethod
    def forward(ctx: Any, change: Gradients, *tensors: torch.Tensor) -> Any:
        ctx.change = change
        ctx.set_materialize_grads(False)
        # An alias that is no view: in-place operators stay legal on it.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *ctx.change(list(gradients)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return _passed(tangents)


class Replacement(Protocol):
    """What supplies the gradients of a whole operator."""

    @property
    def applies(self) -> bool:
        """Whether it does so in the backward pass that is running."""

    def __call__(self, grad_outputs: list[Any]) -> list[Any]:
        """The gradients of the operator's tensor inputs."""


class AmandaOperator(torch.autograd.Function):
    """The outputs of an operator, with two ways back: the operator's own and a tool's.

    The second goes straight to the operator's inputs. It is taken while its
    scope is open; a backward pass after that is vanilla.
    """

    @staticmethod
    def forward(ctx: Any, vjp: Replacement, count: int, *tensors: torch.Tensor) -> Any:
        ctx.vjp = vjp
        ctx.count = count
        ctx.inputs = len(tensors) - count
        outputs = tuple(output.detach() for output in tensors[:count])
        ctx.mark_non_differentiable(*[o for o in outputs if not _is_differentiable(o)])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.vjp.applies:
            return (None, None, *[None] * ctx.count, *ctx.vjp(list(gradients)))
        return (None, None, *gradients, *[None] * ctx.inputs)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: Any) -> Any:
        return _passed(tangents[: ctx.count])


def _passed(tangents: Sequence[Any]) -> tuple[Any, ...]:
    """Tangents handed on; forward-mode AD does not take them as they are."""
    return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


OWN_FUNCTIONS = (
    AmandaSubstitute,
    AmandaSubstituteInTransform,
    AmandaGradients,
    AmandaOperator,
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
    if transformed and _is_differentiable(new):
        passed: torch.Tensor = AmandaSubstituteInTransform.apply(old, new)
        return passed
    if not (torch.is_grad_enabled() and old.requires_grad and _is_differentiable(new)):
        return new.detach() if new.requires_grad else new
    if _internals.shares_storage(old, new):
        # Else a later in-place operator would change what others have saved.
        new = new.clone()
    result: torch.Tensor = _internals.apply_function(AmandaSubstitute, old, [new.detach()])
    return result


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
