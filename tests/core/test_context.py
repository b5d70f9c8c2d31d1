"""Contexts, without a driver."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amanda.errors import ContextExpiredError, TensorReleased
from amanda.interface.backward_context import BackwardOpContext, ReleasableTensors
from amanda.interface.calls import BackwardCall, NamedOp
from amanda.interface.context import OpContext, OpState

KEYS = st.dictionaries(st.sampled_from("abcd"), st.integers(), max_size=4)


def forward(**keys: Any) -> OpContext:
    """A forward context with some keys."""
    context = OpContext(OpState(print, "/add:0"), "loopback/1/eager")
    context.update(keys)
    return context


def backward(parent: OpContext, **keys: Any) -> BackwardOpContext:
    """A backward context with some keys of its own."""
    state = OpState(print, "/add:0").of_backward(print, "/add:0/grad/AddBackward:0")
    context = BackwardOpContext(parent, state)
    for key, value in keys.items():
        context[key] = value
    return context


@given(KEYS, KEYS)
def test_a_child_is_a_view_over_its_parent(above: dict[str, int], own: dict[str, int]) -> None:
    """Every dict read of a child gives what the parent's keys overridden by its own give."""
    parent = forward(**above)
    child = backward(parent, **own)
    merged = {**above, **own}
    assert dict(child) == merged
    assert {key: child[key] for key in child} == merged
    assert list(child) == list(child.keys()) == list(merged)
    assert dict(child.items()) == merged
    assert sorted(child.values()) == sorted(merged.values())
    assert len(child) == len(merged)
    assert bool(child) is bool(merged)
    assert child == merged
    assert (child != merged) is False
    for key in "abcd":
        assert child[key] == child.get(key) == merged.get(key)
        assert (key in child) is (key in merged)
    assert dict(parent) == above


def test_a_child_sees_later_writes_of_its_parent() -> None:
    """A child reads its parent as it is now, not as it was."""
    parent = forward()
    child = backward(parent)
    parent["late"] = 1
    assert child["late"] == child.get("late") == 1


def test_setdefault() -> None:
    """setdefault leaves a key that the parent has, and sets one that nobody has in the child."""
    parent = forward(a=1)
    child = backward(parent)
    assert child.setdefault("a", 2) == 1
    assert child.setdefault("b", 2) == 2
    assert dict(parent) == {"a": 1}


def test_get_with_default() -> None:
    """get of a key that nobody has set gives the default."""
    child = backward(forward())
    assert child.get("a", 5) == forward().get("a", 5) == 5
    assert child["a"] is forward()["a"] is None


def test_identity() -> None:
    """Contexts are equal only to themselves, can be keys, and compare with dicts by content."""
    one, two = forward(a=1), forward(a=1)
    assert one != two
    assert len({one, two}) == 2
    assert one == {"a": 1}


def test_repr() -> None:
    """The representation names the op and shows the keys."""
    assert "/add:0" in repr(forward(a=1))
    assert "'a': 1" in repr(forward(a=1))
    assert "AddBackward:0" in repr(backward(forward(a=1)))


@pytest.mark.parametrize("child", [False, True])
def test_nothing_can_be_recorded_outside(child: bool) -> None:
    """Outside of an analysis an action cannot be recorded, and the error names the op."""
    context = backward(forward()) if child else forward()
    with pytest.raises(ContextExpiredError, match=r"insert_after_backward_op.*/add:0"):
        context.insert_after_backward_op(print)


def test_attributes_are_copies() -> None:
    """Changing what get_attrs returns does not change the context."""
    context = forward()
    context.get_attrs()["x"] = 1
    assert context.get_attrs() == {}


def test_released_tensors_raise_one_by_one() -> None:
    """Of a list of forward tensors only the position that is gone raises, when it is read."""
    tensors = ReleasableTensors("/add:0", "input", ["kept", None, lambda: "alive", lambda: None])
    assert len(tensors) == 4
    assert tensors[0] == "kept"
    assert tensors[1] is None
    assert tensors[:3] == ["kept", None, "alive"]
    for read in (lambda: tensors[3], lambda: tensors[2:], lambda: list(tensors)):
        with pytest.raises(TensorReleased, match="input 3 of op /add:0 was released"):
            read()


def test_a_gradient_of_no_declared_input_is_of_no_parameter() -> None:
    """A driver may give a gradient a name that the forward operator has not declared."""
    call = BackwardCall(NamedOp("product"), "/product:0", names=("other",))
    assert call.parameter_name(0, ("x", "weight")) is None
