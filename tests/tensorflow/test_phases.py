"""Phases of operators and iterations: eager, in functions, in sessions, with Keras."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amanda
from amanda.interface.points import Point, PointContext

X = np.ones((4, 8), "float32")


class Phases(amanda.Tool):
    """The types of operators by phase, and the points that were passed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = collections.defaultdict(set)
        self.seen: list[PointContext] = []
        self.add_inst_for_op(self.note)
        self.add_inst_for_op(self.note, backward=True)
        for end in (False, True):
            self.add_inst_for_module(self.seen.append, exit=end)
            self.add_inst_for_iteration(self.seen.append, end=end)
            self.add_inst_for_pass(self.seen.append, end=end)
            self.add_inst_for_pass(self.seen.append, end=end, backward=True)

    def note(self, context: amanda.OpContext) -> None:
        op = context.get_op() if context.is_forward() else context.get_backward_op()
        self.found[context.get_phase()].add(op.type)

    def count(self, point: Point) -> int:
        return sum(context.point is point for context in self.seen)


def model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([layers.Input((8,)), layers.Dense(4, "relu"), layers.Dense(3)])


def step(net: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(X) ** 2)
    gradients = tape.gradient(loss, net.trainable_variables)
    optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))


def test_training_step_by_step() -> None:
    """Weights are drawn in the setup, losses belong to the forward pass, updates to the optimizer;
    building a model is not a pass of it."""
    tool = Phases()
    with amanda.apply(tool) as scope:
        net, optimizer = model(), keras.optimizers.SGD(0.1)
        for _ in range(3):
            step(net, optimizer)
    assert scope.statistics.steps == 3
    assert {"MatMul", "BiasAdd", "Relu", "Mean"} <= tool.found["forward"]
    assert any("Random" in kind for kind in tool.found["setup"])
    assert "AssignSubVariableOp" in tool.found["optimizer"]
    assert "MatMul" in tool.found["backward"]
    passes = [tool.count(point) for point in (Point.FORWARD_BEGIN, Point.BACKWARD_END)]
    assert passes == [3, 3]
    assert tool.count(Point.MODULE_ENTRY) == tool.count(Point.MODULE_EXIT) > 3
    assert any(context.outputs and context.id for context in tool.seen)


def test_training_by_fit() -> None:
    """Each batch is a step; metrics and data are neither the model's nor the optimizer's."""
    tool = Phases()
    with amanda.apply(tool) as scope:
        net = model()
        net.compile("adam", "mse", metrics=["mae"])
        net.fit(np.ones((12, 8), "float32"), np.ones((12, 3), "float32"), 4, verbose=0)
    assert scope.statistics.steps == 3
    assert {"MatMul", "SquaredDifference"} & tool.found["forward"] >= {"MatMul"}
    assert "Sqrt" in tool.found["optimizer"]
    assert "IteratorGetNext" not in tool.found["setup"]
    assert any("Dataset" in kind for kind in tool.found["other"])


def test_a_step_of_inference_is_a_call() -> None:
    """Each call of a function, or of the outermost layer, is a step."""
    net = model()
    function = tf.function(lambda x: tf.matmul(x, x, transpose_b=True))
    for call in (lambda: function(tf.constant(X)), lambda: net(X, training=False)):
        call()
        with amanda.apply(tool := Phases()) as scope:
            for _ in range(3):
                call()
        assert scope.statistics.steps == 3
        assert tool.count(Point.FORWARD_BEGIN) == tool.count(Point.FORWARD_END) == 3


def test_training_in_a_session() -> None:
    """Initialisers are setup, a run with a train op is a step, and no other run is one."""
    tool, v1 = Phases(), tf.compat.v1
    with amanda.apply(tool) as scope, tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (None, 8))
        loss = tf.reduce_mean((x @ v1.get_variable("w", (8, 3))) ** 2)
        train = v1.train.AdamOptimizer(0.1).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run([train, loss], {x: X})
    assert scope.statistics.steps == 3
    assert {"MatMul", "Mean"} <= tool.found["forward"]
    assert any("RandomUniform" in kind for kind in tool.found["setup"])
    assert "ResourceApplyAdam" in tool.found["optimizer"]


class Scaled(keras.initializers.Initializer):
    """Multiplies, as losses do."""

    def __call__(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
        return tf.random.uniform(shape) * 0.1


def test_a_loss_is_not_taken_for_what_made_the_weights() -> None:
    """Outside of layers its operators have ids of their own, equal in all steps, apart from those
    of initialisation, of optimizers and of metrics."""
    ids: dict[str, str] = {}
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: ids.update({c.get_op_id(): c.get_phase()}))
    with amanda.apply(tool):
        weight = keras.Variable(Scaled(), shape=(3, 3))
        optimizer, mean = keras.optimizers.SGD(0.1, momentum=0.9), keras.metrics.Mean()
        optimizer.build([weight])
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight.value * 2.0)
            gradient = tape.gradient(loss, weight.value)
            optimizer.apply([gradient])
            mean.update_state(loss)
    products = {op_id: phase for op_id, phase in ids.items() if op_id.split("/")[-1] == "Mul:0"}
    assert products.pop("/Mul:0") == "forward"
    assert sorted(products.values()) == ["optimizer", "setup"]
    sums = {op_id: phase for op_id, phase in ids.items() if op_id.split("/")[-1] == "Sum:0"}
    assert sums == {"/Sum:0": "forward", "/other/Sum:0": "other"}
    assert not any(op_id.endswith("/Mul:1") and phase == "forward" for op_id, phase in ids.items())


def test_what_a_function_creates_is_initialised_in_the_setup() -> None:
    """Variables that are created while a function is traced get their values in the setup."""
    found: dict[str, str] = {}
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: found.update({c.get_op_id(): c.get_phase()}))
    created: list[tf.Variable] = []

    @tf.function
    def scaled(x: tf.Tensor) -> tf.Tensor:
        if not created:
            created.append(tf.Variable(tf.random.normal([2])))
        return x * created[0]

    with amanda.apply(tool):
        scaled(tf.ones([2]))
    initialising = {i: phase for i, phase in found.items() if i.startswith("initialize_variables")}
    assert "initialize_variables/AssignVariableOp" in initialising
    assert set(initialising.values()) == {"setup"}
    assert found["scaled/mul/Mul"] == found["scaled/mul/ReadVariableOp"] == "forward"
    # What TensorFlow runs at once to learn which of them have no value.
    assert {phase for i, phase in found.items() if "Pack" in i} == {"setup"}
