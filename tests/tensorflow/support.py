"""The same training in each mode, for the tests of user-level behaviour."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import amanda

tf1 = tf.compat.v1
Build = Callable[..., Any]
Array = Any


class Counter(amanda.Tool):
    """Counts executions by type, of all operators or of some types."""

    def __init__(self, only: Sequence[str] = ()) -> None:
        super().__init__()
        self.forward: collections.Counter[str] = collections.Counter()
        self.backward: collections.Counter[str] = collections.Counter()
        self._only = set(only)
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_backward, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        kind = context.get_op().type
        if not self._only or kind in self._only:
            context.insert_before_op(self.count, kind=kind)

    def look_backward(self, context: amanda.OpContext) -> None:
        kind = context.get_backward_op().type
        if not self._only or kind in self._only:
            context.insert_after_backward_op(self.count_backward, kind=kind)

    def count(self, *tensors: Any, kind: str) -> None:
        self.forward[kind] += 1

    def count_backward(self, *tensors: Any, kind: str) -> None:
        self.backward[kind] += 1


class Watcher(amanda.Tool):
    """Analyses everything and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self.look, backward=backward, require_outputs=require_outputs)

    def look(self, context: amanda.OpContext) -> None:
        self.seen += 1


def gradients(
    build: Build, x: Any, weights: Sequence[Any], second: bool
) -> tuple[Any, Sequence[Any]]:
    """The loss, and the gradients of input and weights: of the loss, or of the sum of the
    squares of its gradients."""
    wanted = [x, *weights]
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = build(x, *weights)
        found = tape.gradient(loss, wanted)
        if second:
            penalty = tf.add_n([tf.reduce_sum(g * g) for g in found])
    return loss, outer.gradient(penalty, wanted) if second else found


class Training(abc.ABC):
    """Repeated training steps of a small model, in one of TensorFlow's modes.

    Args:
        build: the model, a function of its input and its variables that returns the loss.
        x: the input.
        weights: the initial values of the variables.
        second: whether the gradients are those of second order.
    """

    def __init__(
        self, build: Build, x: Array, weights: Sequence[Array], second: bool = False
    ) -> None:
        self.build = build
        self.second = second
        self.start(x, weights)

    @abc.abstractmethod
    def start(self, x: Array, weights: Sequence[Array]) -> None:
        """Make tensors and variables."""

    @abc.abstractmethod
    def step(self) -> list[Array]:
        """The loss and all gradients; the weights then move against theirs."""

    @abc.abstractmethod
    def weights(self) -> list[Array]:
        """The values of the variables."""

    def steps(self, count: int) -> list[list[Array]]:
        """The results of some steps, and the weights after them."""
        return [*(self.step() for _ in range(count)), self.weights()]


RATE = 0.125


class Eager(Training):
    """Operators run at once."""

    def start(self, x: Array, weights: Sequence[Array]) -> None:
        self.x = tf.constant(x)
        self.variables = [tf.Variable(weight) for weight in weights]

    def compute(self) -> tuple[Any, Sequence[Any]]:
        """Loss and gradients."""
        return gradients(self.build, self.x, self.variables, self.second)

    def step(self) -> list[Array]:
        loss, found = self.compute()
        for variable, gradient in zip(self.variables, found[1:], strict=True):
            variable.assign_sub(RATE * gradient)
        return [tensor.numpy() for tensor in (loss, *found)]

    def weights(self) -> list[Array]:
        return [variable.numpy() for variable in self.variables]


class TapeInside(Eager):
    """A function that differentiates."""

    def start(self, x: Array, weights: Sequence[Array]) -> None:
        super().start(x, weights)
        self.compute = tf.function(super().compute, autograph=False)  # type: ignore[method-assign]


class TapeOutside(Eager):
    """A function that is differentiated."""

    def start(self, x: Array, weights: Sequence[Array]) -> None:
        super().start(x, weights)
        build = self.build
        function = tf.function(lambda x: build(x, *self.variables), autograph=False)
        self.build = lambda x, *variables: function(x)


class Session(Training):
    """A graph that a session runs."""

    use_resource = True

    def start(self, x: Array, weights: Sequence[Array]) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = tf1.placeholder(x.dtype, x.shape, "x")
            self.variables = [
                tf1.get_variable(f"w{i}", initializer=weight, use_resource=self.use_resource)
                for i, weight in enumerate(weights)
            ]
            loss = self.build(self.x, *self.variables)
            wanted = [self.x, *self.variables]
            found = tf.gradients(loss, wanted)
            if self.second:
                found = tf.gradients(tf.add_n([tf.reduce_sum(g * g) for g in found]), wanted)
            self.fetches = [loss, *found]
            pairs = zip(self.variables, found[1:], strict=True)
            with tf.control_dependencies(self.fetches):
                self.update = tf.group(*(tf1.assign_sub(v, RATE * g) for v, g in pairs))
            initialize = tf1.global_variables_initializer()
        self.session = tf1.Session(graph=self.graph)
        self.session.run(initialize)
        self.feeds = {self.x: x}

    def step(self) -> list[Array]:
        return self.session.run([self.fetches, self.update], self.feeds)[0]

    def weights(self) -> list[Array]:
        return self.session.run(self.variables)


class ReferenceSession(Session):
    """A graph with the reference variables of old."""

    use_resource = False


PLACEMENTS = (Eager, TapeInside, TapeOutside, Session, ReferenceSession)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Nested lists of arrays are equal to the last bit."""
    left, right = tf.nest.flatten(actual), tf.nest.flatten(expected)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def assert_close(actual: Any, expected: Any) -> None:
    """Nested lists of arrays in double precision are equal but for rounding."""
    left, right = tf.nest.flatten(actual), tf.nest.flatten(expected)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


def network(x: Any, filters: Any, kernel: Any) -> Any:
    """A loss of a convolution and a product, differentiable twice."""
    hidden = tf.nn.tanh(tf.nn.conv2d(x, filters, 1, "VALID"))
    flat = tf.reshape(hidden, (x.shape[0], -1))
    return tf.reduce_sum(tf.nn.softmax(tf.linalg.matmul(flat, kernel)) ** 2)


def data(seed: int = 0) -> tuple[Array, list[Array]]:
    """An input and the weights of :func:`network`."""
    random = np.random.default_rng(seed)
    shapes = ((2, 5, 5, 2), (3, 3, 2, 4), (36, 3))
    x, filters, kernel = (random.standard_normal(shape) for shape in shapes)
    return x, [filters, kernel]
