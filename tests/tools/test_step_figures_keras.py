"""FLOPs and activations of one step of a Keras transformer: the figures of a count by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.cli.pages import ModuleTensors
from amanda_tools.flops import FlopsTool
from tests.running import applied

BATCH, TOKENS, WIDTH, HEADS, INNER, CLASSES = 4, 8, 16, 2, 32, 3


def transformer() -> keras.Model:
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(20, WIDTH)(tokens)
    for _ in range(2):
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, flash_attention=False)
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        inner = keras.layers.Dense(INNER, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(WIDTH)(inner))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(x))


def forward() -> int:
    """Twice the multiply-accumulates of a batch."""
    projections = 4 * TOKENS * WIDTH * WIDTH
    scores_and_values = 2 * TOKENS * TOKENS * WIDTH
    dense = 2 * TOKENS * WIDTH * INNER
    return 2 * BATCH * (2 * (projections + scores_and_values + dense) + WIDTH * CLASSES)


def fit(steps: int, **options: Any) -> None:
    """Build the model, and train it by ``fit``."""
    keras.utils.set_random_seed(0)
    model = transformer()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False, **options)
    tokens = np.random.default_rng(0).integers(0, 20, (BATCH * steps, TOKENS))
    labels = np.arange(BATCH * steps) % CLASSES
    model.fit(tokens, labels, batch_size=BATCH, verbose=0)


def in_session(steps: int) -> None:
    """Build the model in a graph of TensorFlow 1, and train it in a session."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        tokens = v1.placeholder(tf.int32, (BATCH, TOKENS))
        loss = tf.reduce_sum(transformer()(tokens) ** 2)
        optimizer = v1.train.GradientDescentOptimizer(0.01)
        train = optimizer.minimize(loss, None, v1.trainable_variables())
        session.run(v1.global_variables_initializer())
        for _ in range(steps):
            session.run(train, {tokens: np.zeros((BATCH, TOKENS))})


PROGRAMS: dict[str, Callable[[int], None]] = {
    "fit": fit,
    "four steps at once": lambda steps: fit(steps, steps_per_execution=4),
    "eager": lambda steps: fit(steps, run_eagerly=True),
    "session": in_session,
}


@pytest.mark.parametrize(
    ("program", "steps"),
    [
        ("fit", 1),
        ("fit", 3),
        ("four steps at once", 6),
        ("eager", 2),
        ("session", 1),
        ("session", 3),
    ],
)
def test_a_step_has_the_figure_of_a_count_by_hand(program: str, steps: int) -> None:
    """Twice as much backward as forward: every factor has a gradient. Building is not part of
    it."""
    tool = applied(FlopsTool(), lambda: PROGRAMS[program](steps))
    summary = tool.result()["summary"]
    assert summary["steps"] == steps
    step = summary["per_step"]
    assert (step["flops"], step["flops_backward"]) == (forward(), 2 * forward())
    assert not {"min", "max"} & step.keys()
    assert summary["flops"] == steps * step["flops"]
    # What a model in a loop of a graph is given, or one in a session, is not known.
    samples = (BATCH, BATCH * TOKENS) if program in ("fit", "eager") else (None, None)
    assert (step.get("samples"), step.get("tokens")) == samples
    assert summary["phases"]["setup"]["flops"] == 0


def activations() -> int:
    """Bytes that the operators of a batch write; reshapes and values of weights are none."""
    tokens = BATCH * TOKENS
    states, inner, scores = tokens * WIDTH, tokens * INNER, BATCH * HEADS * TOKENS**2
    # Queries, keys, values and outputs have a product and a bias; of the scores there are raw,
    # scaled and normalized ones.
    attention = 4 * 2 * states + 3 * scores + states
    # Mean, variance, with epsilon, its root, and the mean negated; differences, scale, and four.
    norm = 5 * tokens + 6 * states
    # A product, a bias, and five parts of the activation function.
    up, down = 7 * inner, 2 * states
    block = attention + norm + up + down + norm + 2 * states
    # An index may count from the end: a comparison, a sum, and what is chosen.
    embedding = (1 + 4 + 4) * tokens + 4 * states
    return embedding + 4 * (2 * block + BATCH * WIDTH + 2 * BATCH * CLASSES)


def call(compiled: bool) -> None:
    """Build the model, and call it."""
    keras.utils.set_random_seed(0)
    model = transformer()
    run = tf.function(lambda tokens: model(tokens)) if compiled else model
    run(np.zeros((BATCH, TOKENS), "int32"))


@pytest.mark.parametrize(
    "run",
    [
        lambda: call(compiled=False),
        lambda: call(compiled=True),
        lambda: fit(2),
        lambda: fit(2, run_eagerly=True),
    ],
    ids=["eager", "function", "fit", "fit, eager"],
)
def test_activations_are_those_of_a_count_by_hand(run: Callable[[], None]) -> None:
    """In ``flops`` and ``summary``, without those of the loss; building the model has none."""
    flops, summary = FlopsTool(), amanda.tools.load("summary")()
    with amanda.apply(flops, summary):
        run()
    (model,) = summary.summary()["models"].values()
    assert model["activation_bytes"] == flops.summary()["activation_bytes"] == activations()


def test_bytes_are_those_of_the_last_training_step() -> None:
    """They come from the run, as the size of the last batch does, and are not of an evaluation."""
    layers = [keras.layers.Dense(64, activation="relu", name="a"), keras.layers.Dense(10, name="b")]
    model = keras.Sequential([keras.Input((32,)), *layers], name="net")
    model.compile("sgd", "mse")
    flops, profile, modules = FlopsTool(), amanda.tools.load("profile")(), ModuleTensors()
    with amanda.apply(flops, profile, modules):
        model.predict(np.ones((5, 32)), verbose=0)
        model.fit(np.ones((40, 32)), np.ones((40, 10)), batch_size=16, verbose=0)
        model.predict(np.ones((3, 32)), verbose=0)
    expected = {"net/a": 8 * 64 * 4 * 3, "net/b": 8 * 10 * 4 * 2}
    for tool, figure in ((flops, "activation_bytes"), (profile, "output_bytes")):
        found = tool.summary()["by_module"]
        assert {name: found[name][figure] for name in expected} == expected
    assert flops.summary()["activations_of_unknown_size"] == 0
    shapes = {row["path"]: [row[key][0]["shape"] for key in ("inputs", "outputs")] for row in
              modules.rows()}  # fmt: skip
    assert shapes["net/a"] == [[8, 32], [8, 64]]
    assert shapes["net/b"] == [[8, 64], [8, 10]]


@pytest.mark.parametrize("order", ["evaluate fit", "fit evaluate"])
def test_operators_are_shown_as_in_training(order: str) -> None:
    """Keras trains and evaluates in graphs of their own, with the same ids: shapes are those of the
    graph that computes gradients."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="a")], name="net")
    model.compile("sgd", "mse")
    tools = FlopsTool(), amanda.tools.load("profile")()
    x, y = np.ones((8, 6)), np.ones((8, 4))
    with amanda.apply(*tools):
        for what in order.split():
            getattr(model, what)(x, y, batch_size=2 if what == "evaluate" else 4, verbose=0)
    for tool in tools:
        found = [row for row in tool.op_rows() if row["id"] == "net/a/MatMul:0"]
        assert [row["outputs"][0]["shape"] for row in found] == [[4, 4]]


@pytest.mark.parametrize(
    "run", [lambda: call(compiled=False), lambda: fit(1)], ids=["eager", "fit"]
)
def test_a_parameter_counts_at_the_operator_that_computes_with_it(run: Callable[[], None]) -> None:
    """Not at the reshape that reads it before, too: rows add up to the sum."""
    tool = applied(FlopsTool(), run)
    rows = [row for row in tool.op_rows() if row.get("params")]
    assert sum(row["params"] for row in rows) == tool.summary()["params"]
    assert {row["type"] for row in rows} == {"embedding", "linear", "add", "bias_add", "mul"}
    assert sum(row["weight_bytes"] for row in rows) == tool.summary()["weight_bytes"]


def test_values_of_parameters_are_no_outputs_in_profile() -> None:
    """The same operators have bytes in ``profile`` and in ``flops``."""
    flops, profile = FlopsTool(), amanda.tools.load("profile")()
    with amanda.apply(flops, profile):
        call(compiled=False)
    rows = [row for row in profile.op_rows() if row["phase"] == "forward"]
    assert sum(row["output_bytes"] for row in rows) == activations()
    assert {row["output_bytes"] for row in rows if row["type"] == "read_variable"} == {0}


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_validation_and_a_smaller_last_batch(options: dict[str, Any]) -> None:
    """Each step has its own figures, those of the last one of an epoch are smaller; what is
    evaluated before, between and after epochs is not part of any."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((5, 4)), layers.LSTM(3), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False, **options)
    x, y = np.ones((10, 5, 4), "float32"), np.ones((10, 2), "float32")
    tool = FlopsTool()
    with amanda.apply(tool):
        model.evaluate(x[:3], y[:3], verbose=0)
        model.fit(x, y, BATCH, 2, verbose=0, validation_data=(x, y), validation_batch_size=5)
        model.predict(x, verbose=0)
    series, sizes = tool.figures_of_steps().values(), 2 * [4, 4, 2]
    assert len(series) == len(sizes)
    # Eagerly Keras runs the cell once more than there are positions, to learn the type of its
    # output. In graphs no result needs that.
    runs = 6 if options.get("run_eagerly") else 5
    shares = {step["flops"] / size for step, size in zip(series, sizes, strict=True)}
    assert shares == {2 * (runs * 4 * (4 * 3 + 3 * 3) + 3 * 2)}
    # Gradients of the weights, and of the state in all steps but, eagerly, the first; none of data.
    states = 4 if options.get("run_eagerly") else 5
    backward = {step["flops_backward"] / size for step, size in zip(series, sizes, strict=True)}
    assert backward == {2 * (5 * 4 * (4 * 3 + 3 * 3) + states * 4 * 3 * 3 + 2 * 3 * 2)}
