"""ResNet-50 in the modes of TensorFlow, and the tools and peers that it is benchmarked under."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import keras
import numpy as np
import tensorflow as tf

import amanda
from tests.benchmarks.timing import Comparison, Program, Step
from tests.benchmarks.watching import Watch

tf1 = tf.compat.v1
Model = Any

RATE = 1e-4
"""The learning rate; small, so that a network of random weights stays finite."""


# -- the model ----------------------------------------------------------------


@functools.cache
def mask_of(shape: tuple[int, ...], as_tensor: bool) -> Any:
    """A mask that keeps about half of a weight.

    Args:
        as_tensor: as a tensor of eager mode, which a traced function captures, instead of
            an array, which becomes a constant of each graph.
    """
    mask = (np.random.default_rng(0).random(shape) < 0.5).astype(np.float32)
    if not as_tensor:
        return mask
    with tf.init_scope():
        return tf.constant(mask)


class MaskedConv2D(keras.layers.Conv2D):  # type: ignore[misc]
    """A convolution whose source multiplies its weight by a mask."""

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """The convolution, with the masked weight."""
        mask = mask_of(tuple(kernel.shape), tf1.executing_eagerly_outside_functions())
        return super().convolution_op(inputs, tf.convert_to_tensor(kernel) * mask)


def _masked(layer: Any) -> Any:
    cls = MaskedConv2D if type(layer) is keras.layers.Conv2D else type(layer)
    return cls.from_config(layer.get_config())


def resnet50(size: int, by_hand: bool = False) -> Model:
    """ResNet-50 with random weights; `by_hand` with the masks written into it."""
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3))
    return keras.models.clone_model(model, clone_function=_masked) if by_hand else model


# -- the modes ----------------------------------------------------------------


@attrs.frozen
class Mode(abc.ABC):
    """One way to run a model.

    Attributes:
        batch: images per step.
        size: their height and width in pixels.
        training: forward, gradients of all weights, and a step of SGD; otherwise forward.
    """

    batch: int
    size: int
    training: bool

    def images(self) -> Any:
        """The input: float32 of shape (batch, size, size, 3), the same in every call."""
        shape = (self.batch, self.size, self.size, 3)
        return np.random.default_rng(1).random(shape, dtype=np.float32)

    @abc.abstractmethod
    def step(self, by_hand: bool = False) -> Step:
        """Make a model, and return the function that runs one step of it.

        Args:
            by_hand: the model has the masks written into it.
        """


class Eager(Mode):
    """Eager operators; training differentiates by a tape."""

    def step(self, by_hand: bool = False) -> Step:
        """Make a model that is called eagerly."""
        model, x = resnet50(self.size, by_hand), tf.constant(self.images())

        def train() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.value.assign_sub(RATE * gradient)
            return loss

        return train if self.training else lambda: model(x, training=False)


class Function(Eager):
    """The eager step in a ``tf.function``, with the tape inside."""

    def step(self, by_hand: bool = False) -> Step:
        """Make a function, which is traced at its first call."""
        function: Step = tf.function(super().step(by_hand), autograph=False)
        return function


class Session(Mode):
    """A graph, run by a session."""

    def step(self, by_hand: bool = False) -> Step:
        """Make a graph and a session that runs it."""
        images = self.images()
        with tf.Graph().as_default() as graph:
            x = tf1.placeholder(tf.float32, images.shape)
            fetch = resnet50(self.size, by_hand)(x, training=self.training)
            if self.training:
                loss = tf.reduce_sum(fetch**2)
                optimizer = tf1.train.GradientDescentOptimizer(RATE)
                fetch = [loss, optimizer.minimize(loss, None, tf1.trainable_variables())]
            initialize = tf1.global_variables_initializer()
        session = tf1.Session(graph=graph, config=one_thread())
        session.run(initialize)
        return lambda: session.run(fetch, {x: images})


def one_thread() -> Any:
    """The configuration of a session that computes in one thread."""
    return tf1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)


MODES: Mapping[str, type[Mode]] = {"session": Session, "function": Function, "eager": Eager}


# -- the tools ----------------------------------------------------------------


CONVOLUTIONS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


class Count(amanda.Tool):
    """Counts, in Python, the convolutions of both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert the counter before a convolution."""
        if context.get_op().type in CONVOLUTIONS:
            context.insert_before_op(self.count)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert the counter after a backward operator of a convolution."""
        if context.get_backward_op().type in CONVOLUTIONS:
            context.insert_after_backward_op(self.count)

    def count(self, *tensors: Any) -> None:
        """Count one execution."""
        self.counted += 1


class Mask(amanda.Tool):
    """Masks each convolution's weight and its gradient, in routines that are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Do as the gradient of ``weight * mask`` does: mask the weight, and its gradient."""
        if context.get_op().type == "Conv2D":
            shape = tuple(context.get_inputs()[1].shape)
            mask = mask_of(shape, context.namespace.tags[-1] != "graph")
            context.insert_before_op(self.multiply, inputs=[1], mask=mask)
            context.insert_after_backward_op(self.multiply, grad_inputs=[1], mask=mask)

    @amanda.traceable
    def multiply(self, tensor: Any, mask: Any) -> Any:
        """Multiply, if there is a tensor."""
        return None if tensor is None else tensor * mask


@contextmanager
def check_numerics() -> Iterator[None]:
    """TensorFlow's own check, of every operator that is run or created in this scope."""
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


# -- a program bound by launches -----------------------------------------------


def perceptron(layers: int, width: int, *, training: bool) -> Step:
    """A step of a perceptron in eager mode: products, biases and ReLUs of small tensors."""
    generator = np.random.default_rng(0)
    weights = [
        tf.Variable(generator.standard_normal((width, width), dtype=np.float32) / width**0.5)
        for _ in range(layers)
    ]
    biases = [tf.Variable(tf.zeros([width])) for _ in range(layers)]
    x = tf.constant(generator.standard_normal((8, width), dtype=np.float32))

    def forward() -> Any:
        y = x
        for weight, bias in zip(weights, biases, strict=True):
            y = tf.nn.relu(tf.nn.bias_add(tf.matmul(y, weight), bias))
        return y

    def train() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward())
        return tape.gradient(loss, [*weights, *biases])

    def infer() -> Any:
        y = forward()
        # Neither a model nor a backward pass tells where the step ends.
        amanda.new_iteration()
        return y

    return train if training else infer


# -- the comparisons ----------------------------------------------------------


def comparisons(mode: Mode, *, eager: bool) -> list[Comparison]:
    """Tools on one mode.

    Args:
        eager: the mode is eager, and its bound is the wider one.
    """
    vanilla = Program(mode.step())
    by_hand = Program(mode.step(by_hand=True))

    def under(tool: Callable[[], amanda.Tool]) -> Program:
        return Program(vanilla.step, lambda: amanda.apply(tool()))

    idle = under(lambda: Watch(backward=True))
    return [
        Comparison("amanda, nothing instrumented", idle, vanilla, 1.08 if eager else 1.02),
        Comparison("amanda, Python counter on convolutions", under(Count), vanilla, 1.07),
        Comparison("mask written into the model", by_hand, vanilla),
        Comparison("amanda, traced mask (to the hand-written)", under(Mask), by_hand, 1.1),
    ]
