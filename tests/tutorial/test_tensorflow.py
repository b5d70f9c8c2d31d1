"""The tutorial's cells for TensorFlow, and the paper's pruning tool on both frameworks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import amanda
from amanda.tools.mapping import MappingTool
from tests.tensorflow import support
from tests.tensorflow.support import Training, tf1
from tests.tutorial import test_listings as listings

# -- cells 9, 10 and 14 -------------------------------------------------------


class CountOPTool(amanda.Tool):
    """Cell 9, as printed but for the layout."""

    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__()
        self.counter = 0
        self.backward_counter = 0
        self.op_name = op_name
        self.backward_op_name = backward_op_name
        self.add_inst_for_op(self.callback)
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if self.op_name in op.name:
            context.insert_before_op(self.counter_op)

    def backward_callback(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op()
        if self.backward_op_name in op.name:
            context.insert_after_backward_op(self.counter_backward_op)

    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    def counter_backward_op(self, *inputs: Any) -> Any:
        self.backward_counter += 1
        return inputs


class TracedCountOPTool(CountOPTool):
    """The same with routines that are traced: their Python runs when the graph is rewritten."""

    @amanda.traceable
    def counter_op(self, *inputs: Any) -> Any:
        self.counter += 1
        return inputs

    @amanda.traceable
    def counter_backward_op(self, *inputs: Any) -> Any:
        self.backward_counter += 1
        return inputs


def run_cell(tool: CountOPTool) -> tuple[int, int]:
    """Cell 10, with the model and the spellings of today; smaller images."""
    with amanda.tool.apply(tool):
        model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))
        x = tf.random.uniform(shape=[2, 64, 64, 3])
        y = model(x)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            g = tf.gradients(y, x)
            session.run(g)
    return tool.counter, tool.backward_counter


def rewrites(tool: CountOPTool, wanted: list[Any]) -> tuple[int, int]:
    """Cell 10 as the code of 2022 ran it: each of two runs rewrites all that the graph holds.

    Args:
        wanted: all outputs and gradients in the graph, to which those of one more model are
            added. A run instruments what it needs; so that it is all of it, all is fetched.
    """
    with amanda.tool.apply(tool), amanda.cache_disabled():
        model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))
        x = tf.random.uniform(shape=[2, 64, 64, 3])
        y = model(x)
        wanted.append(y)
        with amanda.disabled():
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
        session.run(wanted)
        weights = [variable.value for variable in model.trainable_variables]
        wanted.append(tf.gradients(y, [x, *weights]))
        session.run(wanted)
        session.close()
    return tool.counter, tool.backward_counter


@pytest.mark.slow
def test_the_printed_figures_count_rewrites() -> None:
    """106 and 53, then 212 and 159: both runs rewrite the graph, the gradients come between
    them, and the second model is added to the graph of the first."""
    wanted: list[Any] = []
    with tf.Graph().as_default():
        for expected in ((106, 53), (212, 159)):
            tool = TracedCountOPTool("Conv2D", "Conv2DBackpropFilter")
            assert rewrites(tool, wanted) == expected


@pytest.mark.slow
def test_the_figures_of_executions() -> None:
    """Run-time routines count what is executed: 53 convolutions, and no gradient of a weight,
    since only that of x is fetched."""
    with tf.Graph().as_default():
        for _ in range(2):
            assert run_cell(CountOPTool("Conv2D", "Conv2DBackpropFilter")) == (53, 0)


# -- Listings 1 and 6 on both frameworks ---------------------------------------


def tf_type(context: amanda.OpContext) -> None:
    """As printed in Listing 6."""
    op = context.get_op()
    context["type"] = op.type.lower()
    if not context.is_forward():
        backward_op = context.get_backward_op()
        if backward_op.type == "Conv2DBackpropFilter":
            context["backward_type"] = "conv2d_backward"


def tf_roles(context: amanda.OpContext) -> None:
    """What the operator of that type produces, so that the tool can ask for it by role."""
    if context["backward_type"] == "conv2d_backward":
        context["grad_input_roles"] = {"weight": 0}


def tf_get_shape(context: amanda.OpContext) -> None:
    """The weight's shape as (out, in, height, width); TensorFlow keeps it as HWIO."""
    if context.is_forward() and context["type"] == "conv2d":
        height, width, inputs, outputs = context.get_value(1).shape
        context["shape"] = (outputs, inputs, height, width)


def tf_get_mask(context: amanda.OpContext) -> None:
    """The mask of a weight, from its value: it stays as it is while the weight trains."""
    if context.is_forward() and context["type"] == "conv2d":
        context["new_mask"] = magnitude_mask(np.asarray(context.get_value(1)))


def magnitude_mask(weight: Any, sparsity: float = 0.5) -> Any:
    """Zero where the smallest magnitudes are, one elsewhere."""
    order = np.argsort(np.abs(weight), axis=None, kind="stable")
    mask = np.ones(weight.size, weight.dtype)
    mask[order[: int(sparsity * weight.size)]] = 0
    return mask.reshape(weight.shape)


def torch_get_shape(context: amanda.OpContext) -> None:
    """The weight's shape as (out, in, height, width), as PyTorch has it."""
    if context.is_forward() and context["type"] == "conv2d":
        context["shape"] = tuple(context.get_inputs()[1].shape)


def torch_get_mask(context: amanda.OpContext) -> None:
    """The mask of a weight."""
    if context.is_forward() and context["type"] == "conv2d":
        context["new_mask"] = listings.magnitude_mask(context.get_inputs()[1])


class PruningTool(listings.Listing1):
    """Listings 1 and 6: one class for both frameworks, without a branch on them."""

    def __init__(self) -> None:
        self.depends_on(
            MappingTool(
                rules=[
                    ["tensorflow", tf_type],
                    ["tensorflow", tf_roles],
                    ["tensorflow", tf_get_shape],
                    ["tensorflow", tf_get_mask],
                    ["pytorch", listings.torch_type],
                    ["pytorch", torch_get_shape],
                    ["pytorch", torch_get_mask],
                ]
            )
        )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.add_inst_for_op(self.instrumentation)
        self.add_inst_for_op(self.backward_instrumentation, backward=True, require_outputs=True)

    def instrumentation(self, context: amanda.OpContext) -> None:
        if context["type"] in ["conv2d"]:
            self.shapes[context.get_op_id()] = context["shape"]
            mask = context["mask"] = context["new_mask"]
            context.insert_before_op(self.mask_forward_weight, inputs=[1], mask=mask)


def convolutions(x: Any, first: Any, second: Any) -> Any:
    """The loss of a network of two convolutions, the second of which is used twice."""
    x = tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME"))
    x = tf.nn.relu(tf.nn.conv2d(x, second, 1, "SAME"))
    x = tf.nn.conv2d(x, second, 2, "VALID")
    return tf.reduce_sum(tf.nn.softmax(tf.reshape(x, (x.shape[0], -1))) ** 2)


def images_and_filters() -> tuple[Any, list[Any]]:
    """The input and the weights of :func:`convolutions`."""
    random = np.random.default_rng(0)
    shapes = (2, 6, 6, 2), (3, 3, 2, 4), (3, 3, 4, 4)
    x, *filters = (random.standard_normal(shape) for shape in shapes)
    return x, filters


@pytest.mark.parametrize("placement", support.PLACEMENTS)
def test_pruning_on_tensorflow(placement: type[Training]) -> None:
    """Training under the tool is the training of the model that is pruned in its source."""
    x, filters = images_and_filters()
    masks = [magnitude_mask(weight) for weight in filters]

    def by_hand(x: Any, *weights: Any) -> Any:
        pairs = zip(weights, masks, strict=True)
        return convolutions(x, *(tf.convert_to_tensor(w) * m for w, m in pairs))

    expected = placement(by_hand, x, filters).steps(3)
    training = placement(convolutions, x, filters)
    tool = PruningTool()
    with amanda.apply(tool):
        support.assert_close(training.steps(3), expected)
    assert set(tool.shapes.values()) == {(4, 2, 3, 3), (4, 4, 3, 3)}


def test_pruning_on_pytorch() -> None:
    """The same class on PyTorch, where every weight and loss is bit-identical."""
    torch.manual_seed(3)
    model, by_hand = listings.Network(), listings.HandPruned()
    by_hand.load_state_dict(model.state_dict())
    by_hand.make_masks()
    with amanda.apply(PruningTool()):
        losses = listings.train(model)
    assert losses == listings.train(by_hand)
    state, expected = model.state_dict(), by_hand.state_dict()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def test_one_tool_object_on_both() -> None:
    """One object, applied once, prunes networks of both frameworks."""
    x, filters = images_and_filters()
    tool = PruningTool()
    with amanda.apply(tool):
        listings.train(listings.Network(), steps=1)
        support.TapeInside(convolutions, x, filters).steps(1)
    assert {(8, 3, 3, 3), (4, 2, 3, 3)} <= set(tool.shapes.values())
