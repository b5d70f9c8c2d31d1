"""Eager execution: which path an operator takes, and how often that is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import EMPTY_PLAN
from amanda_tensorflow.eager import op_ids
from amanda_tensorflow.eager.plan_cache import PLAIN, entry_of_plan
from tests.tensorflow.eager.support import Acting, Seen, apply

X = tf.constant([[1.0, -2.0]])


def test_operators_without_actions_share_an_entry() -> None:
    """Only one whose output may be the value of a variable has an entry of its own."""
    assert entry_of_plan(EMPTY_PLAN, is_noted=False) is PLAIN
    entry = entry_of_plan(EMPTY_PLAN, is_noted=True)
    assert (entry.is_noted, entry.reason) == (True, None)


def patches_run_by(call: Callable[[], object]) -> list[str]:
    """The patches of operators that run in a call."""
    names: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.endswith(("eager/fast_path.py", "eager/slow_path.py")):
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in names if name in ("TFE_Py_FastPathExecute", "execute")]


def paths_of(tool: amanda.Tool) -> list[str]:
    """The patches that run when an operator is executed, after iterations under a tool."""
    with apply(tool):
        for _ in range(4):
            tf.nn.relu(X)
            amanda.new_iteration()
        return patches_run_by(lambda: tf.nn.relu(X))


def test_a_recorded_operator_takes_the_slow_path_until_its_executions_share_a_mark() -> None:
    """From the second backward pass on it stays on the fast path, as outside of tapes."""
    found = []
    with apply(Seen()):
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(X)
                found.append(patches_run_by(lambda: tf.nn.relu(X)))
                y = tf.nn.relu(X)
            tape.gradient(y, X)
    fast = ["TFE_Py_FastPathExecute"]
    assert found == [[*fast, "execute"], fast, fast]


def test_a_replaced_operator_takes_the_slow_path() -> None:
    """Others stay on the fast path, where their routines get the tensors that they are passed."""
    fast = ["TFE_Py_FastPathExecute"]
    assert paths_of(Seen()) == fast
    counter = amanda.inline.Counter()
    assert paths_of(Acting("Relu", lambda c: c.insert_after_op(counter, outputs=[]))) == fast
    assert paths_of(Acting("Relu", lambda c: c.insert_after_op(lambda y: None))) == fast
    replaced = Acting("Relu", lambda c: c.replace_op(tf.identity))
    assert paths_of(replaced) == [*fast, "execute", *fast]


def test_an_operator_takes_the_slow_path_where_what_it_is_passed_is_converted() -> None:
    """Routines get a tensor for each number: TensorFlow makes it on that path."""
    got: list[Any] = []
    tool = Acting("Mul", lambda c: c.insert_before_op(lambda *tensors: got.append(tensors)))
    with apply(tool):
        for _ in range(4):
            found = patches_run_by(lambda: tf.raw_ops.Mul(x=X, y=2.0))
            amanda.new_iteration()
    assert found[-1] == "execute"
    assert [float(y) for _, y in got] == [2.0] * 4


def test_a_new_operator_is_looked_up_once_on_each_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first execution its plan is asked for once, and the phase that its id needs twice."""
    asked: list[str] = []
    phase, plan = op_ids.phase_of_code, Dispatcher.plan

    def phase_of_code(*args: Any) -> Any:
        asked.append("phase")
        return phase(*args)

    def plan_of(dispatcher: Dispatcher, *args: Any, **kwargs: Any) -> Any:
        asked.append("plan")
        return plan(dispatcher, *args, **kwargs)

    monkeypatch.setattr(op_ids, "phase_of_code", phase_of_code)
    monkeypatch.setattr(Dispatcher, "plan", plan_of)
    with apply(Seen()):
        tf.nn.relu(X)
    assert asked == ["phase", "phase", "plan"]
