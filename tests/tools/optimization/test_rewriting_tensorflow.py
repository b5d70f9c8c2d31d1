"""Subgraph rewriting on TensorFlow: eagerly, in functions and in sessions, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.tools.subgraph_rewriting import Op, SubgraphRewritingTool

v1 = tf.compat.v1

Arrays = list[Any]
Run = Callable[[], tuple[Any, Arrays]]
"""Gives the output and the gradients of the inputs."""


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


QKV = [random(2, 3, 4), random(2, 5, 4), random(2, 5, 6)]


def attention(q: Any, k: Any, v: Any) -> Any:
    """What a program writes."""
    scores = tf.matmul(q, k, transpose_b=True) * 0.5
    return tf.matmul(tf.nn.softmax(scores), v)


def fused(q: Any, k: Any, v: Any) -> Any:
    """The same, in another way, doubled so that it can be told apart."""
    weights = tf.exp(tf.einsum("bqe,bke->bqk", q, k) * 0.5)
    return 2 * tf.einsum("bqk,bke->bqe", weights / tf.reduce_sum(weights, -1, keepdims=True), v)


PATTERN = Op("matmul", Op("softmax", Op("mul", Op("matmul", "q", "k"))), "v")


# -- the modes -------------------------------------------------------------------


def eager(model: Callable[..., Any], inputs: Arrays) -> Run:
    tensors = [tf.constant(value) for value in inputs]

    def run() -> tuple[Any, Arrays]:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            y = model(*tensors)
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, tensors)

    return run


def tape_inside(model: Callable[..., Any], inputs: Arrays) -> Run:
    function = tf.function(eager(model, inputs))
    return lambda: function()


def tape_outside(model: Callable[..., Any], inputs: Arrays) -> Run:
    return eager(tf.function(model), inputs)


def session(model: Callable[..., Any], inputs: Arrays) -> Run:
    with tf.Graph().as_default() as graph:
        tensors = [v1.placeholder(tf.float32, value.shape) for value in inputs]
        y = model(*tensors)
        wanted = y, v1.gradients(tf.reduce_sum(y * y), tensors)
    running = v1.Session(graph=graph)
    return lambda: running.run(wanted, dict(zip(tensors, inputs, strict=True)))


MODES = {mode.__name__: mode for mode in (eager, tape_inside, tape_outside, session)}


def rewritten(run: Run, tool: SubgraphRewritingTool, times: int = 2) -> tuple[Any, Arrays]:
    """The last of some runs; the first one has traced."""
    with amanda.apply(tool):
        for _ in range(times):
            found = run()
            amanda.new_iteration()
    return found


def assert_close(found: tuple[Any, Arrays], expected: tuple[Any, Arrays]) -> None:
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert a is not None
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize("mode", MODES)
def test_attention_is_replaced_with_its_gradients(mode: str) -> None:
    """From the second run on; gradients reach what comes in from outside."""
    tool = SubgraphRewritingTool(PATTERN, fused)
    run = MODES[mode](lambda q, k, v: attention(q * 1.0, k * 1.0, v * 1.0), QKV)
    exact = run()
    with amanda.apply(tool):
        first = run()
    assert_close(first, exact)
    tool = SubgraphRewritingTool(PATTERN, fused)
    assert_close(rewritten(run, tool), eager(fused, QKV)())
    assert len(tool.matches) == 1, tool.rejected
    assert_close(run(), exact)


@pytest.mark.parametrize("mode", MODES)
def test_one_tensor_may_come_in_twice_and_go_around(mode: str) -> None:
    """Self-attention with a residual: all ways of one tensor add up."""

    def model(x: Any) -> Any:
        h = x * 1.0
        return h + attention(h, h, h)

    def expected(x: Any) -> Any:
        return x + fused(x, x, x)

    x = [random(2, 3, 3)]
    tool = SubgraphRewritingTool(PATTERN, fused)
    assert_close(rewritten(MODES[mode](model, x), tool), eager(expected, x)())
    assert len(tool.matches) == 1, tool.rejected


@pytest.mark.parametrize("mode", ["tape_inside", "tape_outside", "session"])
def test_matches_in_loops(mode: str) -> None:
    """The body of a loop whose gradient the graph already holds is differentiated anew."""

    def model(x: Any) -> Any:
        body = lambda i, x: (i + 1, tf.sin(x * 0.5) + x)  # noqa: E731
        return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x * 1.0))[1]

    def expected(x: Any) -> Any:
        for _ in range(3):
            x = tf.cos(x * x) + x
        return x

    x = [random(4)]
    tool = SubgraphRewritingTool(Op("sin", Op("mul", "x")), lambda x: tf.cos(x * x))
    assert_close(rewritten(MODES[mode](model, x), tool), eager(expected, x)())
    assert len(tool.matches) == 1, tool.rejected


@pytest.mark.parametrize("mode", ["eager", "tape_inside", "session"])
def test_a_dead_branch_is_removed(mode: str) -> None:
    """What a model multiplies by zero is not computed any more in a graph."""
    executed: list[Any] = []

    class Count(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "Exp":
                context.insert_before_op(lambda *_: executed.append(1))

    def model(x: Any) -> Any:
        return tf.sin(x) + 0.0 * tf.exp(x * 1.0)

    pattern = Op("add", "x", Op("mul", None, Op("exp", "dead")))
    run = MODES[mode](model, [random(4)])
    expected = run()
    counted, tool = Count(), SubgraphRewritingTool(pattern)
    with amanda.apply(tool, counted):
        for _ in range(3):
            found = run()
            amanda.new_iteration()
    assert_close(found, expected)
    assert len(tool.matches) == 1, tool.rejected
    # In eager mode it still runs, and nothing reads it.
    assert len(executed) == (3 if mode == "eager" else 1)


# -- batch normalization ---------------------------------------------------------


def folded(x: Any, weight: Any, gamma: Any, beta: Any, mean: Any, variance: Any, match: Any) -> Any:
    factor = gamma * tf.math.rsqrt(variance + match.attributes("batch_norm")["epsilon"])
    return match.run("conv2d", x, weight * factor) + (beta - mean * factor)


FOLD = Op("batch_norm", Op("conv2d", "x", "weight"), "gamma", "beta", "mean", "variance")


def normalized(x: Any) -> Any:
    """A convolution of constants, and a normalization for inference."""
    parts = [1.0 + abs(random(n, 6)[0]) for n in (2, 3, 4, 5)]
    h = tf.nn.conv2d(x, random(3, 3, 4, 6), 2, "SAME")
    return v1.nn.fused_batch_norm(h, *parts, epsilon=1e-3, is_training=False)[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_normalization_is_folded_into_the_convolution(mode: str) -> None:
    """The replacement gives the one output of six that is read."""
    x = [random(2, 9, 9, 4)]
    run = MODES[mode](normalized, x)
    expected = run()
    tool = SubgraphRewritingTool(FOLD, folded)
    assert_close(rewritten(run, tool), expected)
    assert len(tool.matches) == 1, tool.rejected


@pytest.mark.parametrize("compiled", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
def test_a_keras_model_is_folded(compiled: dict[str, Any]) -> None:
    """Keras builds its normalization of elementwise operators; XLA is kept."""
    keras = tf.keras
    layers = [keras.layers.Conv2D(6, 3, use_bias=False), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.layers.Input((9, 9, 4)), *layers])
    model.set_weights([random(*w.shape) ** 2 for w in model.get_weights()])
    model.compile(**compiled)
    x = random(2, 9, 9, 4)
    expected = model.predict(x, verbose=0)
    seen: list[tuple[int, ...]] = []

    def fold(x: Any, weight: Any, scale: Any, shift: Any, match: Any) -> Any:
        seen.append(tuple(weight.shape))
        return match.run("conv2d", x, weight * scale) + shift

    pattern = Op("add", Op("mul", Op("conv2d", "x", "weight"), "scale"), "shift")
    tool = SubgraphRewritingTool(pattern, fold)
    with amanda.apply(tool):
        found = [model.predict(x, verbose=0) for _ in range(3)]
    assert len(tool.matches) == 1, tool.rejected
    assert seen == [(3, 3, 4, 6)] * (2 if compiled.get("run_eagerly") else 1)
    for y in found:
        assert np.allclose(y, expected, atol=1e-5)


def test_readers_prevent_a_match_in_a_graph() -> None:
    """Known at the second run, as in eager mode, and the function stays as it is."""

    def model(x: Any) -> Any:
        y = x * 2.0
        return tf.nn.relu(y) + tf.sin(y)

    x = [random(4)]
    tool = SubgraphRewritingTool(["mul", "relu"], lambda input: input)
    run = tape_inside(model, x)
    expected = run()
    assert_close(rewritten(run, tool), expected)
    assert not tool.matches
    assert "reads the output of op" in tool.rejected[0][1]


@pytest.mark.parametrize("first", ["eager", "function", "fit"])
def test_one_model_in_several_modes(first: str) -> None:
    """A match that was found in one mode is rewritten in the others, too: ids of a Keras model are
    the same in all of them."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(2, "relu")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    data, zeros = random(5, 4), np.zeros((5, 2), np.float32)
    x, compiled = tf.constant(data), tf.function(lambda x: model(x))
    runs = {
        "eager": lambda: model(x).numpy(),
        "function": lambda: compiled(x).numpy(),
        "fit": lambda: model.fit(data, zeros, verbose=0) and model.predict(data, verbose=0),
    }
    w, b, v, c = model.get_weights()
    softplus = lambda x: np.log1p(np.exp(x))  # noqa: E731
    expected = softplus(softplus(data @ w + b) @ v + c)

    pattern = Op("Relu", Op("BiasAdd", Op("MatMul", "x", "w"), "b"))
    tool = SubgraphRewritingTool(pattern, lambda x, w, b: tf.nn.softplus(x @ w + b))
    with amanda.apply(tool):
        for mode in (first, first, *runs, *runs):
            runs[mode]()
            amanda.new_iteration()
        assert len(tool.matches) == 2, tool.rejected
        for run in runs.values():
            np.testing.assert_allclose(run(), expected, rtol=1e-5)
