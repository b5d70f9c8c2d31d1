"""The cost of instrumentation grows as the graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import amanda

DRIVERS = ("tensorflow-eager", "tensorflow-function", "tensorflow-graph")
"""By name: drivers of other frameworks, which other tests import, would add to the costs."""


class Replacing(amanda.Tool):
    """Replaces each exponential, so that its gradient is derived anew, and watches it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Exp":
            context.replace_op(amanda.traceable(lambda x: tf.exp(x)))
            context.insert_after_op(lambda *outputs: None)


def exponentials(size: int, x: Any) -> Any:
    """So many of them, one after the other."""
    for _ in range(size):
        x = tf.exp(x * 0.1)
    return x


def exponentials_and_a_loop(size: int, x: Any) -> Any:
    """The loop is one of TensorFlow 1, whose frames the graph has to be read for."""
    y = exponentials(size, x)
    return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), [0, y])[1]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many operators each list of a graph's operators has that is made meanwhile."""
    counts, vanilla = list[int](), tf.Graph.get_operations

    def get_operations(graph: Any) -> Any:
        found = vanilla(graph)
        counts.append(len(found))
        return found

    monkeypatch.setattr(tf.Graph, "get_operations", get_operations)
    tf.compat.v1.disable_control_flow_v2()
    yield counts
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.parametrize("build", [exponentials, exponentials_and_a_loop])
def test_a_graph_is_not_read_for_each_of_its_gradients(
    listed: list[int], build: Callable[[int, Any], Any]
) -> None:
    """Neither where gradients are noted nor where they are changed, so that the costs grow as the
    graph does."""

    def read(size: int) -> int:
        listed.clear()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant([0.5])
            gradient = tf.gradients(build(size, x), x)[0]
            with amanda.apply(Replacing(), drivers=DRIVERS):
                session.run(gradient)
        return sum(listed)

    read(1)
    assert read(32) < 3 * read(16)
