"""``diff`` of TensorFlow's eager mode against the same program as a plain ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_tools.diff import DiffTool
from tests.running import applied

Program = Callable[[], Any]

MULTIPLICATIONS = ("matmul", "matmul_1", "matmul_2")
"""Names of the products of matrices in the graph of :func:`layers`."""


def variable(*shape: int, seed: int = 0) -> Any:
    return tf.Variable(tf.random.stateless_normal(shape, [1, seed]))


def scalars(scale: float = 1.0) -> Program:
    a, b, x = tf.Variable(2.0), tf.Variable(3.0 * scale), tf.constant(1.5)

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = (a * x + b) * (a * x - b) * a
        return tape.gradient(y, [a, b])

    return step


def zeros(scale: float = 1.0) -> Program:
    a, b, x = (
        tf.Variable(tf.zeros([3])),
        tf.Variable(tf.ones([3]) * scale),
        tf.constant([1.0, 2.0, 3.0]),
    )

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(a * x * b) + tf.reduce_sum(b * 2.0)
        return tape.gradient(y, [a, b])

    return step


def layers(scale: float = 1.0) -> Program:
    weights, x = [variable(6, 6, seed=seed) for seed in range(3)], tf.constant(variable(5, 6))
    weights[1].assign(weights[1] * scale)

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.relu(y @ weight) + 0.1
            loss = tf.reduce_sum(y**2)
        return loss, tape.gradient(loss, weights)

    return step


def loop(scale: float = 1.0) -> Program:
    weight, start = variable(4, 4), tf.constant(variable(3, 4))
    weight.assign(weight * scale)

    def step() -> Any:
        with tf.GradientTape() as tape:
            turn, x = tf.constant(0), start
            while turn < 3:
                x = tf.tanh(x @ weight)
                turn += 1
            y = tf.reduce_sum(x)
        return tape.gradient(y, weight)

    return step


def compared(eager: Program, function: Program) -> DiffTool:
    reference = applied(DiffTool(), eager)
    tool, traced = DiffTool(reference=reference), tf.function(function)
    with amanda.apply(tool):
        traced()
    return tool


@pytest.mark.parametrize("program", [scalars, zeros, layers, loop])
def test_a_function_does_not_diverge_from_its_eager_run(program: Callable[..., Program]) -> None:
    """What the graph computes in other operators has no counterpart, and is said to have none."""
    found = compared(program(), program())
    summary = found.summary()
    assert summary["first"] is None
    assert summary["compared"] >= 8
    # What is unpaired is all that the table of pairs lacks.
    paired = {row["id"] for row in found.op_rows()}
    assert not paired & set(summary["only_here"])
    for row in found.op_rows():
        assert row["paired_by"] in ("value", "order")
        assert ("paired by order" in row["note"]) == (row["paired_by"] == "order")


def test_gradients_are_paired_by_their_forward_operators() -> None:
    """A gradient that differs is compared with a gradient of the same operator."""
    found = compared(layers(), layers(scale=1.5))
    first = found.summary()["first"]
    assert (first["id"], first["reference"]) == (
        "step/matmul_1/ReadVariableOp",
        "/ReadVariableOp:1",
    )
    rows = [row for row in found.op_rows() if row["direction"] == "backward"]
    assert len(rows) > 10
    forward = {f"step/{m}/MatMul": f"/MatMul:{i}" for i, m in enumerate(MULTIPLICATIONS)}
    forward |= {f"step/Relu{'_' * bool(i)}{i or ''}": f"/Relu:{i}" for i in range(3)}
    forward |= {"step/Sum": "/Sum:0", "step/pow/Pow": "/Pow:0"}
    for row in rows:
        ours, _, kind = row["id"].rpartition("/grad/")
        assert row["reference"] == f"{forward[ours]}/grad/{kind}"
