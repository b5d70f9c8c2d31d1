"""``params`` of ``flops`` on TensorFlow: what Keras counts, in every mode, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.inline import Counter
from amanda.tools.description import OpDescription
from amanda_tools._operators.flop_registry import formula_of
from amanda_tools._operators.signature import OpSignature
from amanda_tools.flops import FlopsTool
from amanda_tools.flops.counting import OpFlops
from tests.running import applied

tf1 = tf.compat.v1
DATA, LABELS = np.ones((2, 4), np.float32), np.ones(2)


def model() -> Any:
    """A layer used twice, biases, two normalizations, a slope and random state."""
    layers = tf.keras.layers
    entry, shared = tf.keras.Input((4,)), layers.Dense(4)
    x = shared(shared(entry))
    for layer in (layers.BatchNormalization(), layers.LayerNormalization(), layers.PReLU()):
        x = layer(x)
    return tf.keras.Model(entry, layers.Dense(2)(layers.Dropout(0.1)(x)))


def compiled(optimizer: Any, eagerly: bool) -> Any:
    net = model()
    loss = "sparse_categorical_crossentropy"
    net.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=eagerly)
    return net


def momentum() -> Any:
    return tf.keras.optimizers.SGD(0.1, momentum=0.9)


RUNS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda net: net(DATA),
    "function": lambda net: tf.function(net)(tf.constant(DATA)),
    "training": lambda net: net(DATA, training=True),
    "fit": lambda net: net.fit(DATA, LABELS, verbose=0, epochs=2),
    "evaluate": lambda net: net.evaluate(DATA, LABELS, verbose=0),
}


@pytest.mark.parametrize(
    ("name", "optimizer", "eagerly"),
    [*((name, "adam", False) for name in RUNS), ("fit", "rmsprop", True), ("fit", momentum, False)],
)
def test_params_are_those_of_keras(name: str, optimizer: Any, eagerly: bool) -> None:
    """Weights, biases, scales and statistics; what is used twice counts once. The state of
    optimizers and metrics (learning rates, moments, counters, sums) is no parameter."""
    net = compiled(optimizer if isinstance(optimizer, str) else optimizer(), eagerly)
    found = applied(FlopsTool(), lambda: RUNS[name](net)).summary()
    assert found["params"] == net.count_params()
    assert found["unknown_ops"] == {}


@pytest.mark.parametrize("by_reference", [False, True])
def test_params_of_a_session(by_reference: bool) -> None:
    """Variables of both kinds, used twice, with Adam's moments beside them."""
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 4])
        shapes = {"w": [4, 4], "b": [4], "g": [4]}
        w, b, g = (
            tf1.get_variable(name, shape, use_resource=not by_reference)
            for name, shape in shapes.items()
        )
        h = tf.nn.relu(x @ w + b) * g
        loss = tf.reduce_sum(tf.nn.relu(h @ w + b) * g)
        train = tf1.train.AdamOptimizer().minimize(loss)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            found = applied(FlopsTool(), lambda: session.run([loss, train], {x: DATA})).summary()
    assert found["params"] == 4 * 4 + 4 + 4
    assert found["unknown_ops"] == {}


def test_two_models_in_one_scope() -> None:
    """The second is used when the first one's gradients have been computed."""
    first, second = compiled("adam", False), model()

    def run() -> None:
        first.fit(DATA, LABELS, verbose=0)
        second(DATA)

    assert (
        applied(FlopsTool(), run).summary()["params"]
        == first.count_params() + second.count_params()
    )


def test_a_variable_has_one_key_wherever_it_is_used() -> None:
    """Read twice, eagerly and in a function; another variable has another key."""
    w, other = tf.Variable(tf.ones((4, 4))), tf.Variable(tf.ones((4, 4)))
    keys: list[Any] = []

    class Keys(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "MatMul":
                variables = [context.get_variable(i) for i in range(2)]
                keys.append([variable and variable.key for variable in variables])

    def run(x: Any) -> Any:
        return tf.matmul(tf.matmul(x, w), w), tf.matmul(x, other)

    with amanda.apply(Keys()):
        run(tf.constant(DATA))
        tf.function(run)(tf.constant(DATA))
    data, weights = zip(*keys, strict=True)
    assert set(data) == {None}
    assert [key == weights[0] for key in weights] == [True, True, False] * 2
    assert weights[2] == weights[5]


def test_routines_of_one_execution_may_run_in_two_threads() -> None:
    """What executes a graph has several: the shapes that were read are found all the same."""
    about = OpDescription("net/Conv2D", "conv2d", "Conv2D", "net", "tensorflow/2/graph")
    signature = OpSignature("conv2d", weight=1, weight_layout="HWIO", data_layout="NHWC")
    op = OpFlops.of(about, formula_of("conv2d"), signature, Counter())
    data, weight, output = (np.zeros(s) for s in ((1, 5, 5, 2), (3, 3, 2, 4), (1, 3, 3, 4)))
    before = threading.Thread(target=op.begin, args=(data, weight))
    before.start()
    before.join()
    op.end(output)
    assert op.totals() == (1, 2 * 3 * 3 * 4 * 3 * 3 * 2, 0)
