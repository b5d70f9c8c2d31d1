"""``summary`` of models of TensorFlow without Keras: modules of ``tf.Module``, and name scopes of
sessions of TensorFlow 1, by the figures of a count by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from tests.running import applied

tf1 = tf.compat.v1
BATCH, WIDTH, INNER, CLASSES = 2, 4, 8, 3
X = np.ones((BATCH, WIDTH), np.float32)
FIGURES = ("type", "output", "parameters", "flops", "activation_bytes", "calls")


class Linear(tf.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = tf.Variable(tf.ones((inputs, outputs)))
        self.b = tf.Variable(tf.zeros(outputs), trainable=False)

    def __call__(self, x: Any) -> Any:
        return x @ self.w + self.b


class Block(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def __call__(self, x: Any) -> Any:
        return x + self.down(tf.nn.relu(self.up(x)))


class Compiled(Block):
    """A part that is a function, also where the rest runs eagerly."""

    @tf.function
    def __call__(self, x: Any) -> Any:
        return x + self.down(tf.nn.relu(self.up(x)))


class Net(tf.Module):
    """With a layer of Keras."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__(name="net")
        self.blocks = [block(), block()]
        self.head = keras.layers.Dense(CLASSES, name="fc")

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def linear(inputs: int, outputs: int) -> dict[str, tuple[Any, ...]]:
    """Type, output, parameters, FLOPs and bytes of activations: a product and a sum."""
    size = BATCH * outputs * 4
    weights = inputs * outputs + outputs
    return {"": ("Linear", [BATCH, outputs], weights, 2 * BATCH * inputs * outputs, 2 * size, 1)}


def expected(kind: str) -> dict[str, tuple[Any, ...]]:
    """The rows of the model."""
    up, down = linear(WIDTH, INNER)[""], linear(INNER, WIDTH)[""]
    weights, flops, size = (up[i] + down[i] for i in (2, 3, 4))
    # The activation and the residual sum.
    size += BATCH * 4 * (INNER + WIDTH)
    head = WIDTH * CLASSES + CLASSES
    head_row = ("Dense", [BATCH, CLASSES], head, 2 * BATCH * WIDTH * CLASSES, 2 * BATCH * 12, 1)
    rows: dict[str, tuple[Any, ...]] = {
        "net": (
            "Net",
            [BATCH, CLASSES],
            2 * weights + head,
            2 * flops + head_row[3],
            2 * size + head_row[4],
            1,
        )
    }
    for index in range(2):
        path = f"net/blocks.{index}"
        rows[path] = (kind, [BATCH, WIDTH], weights, flops, size, 1)
        rows |= {f"{path}/up": up, f"{path}/down": down}
    return {**rows, "net/head": head_row}


def found(tool: Any) -> dict[str, tuple[Any, ...]]:
    return {row["path"]: tuple(row[figure] for figure in FIGURES) for row in tool.modules()}


def summarized(run: Callable[[], object]) -> Any:
    return applied(amanda.tools.load("summary")(), run)


@pytest.mark.parametrize("block", [Block, Compiled])
@pytest.mark.parametrize("compiled", [True, False])
def test_modules_have_the_figures_of_a_count_by_hand(block: type[Block], compiled: bool) -> None:
    """In eager execution, in a function, and where one calls the other."""
    net = Net(block)
    run = tf.function(net) if compiled else net
    run(tf.constant(X))
    tool = summarized(lambda: [run(tf.constant(X)) for _ in range(2)])
    assert found(tool) == expected(block.__name__)
    model = tool.summary()["models"]["net"]
    assert model["passes"] == 2
    assert model["parameters"] - model["trainable"] == 2 * (INNER + WIDTH)
    assert next(iter(tool.tables())).rows[1][0] == "  0-1, each"


def test_modules_in_a_session_have_these_figures() -> None:
    """In a graph of TensorFlow 1. What the program has dropped keeps all but parameters."""
    with tf.Graph().as_default() as graph:
        net, fed = Net(), tf1.placeholder(tf.float32, (None, WIDTH))
        result = net(fed)
        start = tf1.global_variables_initializer()
    with tf1.Session(graph=graph) as session:

        def run() -> None:
            session.run(start)
            session.run(result, {fed: X})

        assert found(summarized(run)) == expected("Block")
        del net
        gc.collect()
        rows = found(summarized(run))
    assert rows["net/blocks.0/up"][1:] == ([BATCH, INNER], 0, *linear(WIDTH, INNER)[""][3:])


def scopes(use_resource: bool, sharing: bool = False) -> tuple[Any, Any, Any, Any]:
    """A network of TensorFlow 1 in variable and name scopes: graph, data, training and result."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (None, 8, 8, 3), "x")
        with tf1.variable_scope("net", use_resource=use_resource):
            with tf1.variable_scope("conv"):
                kernel = tf1.get_variable("kernel", (3, 3, 3, 4))
                bias = tf1.get_variable("bias", (4,), initializer=tf1.zeros_initializer())
                h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))
            h = tf.reshape(h, (-1, 256))
            parts = []
            for _ in range(2 if sharing else 1):
                with tf1.variable_scope("head", reuse=tf1.AUTO_REUSE):
                    parts.append(h @ tf1.get_variable("w", (256, CLASSES)))
            result = tf.add_n(parts) if sharing else parts[0]
        with tf.name_scope("loss"):
            loss = tf.reduce_mean(result**2)
        train = tf1.train.AdamOptimizer(0.1).minimize(loss)
        start = tf1.global_variables_initializer()
    return graph, x, (train, loss), start


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_session_has_the_tree_of_its_scopes(use_resource: bool, steps: int) -> None:
    """Shapes, parameters, FLOPs and bytes are those of one forward pass by hand; initialisers,
    reads of variables, gradients and the optimizer are in none, however many steps there are."""
    graph, x, train, start = scopes(use_resource)
    images = np.ones((BATCH, 8, 8, 3), np.float32)
    with tf1.Session(graph=graph) as session:

        def run() -> None:
            session.run(start)
            for _ in range(steps):
                session.run(train, {x: images})

        tool = summarized(run)
    pixels, head = BATCH * 8 * 8 * 4, BATCH * CLASSES
    conv = ("scope", [BATCH, 8, 8, 4], 27 * 4 + 4, 2 * pixels * 27, 3 * 4 * pixels, 1)
    last = ("scope", [BATCH, CLASSES], 256 * CLASSES, 2 * head * 256, 4 * head, 1)
    both = (conv[2] + last[2], conv[3] + last[3], conv[4] + last[4])
    loss = ("scope", [], 0, 0, 4 * head + 4, 1)
    assert found(tool) == {
        "graph": ("graph", [], both[0], both[1], both[2] + loss[4], 1),
        "graph/net": ("scope", [BATCH, CLASSES], *both, 1),
        "graph/net/conv": conv,
        "graph/net/head": last,
        "graph/loss": loss,
    }
    model = tool.summary()["models"]["graph"]
    assert (model["passes"], model["flops"]) == (steps, both[1])
    assert list(next(iter(tool.tables())).rows)[2][0] == "    conv"


def test_figures_of_scopes_are_those_of_the_last_run() -> None:
    """Of all iterations of a loop, and none of a branch that is not taken."""
    w = tf.Variable(tf.ones((4, 4)), name="w")

    @tf.function
    def step(x: Any, n: Any) -> Any:
        _, h = tf.while_loop(lambda i, h: i < n, lambda i, h: (i + 1, h @ w), (0, x))
        return tf.cond(n > 2, lambda: h @ w, lambda: h * 2.0)

    x = tf.ones((2, 4))
    tool = summarized(lambda: [step(x, tf.constant(n)) for n in (3, 2)])
    assert [found(tool)[f"step/{name}"][3] for name in ("while", "cond")] == [2 * 2 * 2 * 16, 0]


def test_variables_that_two_scopes_share_count_once() -> None:
    """Each scope has its parameters, and the graph each variable once."""
    graph, x, train, start = scopes(True, sharing=True)
    with tf1.Session(graph=graph) as session:
        session.run(start)
        images = np.ones((BATCH, 8, 8, 3), np.float32)
        rows = found(summarized(lambda: session.run(train[1], {x: images})))
    assert rows["graph/net/head"][2] == rows["graph/net/head_1"][2] == 256 * CLASSES
    assert rows["graph"][2] == rows["graph/net"][2] == 27 * 4 + 4 + 256 * CLASSES
