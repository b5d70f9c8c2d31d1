"""``inject`` on TensorFlow: the same tool and the same faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.inject import InjectTool
from tests.tools.optimization.test_prune_tensorflow import MODES, runner


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@MODES
def test_a_flip_inverts_exactly_the_bit_that_is_reported(mode: str, dtype: str) -> None:
    """In each run."""
    x = tf.cast(tf.constant(np.random.default_rng(0).normal(size=(5, 7)) * 30), dtype)

    def double(x: Any, _: Any) -> Any:
        return tf.add(x, x)

    expected, run = double(x, {}).numpy(), runner(mode, x, {}, double)
    with amanda.apply(tool := InjectTool(ops=["add"], seed=2)):
        found = [np.asarray(run()) for _ in range(2)]
    for y, fault in zip(found, tool.faults, strict=True):
        kind = f"uint{8 * y.dtype.itemsize}"
        difference = (y.view(kind) ^ expected.view(kind)).ravel()
        assert np.flatnonzero(difference).tolist() == [fault.position]
        assert difference[fault.position] == 1 << fault.bit


@pytest.mark.parametrize("target", ["outputs", "weights", "gradients"])
def test_all_targets_are_hit(target: str) -> None:
    x, weight = tf.ones((3, 4)), tf.Variable(tf.ones((4, 5)))
    tool = InjectTool(ops=["linear"], target=target, fault="value", value=100.0)
    with amanda.apply(tool), tf.GradientTape() as tape:
        y = tf.matmul(x, weight)
        gradient = tape.gradient(tf.reduce_sum(y), weight)
    changed = {"outputs": y, "weights": y, "gradients": gradient}[target].numpy()
    assert (changed > 50).any()
    assert np.array_equal(weight.numpy(), np.ones((4, 5)))
    assert tool.result()["summary"]["faults"] == 1
