"""``inject`` on TensorFlow: the same tool and the same faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amanda
from amanda_tools.inject import InjectTool

tf = pytest.importorskip("tensorflow")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_flip_inverts_exactly_the_bit_that_is_reported(mode: str, dtype: str) -> None:
    x = tf.cast(tf.constant(np.random.default_rng(0).normal(size=(5, 7)) * 30), dtype)

    def double() -> Any:
        return tf.add(x, x)

    expected = double().numpy()
    run = double if mode == "eager" else tf.function(double)
    with amanda.apply(tool := InjectTool(ops=["add"], seed=2)):
        y = run().numpy()
    (fault,) = tool.faults
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


def test_the_outcomes_of_a_campaign_are_those_of_its_faults() -> None:
    """The output is that of the operator, so that a fault is a changed element of it."""
    random = np.random.default_rng(0)
    x, weight = tf.constant(random.normal(size=(3, 4))), tf.Variable(random.normal(size=(4, 5)))
    golden = (x.numpy() @ weight.numpy()).ravel()
    campaign = InjectTool(ops=["linear"]).campaign(lambda: tf.matmul(x, weight), 40)
    for trial in campaign.trials:
        (fault,) = trial.faults
        assert golden[fault["position"]] == pytest.approx(fault["before"])
        found = golden.copy()
        found[fault["position"]] = float(fault["after"])
        wrong = (found.reshape(3, 5).argmax(1) != golden.reshape(3, 5).argmax(1)).any()
        if np.isfinite(found).all():
            assert trial.outcome == ("wrong" if wrong else "tolerable")
        else:
            assert trial.outcome == "not_finite"
    assert campaign.count("wrong") > 0
