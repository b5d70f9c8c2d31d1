"""Interrupts while nodes of routines are added to a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import amanda
from amanda.testing import interrupts
from amanda_tensorflow.graphs.run_time_routines import RunTimeRoutine

tf1 = tf.compat.v1


def _square_in_a_session(tool: amanda.Tool) -> Any:
    with tf1.Graph().as_default(), tf1.Session() as session:
        x = tf1.constant([3.0])
        y = x * x
        with amanda.apply(tool):
            # The second run adds to the copy of the first one.
            session.run(x)
            return session.run(y)


def test_an_interrupt_while_a_node_is_made_leaves_nothing_to_release() -> None:
    """Of a node that an interrupt has left half made, the end of the scope releases nothing."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *outputs: None))
    code = RunTimeRoutine.__init__.__code__
    found = interrupts.points(lambda: _square_in_a_session(tool), lambda other: other is code)
    assert len({point.place for point in found}) > 10
    for point in found:
        # An error at the end of the scope would take the interrupt's place.
        assert interrupts.run(
            lambda: _square_in_a_session(tool), lambda other: other is code, point
        )
        np.testing.assert_array_equal(_square_in_a_session(tool), [9.0])
