"""Routines and automatic differentiation: isolation, substitution, whole-operator gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

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
        ctx.mark_non_differentiable(*[o for o in outputs if not is_differentiable(o)])
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


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether autograd differentiates tensors of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()
