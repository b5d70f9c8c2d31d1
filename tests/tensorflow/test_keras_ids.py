"""Ids of operators in Keras layers: one model has one set of them, however it is run."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.interface.context import OpContext
from amanda_tensorflow import _internals
from tests.running import applied

X = np.random.default_rng(0).standard_normal((4, 6, 6, 2)).astype(np.float32)
Y = np.zeros((4, 3), np.float32)

PRODUCTS = ("Conv2D", "MatMul", "BatchMatMulV2")


class Ids(amanda.Tool):
    """Collects the ids and module paths of operators, and the variables that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.products: dict[str, tuple[str, Any]] = {}
        self.modes: set[tuple[str, str]] = set()
        self.add_inst_for_op(self.look)

    def look(self, context: OpContext) -> None:
        self.ops.append(context.get_op_id())
        self.modes.add((context.get_op_id(), context.namespace))
        if context.get_op().type in PRODUCTS:
            variables = [context.get_variable(i) for i in range(2)]
            keys = [variable and variable.key for variable in variables]
            self.products[context.get_op_id()] = (context.get_module(), keys)


def functional() -> Any:
    """A model with a shared layer, a nested model, and layers that differ in training."""
    inputs = keras.Input((6, 6, 2))
    shared = keras.layers.Dense(2, name="shared")
    inner = keras.Sequential(
        [keras.Input((6, 6, 2)), keras.layers.Conv2D(4, 3, name="conv")], name="inner"
    )
    x = inner(shared(shared(inputs)))
    x = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization(name="norm")(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x), name="net")


class Block(keras.layers.Layer):
    """A layer that is made of others, and calls a function of its own."""

    def __init__(self) -> None:
        super().__init__(name="block")
        self.first = keras.layers.Conv2D(2, 3, name="first")
        self.scale = self.add_weight(shape=(2, 2), name="scale")

    @tf.function
    def scaled(self, x: Any) -> Any:
        return tf.linalg.matmul(x, self.scale)

    def call(self, x: Any) -> Any:
        with tf.name_scope("scope_of_the_program"):
            return self.scaled(tf.reduce_mean(self.first(x), [1, 2]))


class Subclassed(keras.Model):
    """A model whose training step is its own."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.block = Block()
        self.head = keras.layers.Dense(3, name="head")

    def call(self, x: Any) -> Any:
        return self.head(self.block(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize(
    ("build", "traced"), [(functional, "inside"), (Subclassed, "before")], ids=["inside", "before"]
)
def test_one_model_has_one_set_of_ids(build: Callable[[], Any], traced: str) -> None:
    """The operators with weights have the same ids and module paths, and read the same variables,
    in fit, evaluate, predict, a call and a tf.function, traced in the scope or before it."""
    model = build()
    model(X)
    model.compile("sgd", "mse")
    function = tf.function(lambda x: model(x))
    runs = {
        "fit": lambda: model.fit(X, Y, batch_size=3, verbose=0),
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "predict": lambda: model.predict(X, verbose=0),
        "function": lambda: function(tf.constant(X)),
    }
    if traced == "before":
        for run in runs.values():
            run()
    called = applied(Ids(), lambda: model(X))
    assert called.products.keys() >= {"net/head/MatMul:0"}
    for name, run in runs.items():
        assert applied(Ids(), run).products == called.products, name


def test_inference_has_one_set_of_ids() -> None:
    """In inference all operators have the same ids, however the model is run; those of layers that
    differ in training are added there."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, name="conv", activation="relu"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.GlobalAveragePooling2D(name="pool"),
            keras.layers.Dense(3, name="head"),
        ],
        name="net",
    )
    called = applied(Ids(), lambda: model(X)).ops
    predicted = applied(Ids(), lambda: model.predict(X, verbose=0)).ops
    trained = applied(Ids(), lambda: model(X, training=True)).ops
    assert {i for i in predicted if i.startswith("net/")} == set(called)
    assert set(called) < set(trained)


class ByHand(keras.Sequential):
    """A model whose step computes the loss by hand."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x)
            loss = tf.reduce_mean(keras.losses.MeanSquaredError(name="mse")(y, found))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, found)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("kind", "loss"), [(keras.Sequential, "loss/mse/"), (ByHand, "mse/")])
def test_what_keras_runs_outside_of_layers_has_the_ids_of_eager_execution(
    kind: type[Any], loss: str, steps: int
) -> None:
    """The loss and optimizer of ``fit`` have ids without the functions around them; metrics, which
    are read eagerly as well, have others in graphs."""
    found = []
    for run_eagerly in (False, True):
        model = kind([keras.Input((2,)), keras.layers.Dense(3)])
        compiled = {"run_eagerly": run_eagerly, "steps_per_execution": steps}
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=False, **compiled)
        tool = Ids()
        with amanda.apply(tool):
            model.fit(X[:, 0, 0], Y, batch_size=2, epochs=2, verbose=0)
        found.append({i for i in tool.ops if i.startswith((loss, "/optimizer/"))})
        assert not [i for i in tool.ops if "step_on" in i or "PartitionedCall" in i]
        assert ("/other/Abs:0" if run_eagerly else "/other/step/Abs:0") in tool.ops
        assert len(tool.modes) == len(set(tool.ops))
    assert {f"{loss}Sub:0", f"{loss}Mean:0", "/optimizer/Mul:0"} <= found[0] & found[1]


def test_graphs_of_one_scope_are_analysed_each() -> None:
    """An operator that two functions contain has one id, and is analysed for each of them."""
    model = functional()
    model.compile("sgd", "mse")

    def both() -> None:
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)

    assert applied(Ids(), both).ops.count("net/head/MatMul:0") == 2


def test_two_models_of_one_name() -> None:
    """A second model of the same name has ids of its own, the same in all modes."""
    one, two = (keras.Sequential([keras.layers.Dense(2, name="d")], name="net") for _ in range(2))
    x = tf.ones([1, 2])

    def run() -> None:
        for model in (one, two):
            model(x)
        for model in (two, one):
            tf.function(model)(x)

    products = [op_id for op_id in applied(Ids(), run).ops if op_id.endswith("MatMul:0")]
    assert products == [f"{name}/d/MatMul:0" for name in ("net", "net@1", "net@1", "net")]


def test_backward_operators_carry_the_id_of_the_layer() -> None:
    """Backward operators continue the ids of layers, also where the tape is outside of the
    function."""
    model = functional()
    found = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: found.append(c.get_backward_op_id()), backward=True)
    function = tf.function(lambda x: model(x))
    with amanda.apply(tool), tf.GradientTape() as tape:
        loss = tf.reduce_sum(function(tf.constant(X)))
    with amanda.apply(tool):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(tf.constant(X)))
        tape.gradient(loss, model.trainable_variables)
    assert "net/inner/conv/Conv2D:0/grad/Conv2DBackpropFilter:0" in found
    assert "net/head/MatMul:0/grad/MatMul:0" in found


def test_reanalysing_an_operator_of_several_graphs() -> None:
    """reanalyse(op_id) drops what was recorded for the operator in every graph."""
    model = keras.Sequential([keras.layers.Dense(2, name="d")], name="net")
    x = tf.ones([1, 2])
    functions = [tf.function(lambda x: model(x)), tf.function(lambda x: model(x) + 1.0)]
    with amanda.apply(tool := Ids()):
        for _ in range(2):
            for function in functions:
                function(x)
            tool.reanalyse("net/d/MatMul:0")
    assert tool.ops.count("net/d/MatMul:0") == 4
    assert tool.ops.count("net/d/BiasAdd:0") == 2


def test_bodies_are_counted_in_one_order() -> None:
    """Bodies and branches get ids in the order of their names: that of attributes is random."""
    value = tf.compat.v1.AttrValue(func=tf.compat.v1.NameAttrList(name="f"))
    for order in (("body", "cond"), ("cond", "body")):
        op = types.SimpleNamespace(node_def=types.SimpleNamespace(attr=dict.fromkeys(order, value)))
        assert list(_internals.function_attributes(op)) == ["body", "cond"]


def test_node_names_hold_the_loops_around_an_operator() -> None:
    """``get_node_name()`` tells the loop that runs an operator; its id does not."""
    names: dict[str, str] = {}
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: names.setdefault(c.get_op_id(), c.get_node_name()))
    model = keras.Sequential([keras.layers.SimpleRNN(2, name="rnn")], name="net")
    model(X[0])
    with amanda.apply(tool):
        tf.function(model)(X[0])
    inside = {op_id for op_id, name in names.items() if "/while/body/" in name}
    assert "net/rnn/simple_rnn_cell/Tanh:1" in inside
    assert not any("while" in op_id for op_id in names)


def test_building_a_layer_shifts_no_id() -> None:
    """A layer that is built in its first call has the same operators there as in later calls, and
    what draws its weights has ids of its own, of the setup."""
    calls: list[set[tuple[str, str]]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: calls[-1].add((c.get_op_id(), c.get_phase())))
    layers = [keras.layers.Dense(4, "gelu"), keras.layers.LayerNormalization()]
    net = keras.Sequential(layers, name="lazy")
    builds = [vars(layer)["build"] for layer in layers]
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(2):
            calls.append(set())
            net(np.ones((2, 8), np.float32))
    setup = {op_id for op_id, phase in calls[0] if phase == "setup"}
    assert {op_id for op_id, phase in calls[1] if phase != "forward"} == set()
    assert {found for found in calls[0] if found[0] not in setup} == calls[1]
    assert any("Random" in op_id for op_id in setup)
    assert [vars(layer)["build"] for layer in layers] == builds
