"""Eager execution: which path an operator takes, and how often that is asked."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda.engine.dispatch import Dispatcher
from amanda.engine.plan import EMPTY_PLAN, ActionPlan
from amanda_tensorflow.eager import op_ids
from amanda_tensorflow.eager.plan_cache import PLAIN, Reason, entry_of_plan, slow_path_reason
from tests.tensorflow.eager.support import Acting, Seen, apply

X = tf.constant([[1.0, -2.0]])


@pytest.mark.parametrize(
    ("plan", "is_recorded", "reason"),
    [
        (None, False, Reason.ANALYSIS),
        (EMPTY_PLAN, True, None),
        (ActionPlan("/Relu:0", claims=True), True, Reason.MARK),
        (ActionPlan("/Relu:0", claims=True), False, None),
    ],
)
def test_the_reason_follows_from_the_plan_and_the_tapes(
    plan: ActionPlan | None, is_recorded: bool, reason: Reason | None
) -> None:
    """An operator takes the slow path to be analysed, or to be recorded under a mark."""
    assert slow_path_reason(plan, is_recorded) is reason


def test_operators_without_actions_share_an_entry() -> None:
    """Only one whose output may be the value of a variable has an entry of its own."""
    assert entry_of_plan(EMPTY_PLAN, is_noted=False) is PLAIN
    entry = entry_of_plan(EMPTY_PLAN, is_noted=True)
    assert (entry.is_noted, entry.reason) == (True, None)


def paths_of(tool: amanda.Tool) -> list[str]:
    """The patches that run when an operator is executed, after iterations under a tool."""
    names: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.endswith(("eager/fast_path.py", "eager/slow_path.py")):
            names.append(frame.f_code.co_name)

    with apply(tool):
        for _ in range(4):
            tf.nn.relu(X)
            amanda.new_iteration()
        sys.setprofile(profile)
        try:
            tf.nn.relu(X)
        finally:
            sys.setprofile(None)
    return [name for name in names if name in ("TFE_Py_FastPathExecute", "execute")]


def test_an_operator_takes_the_slow_path_where_a_routine_looks_at_tensors() -> None:
    """Watched and counted operators stay on the fast path, others leave it."""
    fast = ["TFE_Py_FastPathExecute"]
    assert paths_of(Seen()) == fast
    counter = amanda.inline.Counter()
    assert paths_of(Acting("Relu", lambda c: c.insert_after_op(counter, outputs=[]))) == fast
    assert paths_of(Acting("Relu", lambda c: c.insert_after_op(lambda y: None))) == [
        *fast,
        "execute",
    ]


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
