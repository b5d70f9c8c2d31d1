"""Programs of many kinds in ``tf.function``, watched, instrumented at all points, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from tests.identity import Identity
from tests.tensorflow import support
from tests.tensorflow.programs import (
    PROGRAMS,
    X,
    arrays,
    branches,
    calls,
    loop,
    nested_control_flow,
    placed,
    recomputed,
)
from tests.tensorflow.support import Counter, Watcher


@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program: Callable[[Any], Any], placement: str) -> None:
    """Watching leaves every bit of value and gradient; routines at all points cost rounding."""
    x = tf.constant(X)
    expected = [tensor.numpy() for tensor in placed(program, placement)(x)]
    run = placed(program, placement)
    watcher, identity = Watcher(), Identity()
    with amanda.apply(watcher):
        support.assert_same_bits([tensor.numpy() for tensor in run(x)], expected)
    with amanda.apply(identity):
        support.assert_close([tensor.numpy() for tensor in run(x)], expected)
    support.assert_same_bits([tensor.numpy() for tensor in run(x)], expected)
    assert watcher.seen
    assert identity.calls


@pytest.mark.parametrize(
    ("program", "forward", "backward"),
    [
        (calls, 2, 2),
        (loop, 3, 3),
        (branches, 1, 1),
        (nested_control_flow, 4, 4),
        (arrays, 3, 3),
        (recomputed, 1, 1),
    ],
)
@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_executions_are_counted(
    program: Callable[[Any], Any], forward: int, backward: int, placement: str
) -> None:
    """Each call, iteration and taken branch counts, forward and backward."""
    run = placed(program, placement)
    tool = Counter(["Tanh", "TanhGrad"])
    with amanda.apply(tool):
        run(tf.constant(X))
    assert tool.backward["TanhGrad"] == backward
    # Recomputation runs the operators once more, for the backward pass.
    assert tool.forward["Tanh"] in (forward, forward + (program is recomputed))
