"""Interrupts while nodes of routines are added to a copy, and forks while they run."""

from __future__ import annotations

from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

import amanda
from amanda.state import STATE, unwind
from amanda.testing import interrupts
from amanda_tensorflow import _internals
from amanda_tensorflow.eager.autodiff import ISOLATED
from amanda_tensorflow.graphs.replay import Replay
from amanda_tensorflow.graphs.run_time_routines import RunTimeRoutine
from tests.running import run_python

tf1 = tf.compat.v1


def _square_in_a_session(tool: amanda.Tool) -> Any:
    with tf1.Graph().as_default(), tf1.Session() as session:
        x = tf1.constant([3.0])
        y = x * x
        with amanda.apply(tool):
            # The second run adds to the copy of the first one.
            session.run(x)
            return session.run(y)


def _interrupt_everywhere(*codes: CodeType) -> None:
    """Interrupt a session's runs at each point of functions: nothing takes the interrupt's place,
    and the next run is right."""
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *outputs: None))
    found = interrupts.points(lambda: _square_in_a_session(tool), lambda other: other in codes)
    assert len({point.place for point in found}) > 2
    for point in found:
        assert interrupts.run(
            lambda: _square_in_a_session(tool), lambda other: other in codes, point
        )
        np.testing.assert_array_equal(_square_in_a_session(tool), [9.0])


def test_an_interrupt_while_a_node_is_made_leaves_nothing_to_release() -> None:
    """Of a node that an interrupt has left half made, the end of the scope releases nothing."""
    _interrupt_everywhere(RunTimeRoutine.__init__.__code__)


def test_an_interrupt_while_an_operator_is_added_is_no_graph_that_cannot_be_copied() -> None:
    """An interrupt reaches the program, also where TensorFlow's own blocks fail because of it."""
    adding = Replay.create, Replay._node_like, Replay._note_added  # noqa: SLF001
    _interrupt_everywhere(*(function.__code__ for function in adding))


def test_an_interrupt_as_a_routine_begins_leaves_the_recording_of_gradients_on() -> None:
    """Where the call that stops it has returned, the end of the scope starts it again: a tape of
    the program goes on recording."""

    def program() -> None:
        with ISOLATED:
            pass

    def is_entry(code: CodeType) -> bool:
        return code is type(ISOLATED).__enter__.__code__

    found = interrupts.points(program, is_entry)
    assert len(found) > 2
    for point in found:
        assert interrupts.run(program, is_entry, point)
        unwind(STATE.undo, 0)
        assert not _internals.recording_is_stopped(), point


_FORKING = """
import os
import amanda
import tensorflow as tf

def fork(*outputs):
    child = os.fork()
    if not child:
        os._exit(0 if not amanda.state.ATTACHED else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

tool = amanda.Tool()
tool.add_inst_for_op(lambda context: context.insert_after_op(fork))
tf1 = tf.compat.v1
with tf1.Graph().as_default(), tf1.Session() as session:
    x = tf1.placeholder(tf.float32, [1])
    with amanda.apply(tool):
        for value in 3.0, 4.0:
            print(session.run(tf.square(x), {x: [value]})[0])
"""


def test_a_child_that_is_forked_in_a_run_does_not_wait_for_it() -> None:
    """A routine in a session forks: the child is vanilla and ends, and the session goes on."""
    # In a process of its own, as TensorFlow itself does not work in a child with other sessions.
    run = run_python("-c", _FORKING)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0", "9.0", "0", "16.0"]
