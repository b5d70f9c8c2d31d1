"""Training on two logical devices under a counter, as a program: it configures TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amanda
from tests.tensorflow.support import Counter

COUNTED = ("Conv2D", "Conv2DBackpropFilter")


def counts(tool: Counter) -> str:
    """Executions of the convolution and of its weight's gradient."""
    return f"{tool.forward['Conv2D']} {tool.backward['Conv2DBackpropFilter']}"


def step(weight: Any) -> Any:
    """A training step of one replica."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.conv2d(tf.ones([1, 4, 4, 1]), weight, 1, "SAME"))
    # The convolution runs if its result is asked for.
    return loss, tape.gradient(loss, weight)


def by_hand(strategy: tf.distribute.Strategy) -> None:
    """``strategy.run`` within a function and without."""
    with strategy.scope():
        weight = tf.Variable(tf.ones([3, 3, 1, 1]))
    function = tf.function(lambda: strategy.run(step, args=(weight,)))
    for name, run in (("function", function), ("eager", lambda: strategy.run(step, (weight,)))):
        tool = Counter(COUNTED)
        with amanda.apply(tool):
            run()
        print(name, counts(tool))


def trained(strategy: tf.distribute.Strategy, *tools: amanda.Tool) -> list[Any]:
    """The weights after ``fit``."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Conv2D(2, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((4, 4, 1)), *layers])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((8, 4, 4, 1)).astype(np.float32)
    arguments = {"epochs": 2, "batch_size": 4, "verbose": 0, "shuffle": False}
    if not tools:
        model.fit(x, x[:, 0, 0], **arguments)
    else:
        with amanda.apply(*tools):
            model.fit(x, x[:, 0, 0], **arguments)
    return list(model.get_weights())


def main() -> None:
    """Print what was counted."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    by_hand(strategy)
    tool = Counter(COUNTED)
    weights = trained(strategy, tool)
    print("fit", counts(tool))
    pairs = zip(weights, trained(strategy), strict=True)
    print("weights equal", all(np.array_equal(one, other) for one, other in pairs))


if __name__ == "__main__":
    main()
