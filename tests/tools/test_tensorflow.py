"""The analysis tools on TensorFlow: the same tools, the same schema, the same figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.dump import DumpTool
from amanda_tools.flops import FlopsTool
from amanda_tools.nan import NanTool
from amanda_tools.stats import StatsTool
from tests.running import applied, line_of

MODES = {"eager": lambda run: run, "function": lambda run: tf.function(run)}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a function eagerly or as a graph."""
    return MODES[request.param]


@pytest.mark.slow
def test_resnet50_of_keras(mode: Any) -> None:
    """keras.applications' ResNet-50 (v1): 7.716 GFLOP, one image, in every mode."""
    model = tf.keras.applications.ResNet50(weights=None)
    image = tf.random.uniform((1, 224, 224, 3))
    tool = applied(FlopsTool(), mode(lambda x: model(x, training=False)), image)
    assert round(tool.summary()["flops"] / 1e9, 3) == 7.716
    assert tool.summary()["unknown_ops"] == {}


def test_nan_names_the_operator_and_the_line() -> None:
    """In eager mode with the user's line, as on PyTorch."""

    def run() -> None:
        x = tf.constant([1.0, 2.0])
        x = x * 1e30
        x = x * 1e30  # overflows

    first = applied(NanTool(action="record"), run).summary()["first"]
    assert (first["type"], first["kind"], first["direction"]) == ("mul", "inf", "forward")
    assert first["source"].endswith(f"test_tensorflow.py:{line_of(__file__, '# overflows')}")


def test_nan_in_a_graph(mode: Any) -> None:
    """The producing operator is named in every mode, backward too."""
    tool = applied(NanTool(action="record"), mode(lambda x: tf.math.log(x) + 1), tf.zeros(3))
    assert tool.summary()["first"]["type"] == "log"

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x))
        return tape.gradient(y, x), y

    first = applied(NanTool(action="record"), mode(step), tf.zeros(3)).summary()["first"]
    assert (first["direction"], first["type"]) == ("backward", "sqrt_backward")


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_overflow_that_loss_scaling_skips_is_no_finding(eagerly: bool) -> None:
    """Keras' optimizer for ``mixed_float16`` provokes it and leaves the parameters alone."""
    half = keras.DTypePolicy("mixed_float16")
    layers = [keras.layers.Dense(4, dtype=half), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=2.0**40)
    model.compile(scaling, "mse", run_eagerly=eagerly, jit_compile=False)
    tool = NanTool(action="warn")
    with amanda.apply(tool):
        model.fit(np.ones((6, 4)), np.ones((6, 1)) * 9, batch_size=2, verbose=0)
    assert float(scaling.dynamic_scale) < 2.0**40
    assert (tool.findings(), tool.summary()["first"]["fate"]) == ([], "skipped")


@pytest.mark.parametrize("keeps", [True, False])
def test_nan_looks_at_the_outputs_of_a_model(keeps: bool) -> None:
    """In eager mode an infinity is masked only if the outputs are finite, as the gradients are."""

    class Dropping(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x + (tf.math.log(x - x) if keeps else tf.maximum(tf.math.log(x - x), 0.0))

    def run() -> None:
        x = tf.ones(3)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = Dropping()(tf.stop_gradient(x)) + x
        tape.gradient(y, x)

    first = applied(NanTool(action="record"), run).summary()["first"]
    assert (first["type"], first["fate"]) == ("log", "reached" if keeps else "masked")


def test_of_what_is_no_number_texts_are_counted() -> None:
    """As not taken, by type; the handle of a variable has no values."""
    texts = tf.constant(["a", "b"])
    summary = applied(DumpTool(), lambda: (tf.Variable(2.0), tf.strings.upper(texts))).summary()
    assert (summary["not_taken"], summary["not_looked_at"]) == (1, {"string": 1})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float8_e4m3fn"])
def test_dumps_keep_their_bits(dtype: str) -> None:
    """Also of types that numpy lacks, which are read as float32."""
    x = tf.cast(tf.constant([[1.5, -2.25], [3.0, 4.0]]), dtype)
    tool = applied(DumpTool(), lambda: tf.reshape(x, (2, 2)))
    [entry] = tool.entries
    assert (entry.dtype, entry.shape) == (dtype, [2, 2])
    expected = tf.cast(x, "float32").numpy()
    assert np.array_equal(tool.load(entry).astype(np.float32), expected)


def test_kinds_of_numbers(mode: Callable[[Any], Any]) -> None:
    """Scalars of bfloat16 have statistics, complex numbers a NaN; `stats` counts those."""
    x = tf.constant([1.0, 2.0], tf.bfloat16)
    stats = applied(StatsTool(), lambda: mode(lambda: tf.reduce_sum(x))())
    rows = [row for row in stats.result()["ops"] if row["type"] == "sum"]
    assert [row["mean"] for row in rows] == [3]
    zero = tf.zeros(2, tf.complex64)
    nan = applied(NanTool(action="record"), lambda: mode(lambda: tf.math.abs(zero / zero))())
    assert nan.summary()["first"]["type"] == "div"
    stats = applied(StatsTool(), lambda: mode(lambda: tf.math.abs(zero + 1))())
    assert stats.result()["summary"]["not_looked_at"]["complex64"] >= 1


def test_activations_are_what_the_model_computes() -> None:
    """Neither values of weights are activations, nor what the optimizer and metrics compute."""
    layers = [keras.layers.Dense(4, activation="relu", name="one"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    model.compile("sgd", "mse", metrics=["mae"])
    stats = amanda.tools.load("stats")(tensors="activations")
    with amanda.apply(stats):
        model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    rows = stats.op_rows()
    assert {row["phase"] for row in rows} == {"forward"}
    assert "read_variable" not in {row["type"] for row in rows}
    assert {"net/one/MatMul:0", "net/one/Relu:0"} <= {row["id"] for row in rows}


def _net() -> Any:
    """A network with a reshaped kernel, two normalisation layers and a dense one."""
    layers = [
        keras.layers.EinsumDense("abc,cd->abd", output_shape=(None, 4), name="ed"),
        keras.layers.LayerNormalization(name="ln"),
        keras.layers.BatchNormalization(name="bn"),
        keras.layers.Dense(3, name="fc"),
    ]
    return keras.Sequential([keras.layers.Input((6, 8)), *layers], name="net")


def _by_parameter(tool: StatsTool, kind: str) -> dict[str, int]:
    rows = [row for row in tool.op_rows() if row["kind"] == kind and row["parameter"]]
    assert len({row["parameter"] for row in rows}) == len(rows)
    return {row["parameter"]: row["executions"] for row in rows}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_weights_of_keras_have_their_paths(run_eagerly: bool) -> None:
    """gamma and beta are weights, and what else Keras counts, the optimizer's state is none; there
    is a row for the gradient of each parameter, also of one that an operator only hands on."""
    model = _net()
    model.compile("adam", "mse", run_eagerly=run_eagerly)
    x, y = np.ones((4, 6, 8), "float32"), np.ones((4, 6, 3), "float32")
    tool = applied(StatsTool(), lambda: model.fit(x, y, batch_size=2, verbose=0))
    weights = {variable.path for variable in model.weights}
    assert _by_parameter(tool, "weights") == dict.fromkeys(weights, 2)
    paths = {variable.path for variable in model.trainable_variables}
    assert _by_parameter(tool, "gradients") == dict.fromkeys(paths, 2)


def test_gradients_in_a_loop_are_those_of_its_steps() -> None:
    """The loop of a recurrent layer names the parameter whose gradient a step computes."""
    lstm, gru = keras.layers.LSTM(4, return_sequences=True), keras.layers.GRU(4)
    model = keras.Sequential([keras.layers.Input((5, 6)), lstm, gru])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 5, 6), "float32"), np.ones((4, 4), "float32")
    tool = applied(StatsTool(), lambda: model.fit(x, y, verbose=0))
    paths = {variable.path for variable in model.trainable_variables}
    assert _by_parameter(tool, "gradients") == dict.fromkeys(paths, 5)


@pytest.mark.parametrize("kind", ["eager", "function", "session", "reference"])
def test_weights_have_their_names(kind: str) -> None:
    """Variables of TensorFlow, frozen ones left out, in each mode; where the gradients of several
    operators are added, the row is of the sum."""
    tool, tf1 = StatsTool(), tf.compat.v1

    def make(name: str, value: Any, trainable: bool = True) -> Any:
        if kind in ("eager", "function"):
            return tf.Variable(value, name=name, trainable=trainable)
        form = {"use_resource": kind == "session", "trainable": trainable}
        return tf1.get_variable(name, initializer=value, **form)

    def loss(w: Any, scale: Any) -> Any:
        x = tf.ones((2, 8))
        return tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)) * scale + tf.matmul(2 * x, w))

    if kind in ("eager", "function"):
        w, scale = make("w", tf.ones((8, 3))), make("scale", tf.ones((3,)), trainable=False)

        def step() -> Any:
            with tf.GradientTape() as tape:
                found = loss(w, scale)
            return found, tape.gradient(found, w)

        applied(tool, step if kind == "eager" else tf.function(step))
    else:
        with tf.Graph().as_default(), tf1.Session() as session:
            w, scale = make("w", tf.ones((8, 3))), make("scale", tf.ones((3,)), trainable=False)
            found = loss(w, scale)
            fetches = [found, tf.gradients(found, w)[0]]
            session.run(tf1.global_variables_initializer())
            applied(tool, lambda: session.run(fetches))
    assert _by_parameter(tool, "weights") == {"w": 1}
    gradients = {row["parameter"]: row for row in tool.op_rows() if row["kind"] == "gradients"}
    assert (gradients["w"]["executions"], gradients["w"]["max"]) == (1, 6)


def test_each_iteration_of_a_loop_counts() -> None:
    """The cell of an LSTM runs at each token; no result needs its call before the loop."""
    layers = [keras.layers.Input((5, 4)), keras.layers.LSTM(3, name="lstm")]
    model = keras.Sequential(layers, name="net")
    flops, stats = FlopsTool(), StatsTool()
    with amanda.apply(flops, stats):
        model.predict(np.ones((2, 5, 4)), verbose=0)
    assert _by_parameter(stats, "weights") == {variable.path: 5 for variable in model.weights}
    written = flops.summary()["by_module"]["net/lstm/lstm_cell"]["activation_bytes"]
    assert written == 4 * 5 * 2 * (4 * 12 + 9 * 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_of_one_name_are_apart(compiled: bool) -> None:
    """Each of two variables of one name has rows of its own; weights are looked at once a step,
    also where a function is traced again."""
    first, second = (tf.Variable(tf.fill((2, 2), x), name="w") for x in (1.0, 3.0))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ first @ second)
        return loss, tape.gradient(loss, [first, second])

    run = tf.function(step) if compiled else step
    tool = applied(StatsTool(), lambda: [run(tf.ones((n, 2))) for n in (2, 3, 3)])
    assert _by_parameter(tool, "weights") == {"w": 3, "w@1": 3}
    rows = {(row["parameter"], row["kind"]): row["mean"] for row in tool.op_rows()}
    assert (rows["w", "weights"], rows["w@1", "weights"]) == (1, 3)
    assert (rows["w", "gradients"], rows["w@1", "gradients"]) == (16, pytest.approx(16 / 3))


def test_a_nan_names_the_variable_that_holds_it() -> None:
    """In a kernel, by its path."""
    model = _net()
    kernel = model.get_layer("fc").kernel
    kernel.assign(np.full(kernel.shape, np.nan))
    tool = applied(NanTool(action="record"), lambda: model.predict(np.ones((2, 6, 8)), verbose=0))
    received = tool.summary()["received"]
    assert (received["parameter"], received["is_parameter"]) == ("net/fc/kernel", True)
