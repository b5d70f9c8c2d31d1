"""Masked-weight training: the gradients are those of the model with the masks written in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.mapping import MappingTool
from tests.tensorflow import support
from tests.tensorflow.support import RATE, Array, Training


def mask_of(weight: Array) -> Array:
    """One for the larger half of the magnitudes, zero for the rest."""
    magnitudes = np.abs(np.asarray(weight))
    return (magnitudes >= np.median(magnitudes)).astype(np.float64)


class Masks(amanda.Tool):
    """Masks the weights of convolutions and products, and their gradients.

    Args:
        routine: what a mask is applied by.
    """

    def __init__(self, routine: Callable[..., Any]) -> None:
        super().__init__()
        self.routine = routine
        self.masks: dict[str, Array] = {}
        self.depends_on(MappingTool.standard())
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_backward, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        if context["op_type"] in ("conv2d", "linear"):
            mask = mask_of(context.get_value(context["weight_index"]))
            context["mask"] = self.masks[context["op_type"]] = mask
            context.insert_before_op(self.routine, inputs=["weight"], mask=mask)

    def look_backward(self, context: amanda.OpContext) -> None:
        if context["mask"] is not None and "weight" in (context["grad_input_roles"] or {}):
            context.insert_after_backward_op(
                self.routine, grad_inputs=["weight"], mask=context["mask"]
            )


def multiply(tensor: Any, mask: Array) -> Any:
    """A mask, applied at run time."""
    return tensor * mask


@amanda.traceable
def traced(tensor: Any, mask: Array) -> Any:
    """A mask, applied by the graph itself."""
    return tensor * mask


def straight_through(weight: Any, mask: Array) -> Any:
    """A masked weight whose gradient passes to the weight as it is."""
    tensor = tf.convert_to_tensor(weight)
    return tensor + tf.stop_gradient(tensor * mask - tensor)


class Reference(support.Eager):
    """The model with the masks written into it, and into the update of its weights."""

    masks: Sequence[Array] = ()

    def start(self, x: Array, weights: Sequence[Array]) -> None:
        super().start(x, weights)
        self.masks = [mask_of(weight) for weight in weights]
        build = self.build
        self.build = lambda x, *ws: build(
            x, *(straight_through(w, m) for w, m in zip(ws, self.masks, strict=True))
        )

    def step(self) -> list[Array]:
        loss, (dx, *found) = self.compute()
        masked = [g * mask for g, mask in zip(found, self.masks, strict=True)]
        for variable, gradient in zip(self.variables, masked, strict=True):
            variable.assign_sub(RATE * gradient)
        return [tensor.numpy() for tensor in (loss, dx, *masked)]


@pytest.mark.parametrize("placement", support.PLACEMENTS)
@pytest.mark.parametrize("routine", [multiply, traced])
def test_masked_training(placement: type[Training], routine: Callable[..., Any]) -> None:
    """Forward, dx and dw of several steps equal the reference; the masks stay as they were
    at the first step while the weights move."""
    x, weights = support.data()
    expected = Reference(support.network, x, weights).steps(3)
    training = placement(support.network, x, weights)
    tool = Masks(routine)
    with amanda.apply(tool):
        actual = training.steps(3)
    support.assert_close(actual, expected)
    masks = [tool.masks["conv2d"], tool.masks["linear"]]
    support.assert_same_bits(masks, [mask_of(weight) for weight in weights])


@pytest.mark.parametrize("placement", support.PLACEMENTS)
def test_training_goes_on_without_the_tool(placement: type[Training]) -> None:
    """After the scope training goes on from the weights that it has reached, unmasked."""
    x, weights = support.data()
    reference = Reference(support.network, x, weights)
    reached = reference.steps(2)[-1]
    expected = support.Eager(support.network, x, reached).steps(2)
    training = placement(support.network, x, weights)
    with amanda.apply(Masks(multiply)):
        training.steps(2)
    support.assert_close(training.steps(2), expected)


class ForwardMasks(Masks):
    """Masks the weights only."""

    def look_backward(self, context: amanda.OpContext) -> None:
        pass


@pytest.mark.parametrize("placement", support.PLACEMENTS)
@pytest.mark.parametrize("routine", [multiply, traced])
def test_second_order(placement: type[Training], routine: Callable[..., Any]) -> None:
    """Gradients of gradients equal those of the model with the masks written into it."""
    x, weights = support.data()
    expected = Written(support.network, x, weights, second=True).step()
    with amanda.apply(ForwardMasks(routine)):
        actual = placement(support.network, x, weights, second=True).step()
    support.assert_close(actual, expected)


class Written(Reference):
    """The model with the masks written into it; the gradients stay as they are."""

    step = support.Eager.step


@pytest.mark.parametrize("placement", support.PLACEMENTS)
def test_differentiable_masks(placement: type[Training]) -> None:
    """Under ad_enabled the gradient goes through the multiplication itself."""
    x, weights = support.data()
    masks = [mask_of(weight) for weight in weights]

    def masked(x: Any, *variables: Any) -> Any:
        pairs = zip(variables, masks, strict=True)
        return support.network(x, *(tf.convert_to_tensor(w) * m for w, m in pairs))

    expected = support.Eager(masked, x, weights).step()
    with amanda.ad_enabled(), amanda.apply(ForwardMasks(multiply)):
        actual = placement(support.network, x, weights).step()
    support.assert_close(actual, expected)
