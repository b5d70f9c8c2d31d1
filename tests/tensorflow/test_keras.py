"""Keras models, untouched: fit, evaluate and predict, compiled or not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CoverageWarning
from amanda.tools.mapping import MappingTool
from tests.identity import Identity
from tests.tensorflow import support
from tests.tensorflow.support import Counter, Watcher

EXAMPLES = 8
BATCH = 4
EPOCHS = 2
STEPS = EPOCHS * EXAMPLES // BATCH
FIT = {"epochs": EPOCHS, "batch_size": BATCH, "verbose": 0, "shuffle": False}


def data() -> tuple[Any, Any]:
    """Images and labels."""
    random = np.random.default_rng(0)
    x = random.standard_normal((EXAMPLES, 6, 6, 2)).astype(np.float32)
    return x, random.integers(0, 3, EXAMPLES)


def convolutional(**compiled: Any) -> Any:
    """A small network with all usual kinds of layers."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, use_bias=False, name="c1"),
            keras.layers.BatchNormalization(name="b1"),
            keras.layers.ReLU(name="r1"),
            keras.layers.MaxPooling2D(2, name="p1"),
            keras.layers.Dropout(0.25, name="d1"),
            keras.layers.Flatten(name="f1"),
            keras.layers.Dense(3, name="fc"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **compiled)
    return model


def trained(model: Any, *tools: amanda.Tool) -> list[Any]:
    """The weights after ``fit``, and what ``evaluate`` and ``predict`` give then."""
    x, y = data()
    with amanda.apply(*tools) if tools else contextlib.nullcontext():
        history = model.fit(x, y, **FIT).history
        return [*model.get_weights(), history, model.evaluate(x, y, verbose=0)]


MODES: Sequence[dict[str, Any]] = ({}, {"run_eagerly": True}, {"steps_per_execution": 2})


@pytest.mark.parametrize("compiled", MODES, ids=str)
def test_watching_a_fit(compiled: dict[str, Any]) -> None:
    """Weights, history and metrics of a training that is watched are bit-identical."""
    expected = trained(convolutional(**compiled))
    tool = Watcher()
    support.assert_same_bits(trained(convolutional(**compiled), tool), expected)
    assert tool.seen


@pytest.mark.parametrize("compiled", MODES, ids=str)
@pytest.mark.parametrize("traced", ["before", "inside"])
def test_counting_a_fit(compiled: dict[str, Any], traced: str) -> None:
    """Every step is counted, whether Keras has made its functions before the scope or not."""
    model = convolutional(**compiled)
    x, y = data()
    if traced == "before":
        model.fit(x, y, **FIT)
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        model.predict(x, batch_size=BATCH, verbose=0)
    counts = []
    for run in (
        lambda: model.fit(x, y, **FIT),
        lambda: model.evaluate(x, y, batch_size=BATCH, verbose=0),
        lambda: model.predict(x, batch_size=BATCH, verbose=0),
    ):
        tool = Counter(["Conv2D", "Conv2DBackpropFilter", "FusedBatchNormV3", "MatMul"])
        with amanda.apply(tool):
            run()
        counts.append((tool.forward["Conv2D"], tool.backward["Conv2DBackpropFilter"]))
    assert counts == [(STEPS, STEPS), (EXAMPLES // BATCH, 0), (EXAMPLES // BATCH, 0)]
    # After the scopes, nobody counts.
    before = dict(tool.forward)
    model.predict(x, batch_size=BATCH, verbose=0)
    assert tool.forward == before


@pytest.mark.parametrize("compiled", MODES, ids=str)
def test_canonical_types_of_layers(compiled: dict[str, Any]) -> None:
    """Each layer's operator has its canonical type, and its weights are found."""
    found: dict[str, tuple[Any, ...]] = {}

    class Look(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.depends_on(MappingTool.standard())
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            index = context["weight_index"]
            if index is not None:
                shape = tuple(context.get_value(index).shape)
                found[context["op_type"]] = (shape, context["weight_layout"])

    model = convolutional(**compiled)
    x, y = data()
    with amanda.apply(Look()):
        model.fit(x, y, **FIT)
    # Keras 3 builds its normalizations of elementwise operators.
    assert found == {"conv2d": ((3, 3, 2, 4), "HWIO"), "linear": ((16, 3), "IO")}


def test_xla() -> None:
    """A function that is compiled by XLA runs without it where a routine runs Python, and a
    warning says so."""
    model = convolutional(jit_compile=True)
    tool = Counter(["Conv2D"])
    x, _ = data()
    expected = convolutional(jit_compile=True).predict(x, verbose=0)
    with pytest.warns(CoverageWarning, match="XLA"), amanda.apply(tool):
        actual = model.predict(x, verbose=0)
    assert tool.forward["Conv2D"] == 1
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_identity_routines_everywhere() -> None:
    """A fit with routines at every point is that of the vanilla model but for rounding."""
    expected = convolutional().fit(*data(), **FIT).history["loss"]
    tool = Identity()
    with amanda.apply(tool):
        actual = convolutional().fit(*data(), **FIT).history["loss"]
    assert tool.calls
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def recurrent(layer: str) -> Any:
    """A model of sequences."""
    keras.utils.set_random_seed(2)
    inputs = keras.layers.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(7, 4)(inputs)
    if layer == "attention":
        hidden = keras.layers.MultiHeadAttention(2, 2)(hidden, hidden)
        hidden = keras.layers.LayerNormalization()(hidden)
    else:
        hidden = getattr(keras.layers, layer)(3, return_sequences=True)(hidden)
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN", "attention"])
def test_models_of_sequences(layer: str) -> None:
    """Loops, embeddings and attention train as without a tool, and their products are seen."""
    x = np.arange(20).reshape(4, 5) % 7
    y = np.linspace(0.0, 1.0, 4).astype(np.float32)
    arguments = {"epochs": 2, "verbose": 0, "shuffle": False}
    vanilla = recurrent(layer)
    vanilla.fit(x, y, **arguments)
    watched = recurrent(layer)
    tool = Watcher()
    with amanda.apply(tool):
        watched.fit(x, y, **arguments)
    support.assert_same_bits(watched.get_weights(), vanilla.get_weights())
    counter = Counter()
    with amanda.apply(counter):
        watched.predict(x, verbose=0)
    assert counter.forward["MatMul"] + counter.forward["Einsum"] > 1


class Unlucky(Exception):
    """Raised by the tool of the next test."""


def notes(error: BaseException | None) -> list[str]:
    """The notes of an exception. Keras raises a copy of what a layer raises, without them."""
    if error is None:
        return []
    return [*getattr(error, "__notes__", ()), *notes(error.__context__)]


@pytest.mark.parametrize("compiled", MODES, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_exceptions_in_a_fit(compiled: dict[str, Any], backward: bool) -> None:
    """An exception in a routine leaves ``fit`` as itself, with the note; the model goes on."""

    class Failing(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.look, backward=backward)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "Conv2D":
                insert = context.insert_before_backward_op if backward else context.insert_before_op
                insert(self.fail)

        def fail(self, *tensors: Any) -> None:
            raise Unlucky("as planned")

    model = convolutional(**compiled)
    with pytest.raises(Unlucky, match="as planned") as caught, amanda.apply(Failing()):
        model.fit(*data(), **FIT)
    (note,) = [n for n in notes(caught.value) if "Failing.fail" in n]
    assert "Conv2D" in note
    model.fit(*data(), **FIT)


def test_a_dataset() -> None:
    """A model that is fed by tf.data trains as vanilla; map functions are not instrumented."""
    x, y = data()

    def run(*tools: amanda.Tool) -> list[Any]:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: (a * 2.0, b))
        model = convolutional()
        with amanda.apply(*tools) if tools else contextlib.nullcontext():
            model.fit(dataset.batch(BATCH), epochs=EPOCHS, verbose=0, shuffle=False)
        return list(model.get_weights())

    tool = Counter(["Conv2D"])
    expected = run()
    support.assert_same_bits(run(Watcher()), expected)
    run(tool)
    assert tool.forward["Conv2D"] == STEPS
