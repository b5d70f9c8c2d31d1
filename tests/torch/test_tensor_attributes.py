"""What takes the place of a tensor has its class and the Python attributes that it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from tests.torch.support import On, after, applied, before


class Labelled(torch.Tensor):
    """A tensor of a class that labels the results of operators, but for those of ``clone``."""

    label: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(each, Labelled) and func is not torch.Tensor.clone:
                each.label = "made"
        return result


def labelled() -> Labelled:
    x = torch.linspace(0.5, 2, 4).as_subclass(Labelled)
    x.label = "given"
    return x


def clone(*tensors: Any) -> list[Any]:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_substituted_output_keeps_attributes(requires_grad: bool) -> None:
    """What a routine returns for an output has the attributes that its class gave the output."""
    x = labelled().requires_grad_(requires_grad)
    with applied(On(mul=after(clone), chunk=after(clone))):
        for _ in range(3):
            y = x * 2
            first, second = y.chunk(2)
            assert type(y) is type(first) is type(second) is Labelled
            assert y.label == first.label == second.label == "made"


@pytest.mark.usefixtures("interceptor")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("make", [labelled, lambda: torch.linspace(0.5, 2, 4)])
def test_substituted_input_keeps_attributes(make: Callable[[], Any], requires_grad: bool) -> None:
    """An operator that returns its input as it is returns a substitute with its attributes."""
    x = make().requires_grad_(requires_grad)
    x.label, x.meaning = "given", "ours"
    with applied(On(contiguous=before(clone))):
        for _ in range(3):
            assert x.contiguous().meaning == "ours"


def test_function_reads_attributes_of_a_substituted_parameter() -> None:
    """The code of an ``autograd.Function`` finds the attributes of a parameter, as Megatron's."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(weight)
            return x * weight * weight.scale

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return gradient * weight * weight.scale, None

    weight: Any = nn.Parameter(torch.ones(4))
    weight.scale = 3
    x = torch.ones(4, requires_grad=True)
    with applied(On(Scaled=before(clone))):
        Scaled.apply(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [3] * 4


def test_attributes_of_a_routine_stay() -> None:
    """Attributes that a routine has set stay; its own tensor gets none that it did not set."""
    x: Any = torch.ones(4)
    ours: Any = torch.zeros(4)
    x.label, x.other = "given", "other"
    ours.label, ours.own = "ours", "own"
    with applied(On(contiguous=before(lambda _: [ours]))):
        y = x.contiguous()
    assert vars(y) == {"label": "ours", "own": "own", "other": "other"}
    assert vars(ours) == {"label": "ours", "own": "own"}


def test_substituted_output_of_a_class_can_be_written_into() -> None:
    """A result of a class that a routine has returned is no view: it can be changed in place."""
    x = labelled().requires_grad_()
    with applied(On(mul=after(clone))):
        y = x * 2
        y.sigmoid_()
        y.sum().backward()
    assert y.label == "made"


@pytest.mark.parametrize("operator", ["silu", "tensor_split"])
@pytest.mark.parametrize("method", ["insert_before_backward_op", "replace_backward_op"])
def test_whole_operators_keep_class_and_attributes(operator: str, method: str) -> None:
    """Outputs whose gradients a tool gets or computes keep their class and attributes."""

    def run() -> Any:
        x = labelled().requires_grad_() * 1
        y = nn.functional.silu(x) if operator == "silu" else x.tensor_split(2)
        return [(type(each), vars(each)) for each in ([y] if operator == "silu" else y)]

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == operator:
            getattr(context, method)(lambda *gradients: gradients)

    expected = run()
    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with applied(tool):
        assert run() == expected
