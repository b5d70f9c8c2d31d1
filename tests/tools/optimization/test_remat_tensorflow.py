"""``remat`` on TensorFlow: what is kept for the backward pass, and a plan, in every mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.remat import RematTool

tf1 = tf.compat.v1
DEPTH, ROWS, WIDTH = 16, 32, 16
PIECE = 4 * ROWS * WIDTH
WEIGHTS = [np.random.default_rng(i).normal(size=(WIDTH, WIDTH)) for i in range(DEPTH)]
DATA = np.random.default_rng(9).normal(size=(ROWS, WIDTH)).astype(np.float32)


def loss_of(x: Any, weights: Any) -> Any:
    for weight in weights:
        x = tf.tanh(tf.matmul(x, weight))
    return tf.reduce_sum(x)


def run_session(rows: int | None = ROWS) -> None:
    with tf1.Graph().as_default(), tf1.Session() as session:
        weights = [tf1.Variable(w.astype(np.float32), use_resource=True) for w in WEIGHTS]
        x = tf1.placeholder(tf.float32, [rows, WIDTH])
        gradients = tf1.gradients(loss_of(x, weights), weights)
        session.run(tf1.global_variables_initializer())
        session.run(gradients, {x: DATA})


def run_eager(*, compiled: bool = False) -> None:
    weights = [tf.Variable(w.astype(np.float32)) for w in WEIGHTS]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x, weights)
        return tape.gradient(loss, weights)

    (tf.function(step) if compiled else step)(tf.constant(DATA))


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_what_is_kept_is_reported_and_planned(mode: str) -> None:
    """tanh keeps its result, which the next product reads, too: one piece per layer, and the
    data. Half of it is possible: what is run again is cheaper than a product."""
    tool = RematTool(budget=0.65, ops=("tanh", "linear", "matmul"))
    with amanda.apply(tool):
        {"eager": run_eager, "session": run_session}.get(mode, lambda: run_eager(compiled=True))()
    found = tool.result()
    summary = found["summary"]
    # A session also keeps a scalar.
    assert 0 <= summary["saved_bytes"] - (DEPTH + 1) * PIECE <= 8
    assert summary["is_met"]
    assert not summary["is_applied"]
    assert summary["peak_bytes"] <= 0.65 * summary["saved_bytes"]
    rows = [row for row in found["ops"] if row["saved_bytes"] == PIECE]
    assert [row["type"] for row in rows] == ["tanh"] * DEPTH
    assert all(row["cost_ops"] >= PIECE / 4 and row["cost_us"] is None for row in rows)
    assert any(row["recompute"] for row in rows)


def test_sizes_that_nobody_knows_are_said() -> None:
    """A placeholder may leave the size of the batch open: then nothing is known of what is kept."""
    tool = RematTool()
    with amanda.apply(tool):
        run_session(rows=None)
    unknown = tool.result()["summary"]["ops_of_unknown_size"]
    assert unknown >= DEPTH
    title = next(iter(tool.tables())).title
    assert f"not counted: {unknown} ops whose sizes are not known before they run" in title
