"""``summary`` of models of Keras, beside Keras' own figures."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amanda
from tests.tools import keras_transformer
from tests.tools.keras_process import run_on_pytorch
from tests.tools.keras_transformer import TOKENS


def test_models_of_keras_in_tensorflow() -> None:
    """Eager, in a graph, and by the function: shapes, parameters and operations are right."""
    keras_transformer.main()


def test_models_of_keras_in_pytorch() -> None:
    """The same on the other backend."""
    run_on_pytorch("-m", "tests.tools.keras_transformer")


def convolutions() -> Any:
    """A small network with layers of several kinds."""
    import keras

    layers = keras.layers
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same", name="conv")(inputs)
    x = layers.Activation("relu", name="relu")(layers.BatchNormalization(name="norm")(x))
    x = layers.SeparableConv2D(6, 3, name="separable")(layers.Dropout(0.1, name="drop")(x))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(x), name="cnn")


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "cnn": (convolutions, np.ones((4, 16, 16, 3), "float32")),
    "transformer": (keras_transformer.build, TOKENS),
}


def check_printed(model: Any, found: list[dict[str, Any]]) -> None:
    """The rows have what ``Model.summary()`` prints."""
    printed = io.StringIO()
    model.summary(print_fn=functools.partial(print, file=printed))
    cells = [re.split("[|│]", line) for line in printed.getvalue().splitlines()]
    lines = [[cell.strip() for cell in line[1:4]] for line in cells if len(line) > 4]
    for at in reversed(range(1, len(lines))):
        if not lines[at][1]:
            # A long name, or a layer with several inputs, goes on in the next line.
            lines[at - 1][0] = f"{lines[at - 1][0]} {lines[at][0]}"
            del lines[at]
    rows = {row["path"]: row for row in found}
    assert len(lines) == len(model.layers)
    for label, shape, parameters in lines:
        row = rows[f"{model.name}/{label.split(' ')[0]}"]
        assert f"({row['type']})" in label
        assert str((None, *row["output"][1:])) == shape
        assert f"{row['parameters']:,}" == parameters


@pytest.mark.parametrize("name", MODELS)
def test_what_keras_prints_is_in_the_rows(name: str) -> None:
    """``Model.summary()``, line by line: layers, their shapes and their parameters."""
    build, x = MODELS[name]
    model = build()
    check_printed(model, amanda.summary(model, x).modules)


def shared() -> Any:
    """A layer that is called twice."""
    import keras

    inputs, layer = keras.Input((4,)), keras.layers.Dense(4, name="layer")
    return keras.Model(inputs, layer(layer(inputs)), name="shared")


def nested() -> Any:
    """A model within a model, and parts of it that are not trained."""
    import keras

    layers = keras.layers
    inner = keras.Sequential([layers.Dense(3, name="a"), layers.Dense(5, name="b")], name="inner")
    inner.trainable = False
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="head")(inner(inputs)), name="nested")


def recurrent() -> Any:
    """A layer that wraps another one, in both directions."""
    import keras

    layers, inputs = keras.layers, keras.Input((5, 3))
    both = layers.Bidirectional(layers.LSTM(4, name="lstm"), name="both")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="head")(both), name="recurrent")


@pytest.mark.parametrize(
    ("build", "shape", "calls"),
    [
        (shared, (2, 4), {"layer": 2}),
        (nested, (2, 4), {"inner": 1, "inner/a": 1, "inner/b": 1}),
        (recurrent, (2, 5, 3), {"both": 1, "both/forward_lstm": 1, "both/backward_lstm": 1}),
    ],
)
def test_layers_that_are_shared_nested_or_wrapped(
    build: Callable[[], Any], shape: tuple[int, ...], calls: dict[str, int]
) -> None:
    """Lines, parameters and what of them is trained are Keras' own; calls are those of the pass."""
    model = build()
    found = amanda.summary(model, np.ones(shape, "float32")).modules
    check_printed(model, found)
    assert found[0]["parameters"] == model.count_params()
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert found[0]["trainable"] == trained
    rows = {row["path"]: row["calls"] for row in found}
    assert {name: rows[f"{model.name}/{name}"] for name in calls} == calls


def in_session(build: Callable[[], Any], x: Any) -> tuple[Any, Any]:
    """The model in a graph of TensorFlow 1, and its summary in two runs of a session."""
    import tensorflow as tf

    tf1, tool = tf.compat.v1, amanda.tools.load("summary")()
    with tf.Graph().as_default() as graph:
        model, given = build(), tf1.placeholder(tf.as_dtype(x.dtype), (None, *x.shape[1:]))
        result = model(given)
        start = tf1.global_variables_initializer()
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(start)
        for _ in range(2):
            session.run(result, {given: x})
    with graph.as_default():
        check_printed(model, tool.modules())
    return model, tool


def in_function(build: Callable[[], Any], x: Any) -> tuple[Any, Any]:
    """The same in two runs of a function that was traced before."""
    import tensorflow as tf

    model, tool = build(), amanda.tools.load("summary")()
    function = tf.function(lambda x: model(x))
    function(x)
    with amanda.apply(tool):
        for _ in range(2):
            function(x)
    check_printed(model, tool.modules())
    return model, tool


def in_fit(build: Callable[[], Any], x: Any) -> tuple[Any, Any]:
    """The same in two steps of training."""
    model, tool = build(), amanda.tools.load("summary")()
    model.compile("sgd", "mse")
    with amanda.apply(tool):
        model.fit(np.tile(x, (2, *[1] * (x.ndim - 1))), np.ones((8, 3)), 4, verbose=0)
    check_printed(model, tool.modules())
    return model, tool


@pytest.mark.parametrize(
    ("run", "name"),
    # The transformer is trained by `keras_transformer.main` above.
    [*((run, name) for run in (in_session, in_function) for name in MODELS), (in_fit, "cnn")],
)
def test_models_of_keras_in_graphs(run: Any, name: str) -> None:
    """Shapes and parameters of a run are those that Keras prints, and the figures those of an eager
    pass."""
    build, x = MODELS[name]
    model, tool = run(build, x)
    expected = {row["path"]: row for row in amanda.summary(build(), x).modules}
    found = {row["path"]: row for row in tool.modules()}
    # Keras names an input by a number of its own.
    inputs = {path for path, row in found.items() if row["type"] == "InputLayer"}
    assert found.keys() - inputs == {p for p, r in expected.items() if r["type"] != "InputLayer"}
    for path in found.keys() - inputs:
        for figure in ("output", "calls", "parameters", "macs"):
            assert found[path][figure] == expected[path][figure], (path, figure)
    assert tool.summary()["models"][model.name]["passes"] == 2


def test_the_output_of_a_cell_is_known_where_its_first_call_computes_nothing() -> None:
    """Keras calls it to learn what it gives, which a graph does not compute; a loop runs it."""
    import keras

    layers, tool = keras.layers, amanda.tools.load("summary")()
    model = keras.Sequential([keras.Input((5, 4)), layers.GRU(3, name="gru"), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    with amanda.apply(tool):
        model.fit(np.ones((4, 5, 4)), np.ones((4, 2)), 4, verbose=0)
    [cell] = [row for row in tool.modules() if row["path"].endswith("gru/gru_cell")]
    assert cell["output"] == [4, 3]
    assert cell["macs"] == 4 * 5 * (4 + 3) * 9


def test_a_layer_that_is_not_built_calls_its_parts_once() -> None:
    """Keras calls them to learn their shapes, which is not part of the pass."""
    tool = amanda.tools.load("summary")()
    with amanda.apply(tool):
        keras_transformer.Block(8, name="block")(np.ones((4, 6, 8), "float32"))
    rows = {row["path"]: row for row in tool.modules()}
    assert {row["calls"] for row in rows.values()} == {1}
    assert rows["block"]["parameters"] == 4 * (8 * 8 + 8) + 16 + 2 * 8 * 32 + 40


def test_a_function_that_a_layer_calls_at_once_adds_to_the_layer(tmp_path: Path) -> None:
    """The layers around it run eagerly: one whose method is compiled, one of a SavedModel."""
    import keras
    import tensorflow as tf

    class Compiled(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=(shape[-1], 5), name="w")

        @tf.function
        def call(self, x: Any) -> Any:
            return x @ self.w

    inner = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    inner.export(str(tmp_path), verbose=False)
    loaded = keras.layers.TFSMLayer(str(tmp_path), call_endpoint="serve", name="loaded")
    parts = [Compiled(name="compiled"), loaded, keras.layers.Dense(3, name="eager")]
    model = keras.Sequential([keras.Input((3,)), *parts], name="outer")
    tool = amanda.tools.load("summary")()
    with amanda.apply(tool):
        for _ in range(2):
            model(np.ones((2, 3), np.float32))
    flops = {row["path"]: row["flops"] for row in tool.modules()}
    of_compiled, of_loaded, of_eager = 2 * 2 * 3 * 5, 2 * 2 * (5 * 4 + 4 * 2), 2 * 2 * 2 * 3
    expected = {"compiled": of_compiled, "loaded": of_loaded, "eager": of_eager}
    assert {
        path.removeprefix("outer/"): flops[path] for path in flops if path != "outer"
    } == expected
    assert flops["outer"] == of_compiled + of_loaded + of_eager
    sizes = {row["path"]: row["activation_bytes"] for row in tool.modules()}
    assert sizes["outer/compiled"] == 2 * 5 * 4
