"""What the programs of TensorFlow share: data, training, and what is compared after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]


def digits(count: int = 48) -> tuple[Array, Array]:
    """scikit-learn's digits: images of shape (count, 8, 8, 1) in [0, 1], and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images[:count] / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels[:count]


def normal(*shape: int) -> Array:
    """Random numbers, from the global generator of NumPy."""
    return np.random.normal(size=shape).astype(np.float32)


def descended(
    loss: Callable[[], Any],
    variables: Callable[[], Sequence[Any]],
    steps: int = 3,
    compiled: bool = True,
    rate: float = 0.05,
) -> Any:
    """Gradient descent, in a ``tf.function`` unless told; losses, gradients and weights.

    Args:
        loss: the loss.
        variables: the weights, once the loss has been computed.
        steps: how many steps.
        compiled: whether a step is a ``tf.function``.
        rate: the learning rate.
    """

    def step() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, list(variables()))
        for variable, gradient in zip(variables(), found, strict=True):
            if gradient is not None:
                variable.assign_sub(rate * tf.convert_to_tensor(gradient))
        return value, [None if g is None else tf.convert_to_tensor(g) for g in found]

    loss()
    run = tf.function(step) if compiled else step
    results = [run() for _ in range(steps)]
    return results, [variable.numpy() for variable in variables()]


def fitted(model: Any, x: Any, y: Any, **options: Any) -> Any:
    """Fit, evaluate and predict with a Keras model; history, scores, predictions, weights."""
    history = model.fit(x, y, verbose=0, **{"epochs": 2, "batch_size": 16, **options})
    scores = model.evaluate(x, y, verbose=0)
    return dict(history.history), scores, model.predict(x, verbose=0), model.get_weights()
