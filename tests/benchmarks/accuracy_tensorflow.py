"""The networks of the accuracy benchmark in TensorFlow, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.benchmarks.digits import digits


def residual_net(channels: int = 16) -> keras.Model:
    """A stem, two residual blocks, and a classifier."""

    def convolution(x: Any, **options: Any) -> Any:
        return layers.Conv2D(channels, 3, padding="same", **options)(x)

    def norm(x: Any) -> Any:
        # PyTorch's defaults. With Keras's momentum of 0.99 the statistics of so short a training
        # lag behind the weights.
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    inputs = keras.Input((8, 8))
    x = layers.ReLU()(convolution(layers.Reshape((8, 8, 1))(inputs), name="stem"))
    for _ in range(2):
        inner = layers.ReLU()(norm(convolution(x, use_bias=False)))
        inner = norm(convolution(inner, use_bias=False))
        x = layers.ReLU()(layers.Add()([x, inner]))
    x = layers.Flatten()(layers.MaxPooling2D(2)(x))
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


class Layer(layers.Layer):
    """Attention and a feed-forward net, with the norms before them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.norm, self.other_norm = layers.LayerNormalization(), layers.LayerNormalization()
        self.mixed, self.out = layers.Dense(3 * width), layers.Dense(width)
        self.wide, self.narrow = layers.Dense(2 * width, "gelu"), layers.Dense(width)

    def call(self, x: Any) -> Any:
        part = self.width // self.heads
        mixed = tf.reshape(self.mixed(self.norm(x)), [-1, 8, 3, self.heads, part])
        q, k, v = tf.unstack(tf.transpose(mixed, [2, 0, 3, 1, 4]))
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / part**0.5)
        seen = tf.reshape(tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3]), [-1, 8, self.width])
        x = x + self.out(seen)
        return x + self.narrow(self.wide(self.other_norm(x)))


class Places(layers.Layer):
    """Adds a learned position embedding to each token."""

    def build(self, shape: Any) -> None:
        start = keras.initializers.RandomNormal(stddev=1 / 8)
        self.places = self.add_weight(shape=shape[1:], initializer=start)

    def call(self, x: Any) -> Any:
        return x + self.places


def transformer(width: int = 32, heads: int = 4) -> keras.Model:
    """A classifier whose tokens are the rows of an image."""
    inputs = keras.Input((8, 8))
    x = Places()(layers.Dense(width)(inputs))
    for _ in range(2):
        x = Layer(width, heads)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "residual net": residual_net,
    "transformer": transformer,
}


class Network:
    """A network with its training and its test.

    Args:
        name: of the model.
        weights: of a trained one; None for a new one.
    """

    framework = "TensorFlow"

    def __init__(self, name: str, weights: list[Any] | None = None) -> None:
        keras.utils.set_random_seed(0)
        self.name = name
        self.model = MODELS[name]()
        self._is_trained = weights is not None
        if weights is not None:
            self.model.set_weights(weights)

    def copy(self) -> Network:
        """Another one with the same weights."""
        return Network(self.name, self.model.get_weights())

    def warm_up(self) -> None:
        """Run once without training, so that a tool calibrates and creates its parameters."""
        self.model(digits().train[:256], training=False)

    def train(self, epochs: int, rate: float, more: Callable[[], Iterable[Any]] = list) -> None:
        """Train with Adam: a new network in a ``tf.function``, a copy of a trained one eagerly.

        A copy is trained under a tool that has met its operators in ``warm_up``, eagerly. What
        ``quantize`` learns belongs to operators, and a function would have operators of its own.

        Args:
            epochs: over all training images.
            rate: the learning rate.
            more: returns variables to train beside the model's, such as a tool's.
        """
        variables = [*self.model.trainable_variables, *more()]
        optimizer = keras.optimizers.Adam(rate)
        optimizer.build(variables)

        def step(images: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                output = self.model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output)
                loss = tf.reduce_mean(losses)
            optimizer.apply(tape.gradient(loss, variables), variables)

        run = step if self._is_trained else tf.function(step)
        for epoch in range(epochs):
            for images, labels in digits().batches(epoch):
                run(tf.constant(images), tf.constant(labels))

    def accuracy(self) -> float:
        """The share of the test images that are classified correctly."""
        found = tf.argmax(self.model(digits().test, training=False), 1).numpy()
        return float((found == digits().test_labels).mean())
