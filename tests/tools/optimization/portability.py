"""One program in four execution modes, for tools that have to do the same in all of them.

Two convolutions and a matrix product, trained by gradient descent; the weights are copied.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

import amanda

Array = Any

RATE = 0.02
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(5, 9, 9, 4)).astype(np.float32)
WEIGHTS: Mapping[str, Array] = {
    name: (RANDOM.normal(size=shape) / 4).astype(np.float32)
    for name, shape in {"one": (3, 3, 4, 8), "two": (3, 3, 8, 8), "three": (8, 6)}.items()
}
"""In TensorFlow's layout; all weights and masks are compared in it."""


class Program(abc.ABC):
    """The program in one mode; it is its own, and has a state of its own."""

    name: str

    @abc.abstractmethod
    def step(self) -> float:
        """One step of training; the loss before it."""

    @abc.abstractmethod
    def predict(self) -> Array:
        """The outputs, without training."""

    @abc.abstractmethod
    def weights(self) -> list[Array]:
        """The weights as they are, in the common layout."""

    def again(self) -> None:
        """Run the model's operators under the ids that they have in a step."""
        self.predict()

    def common(self, array: Array) -> Array:
        """An array in the layout of a weight, in the common layout."""
        return array

    def train(self, *tools: amanda.Tool, steps: int = 1) -> list[float]:
        """The losses of some steps under tools."""
        losses = []
        with amanda.apply(*tools):
            for _ in range(steps):
                losses.append(self.step())
                amanda.new_iteration()
        return losses


class TorchEager(Program):
    """PyTorch."""

    name = "PyTorch eager"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._x = torch.tensor(IMAGES).permute(0, 3, 1, 2)
        self._weights = [torch.nn.Parameter(torch.tensor(self._own(w))) for w in WEIGHTS.values()]
        self._optimizer = torch.optim.SGD(self._weights, lr=RATE)

    @staticmethod
    def _own(array: Array) -> Array:
        return np.ascontiguousarray(array.T if array.ndim == 2 else array.transpose(3, 2, 0, 1))

    def common(self, array: Array) -> Array:
        return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)

    def _model(self) -> Any:
        functional = self._torch.nn.functional
        one, two, three = self._weights
        h = functional.relu(functional.conv2d(self._x, one, padding=1))
        h = functional.relu(functional.conv2d(h, two, stride=2))
        return functional.linear(h.mean((2, 3)), three)

    def predict(self) -> Array:
        with self._torch.no_grad():
            return self._model().numpy()

    def step(self) -> float:
        loss = (self._model() - 1.0).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def weights(self) -> list[Array]:
        return [self.common(w.detach().numpy().copy()) for w in self._weights]


def _model(tf: Any, x: Any, weights: list[Any]) -> Any:
    one, two, three = weights
    h = tf.nn.relu(tf.nn.conv2d(x, one, 1, "SAME"))
    h = tf.nn.relu(tf.nn.conv2d(h, two, 2, "VALID"))
    return tf.matmul(tf.reduce_mean(h, [1, 2]), three)


def _loss(tf: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(y - 1.0))


class TensorFlowEager(Program):
    """TensorFlow, one operator at a time."""

    name = "TensorFlow eager"

    def __init__(self) -> None:
        import tensorflow as tf

        self._x = tf.constant(IMAGES)
        self._weights = [tf.Variable(w, name=name) for name, w in WEIGHTS.items()]

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(tf, _model(tf, x, self._weights))
            gradients = tape.gradient(loss, self._weights)
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.assign_sub(RATE * gradient)
            return loss

        self._step = step
        self._predict = lambda x: _model(tf, x, self._weights)

    def predict(self) -> Array:
        return self._predict(self._x).numpy()

    def step(self) -> float:
        return float(self._step(self._x))

    def weights(self) -> list[Array]:
        return [w.numpy() for w in self._weights]


class TensorFlowFunction(TensorFlowEager):
    """The same step as a ``tf.function``."""

    name = "tf.function"

    def __init__(self) -> None:
        import tensorflow as tf

        super().__init__()
        self._step = tf.function(self._step)
        self._predict = tf.function(self._predict)

    def again(self) -> None:
        self.step()  # ids contain the function


class TensorFlowSession(Program):
    """A graph of TensorFlow 1 with its gradients."""

    name = "TensorFlow Session"

    def __init__(self) -> None:
        import tensorflow as tf

        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            self._variables = [
                v1.get_variable(name, initializer=w, use_resource=True)
                for name, w in WEIGHTS.items()
            ]
            self._x = v1.placeholder(tf.float32, IMAGES.shape)
            self._y = _model(tf, self._x, self._variables)
            loss = _loss(tf, self._y)
            train = v1.train.GradientDescentOptimizer(RATE).minimize(loss)
            start = v1.global_variables_initializer()
        self._wanted = loss, train
        self._session = v1.Session(graph=graph)
        self._session.run(start)

    def predict(self) -> Array:
        return self._session.run(self._y, {self._x: IMAGES})

    def step(self) -> float:
        return float(self._session.run(self._wanted, {self._x: IMAGES})[0])

    def weights(self) -> list[Array]:
        found: list[Array] = self._session.run(self._variables)
        return found


PROGRAMS: tuple[type[Program], ...] = (
    TorchEager,
    TensorFlowSession,
    TensorFlowFunction,
    TensorFlowEager,
)
