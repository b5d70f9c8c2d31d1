"""Subgraph rewriting on TensorFlow: in eager mode, and refused in functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amanda
from amanda.errors import CapabilityError
from amanda.tools.subgraph_rewriting import Op, SubgraphRewritingTool

tf = pytest.importorskip("tensorflow")


def random(*shape: int) -> Any:
    return tf.constant(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def attention(q: Any, k: Any, v: Any) -> Any:
    """What a program writes."""
    scores = tf.matmul(q, k, transpose_b=True) * 0.5
    return tf.matmul(tf.nn.softmax(scores), v)


def fused(q: Any, k: Any, v: Any) -> Any:
    """The same, in another way, doubled so that it can be told apart."""
    weights = tf.exp(tf.einsum("bqe,bke->bqk", q, k) * 0.5)
    return 2 * tf.einsum("bqk,bke->bqe", weights / tf.reduce_sum(weights, -1, keepdims=True), v)


PATTERN = Op("matmul", Op("softmax", Op("mul", Op("matmul", "q", "k"))), "v")


def test_a_match_in_a_function_is_refused() -> None:
    """A graph's operators cannot be given further inputs: never silently nothing."""
    q, k, v = random(2, 3, 4), random(2, 5, 4), random(2, 5, 6)
    run = tf.function(lambda: attention(q + 0, k + 0, v + 0))
    with (
        amanda.apply(SubgraphRewritingTool(PATTERN, fused)),
        pytest.raises(CapabilityError, match="rewritten in eager modes only"),
    ):
        run()


def test_attention_is_replaced_with_its_gradients() -> None:
    """From the second iteration on; gradients reach what comes in from outside."""
    q, k, v = random(2, 3, 4), random(2, 5, 4), random(2, 5, 6)

    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch((q, k, v))
            x, y, z = q + 0, k + 0, v + 0  # not parameters themselves
            output = attention(x, y, z)
            loss = tf.reduce_sum(output * output)
        return output, tape.gradient(loss, (q, k, v))

    tool = SubgraphRewritingTool(PATTERN, fused)
    exact, _ = step()
    with amanda.apply(tool):
        first, _ = step()
        amanda.new_iteration()
        output, gradients = step()
    assert len(tool.matches) == 1, tool.rejected
    assert np.allclose(first, exact, atol=1e-6)
    assert np.allclose(output, 2 * exact, atol=1e-5)
    with tf.GradientTape() as tape:
        tape.watch((q, k, v))
        expected = fused(q, k, v)
        loss = tf.reduce_sum(expected * expected)
    for found, wanted in zip(gradients, tape.gradient(loss, (q, k, v)), strict=True):
        assert found is not None
        assert np.allclose(found, wanted, atol=1e-5)
