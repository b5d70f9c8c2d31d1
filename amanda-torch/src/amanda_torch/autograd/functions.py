"""The ``autograd.Function``s that the driver inserts: straight-through values, gathered gradients.

``is_own`` in :mod:`amanda_torch.autograd.nodes` skips their nodes, so that they are not backward
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from amanda_torch import _internals

Gradients = Callable[[list[Any]], Sequence[Any]]
"""Changes the gradients of several tensors together."""


class AmandaSubstitute(torch.autograd.Function):
    """Another value in place of a tensor; the gradient passes straight through to the tensor.

    Its arguments are the tensor and a list with the other value.
    """

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.dtype, ctx.device = original.dtype, original.device
        # Autograd looks at tensors among the arguments, not at those in a list: the value is
        # taken as it is, also if it is a view or needs a gradient.
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.device, ctx.dtype), None


class AmandaSubstituteInTransform(torch.autograd.Function):
    """:class:`AmandaSubstitute` in the form that functorch transforms need.

    They take no tensor that is not an argument, and want ``setup_context`` and ``vmap``. It
    takes three times as long.
    """

    @staticmethod
    def forward(original: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        # PyTorch requires the tangent of a view to be a view of the tangent of `new`, if there is
        # one.
        return new.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype, ctx.device = inputs[0].dtype, inputs[0].device

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.device, ctx.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, original: Any, new: Any) -> Any:
        return AmandaSubstituteInTransform.apply(original, new), in_dims[1]

    @staticmethod
    def jvp(ctx: Any, original_tangent: Any, new_tangent: Any) -> Any:
        return original_tangent.view_as(original_tangent)


class AmandaGradients(torch.autograd.Function):
    """The identity on several tensors; `change` is called once with all their gradients.

    If `change` has an attribute ``skipped``, it returns that many gradients of preceding tensors,
    too.
    """

    @staticmethod
    def forward(ctx: Any, change: Gradients, *tensors: torch.Tensor) -> Any:
        ctx.change, ctx.skipped = change, getattr(change, "skipped", 0)
        ctx.set_materialize_grads(False)
        # detach() makes an alias that autograd takes for no view, so that in-place operators
        # stay legal on it: on the views of a function with several outputs they are not.
        with _internals.no_dispatch_modes():
            return tuple(tensor.detach() for tensor in tensors[ctx.skipped :])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *ctx.change(list(gradients)))


class AmandaViews(AmandaGradients):
    """:class:`AmandaGradients` for views, into which PyTorch refuses to write in place.

    With aliases that are no views, the base would get the written values, and not their gradient.
    """

    @staticmethod
    def forward(ctx: Any, change: Gradients, *tensors: torch.Tensor) -> Any:
        ctx.change = change
        ctx.set_materialize_grads(False)
        with _internals.no_dispatch_modes():
            # Not view_as(), which may change the stride of a dimension of one element.
            return tuple(tensor[...] for tensor in tensors)


class Replacement(Protocol):
    """Supplies the gradients of a whole operator."""

    @property
    def applies(self) -> bool:
        """True if it supplies them in the backward pass that is running."""

    def __call__(self, grad_outputs: list[Any]) -> list[Any]:
        """The gradients of the operator's tensor inputs."""


class AmandaOperator(torch.autograd.Function):
    """The outputs of an operator, whose gradients pass through the operator's nodes or a tool's.

    The tool's node leads straight to the operator's inputs. It is used while its scope is open; a
    backward pass after that is vanilla. The arguments are the replacement, the number of outputs,
    the outputs, and the inputs.
    """

    @staticmethod
    def forward(ctx: Any, vjp: Replacement, count: int, *tensors: torch.Tensor) -> Any:
        with _internals.no_dispatch_modes():
            return TracedOperator.forward(ctx, vjp, count, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.vjp.applies:
            return TracedOperator.backward(ctx, *gradients)
        return (None, None, *gradients, *[None] * ctx.inputs)


class TracedGradients(AmandaGradients):
    """:class:`AmandaGradients` for a compiler that traces it: its dispatch modes stay on."""

    @staticmethod
    def forward(ctx: Any, change: Gradients, *tensors: torch.Tensor) -> Any:
        ctx.change = change
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)


class TracedOperator(torch.autograd.Function):
    """:class:`AmandaOperator` for a compiler that traces it, always with the tool's gradients."""

    @staticmethod
    def forward(ctx: Any, vjp: Gradients, count: int, *tensors: torch.Tensor) -> Any:
        ctx.vjp, ctx.count, ctx.inputs = vjp, count, len(tensors) - count
        outputs = tuple(output.detach() for output in tensors[:count])
        ctx.mark_non_differentiable(*[o for o in outputs if not is_differentiable(o)])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, *[None] * ctx.count, *ctx.vjp(list(gradients)))


OWN_FUNCTIONS = (
    AmandaSubstitute,
    AmandaSubstituteInTransform,
    AmandaGradients,
    AmandaViews,
    AmandaOperator,
    TracedGradients,
    TracedOperator,
)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """True if autograd differentiates tensors of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()
