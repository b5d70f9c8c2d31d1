"""Tools that look at the tensors of a function from some operator on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda.inline import Counter

X = tf.constant([[0.5, -1.0], [2.0, 0.25]])


@tf.function
def inner(a: Any, b: Any) -> Any:
    tf.print("inner", output_stream="file:///dev/null")
    return tf.tanh(a) * b, tf.exp(b)


def program(x: Any) -> Any:
    """A function with a call and its gradient."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        first, second = inner(tf.sin(x), x + 1.0)
        y = tf.cos(first) + tf.sigmoid(second)
    return y, tape.gradient(y, x)


class Late(amanda.Tool):
    """Counts all operators; from one type on it looks at tensors, and acts."""

    def __init__(self, kind: str, look: Callable[[amanda.OpContext], Any]) -> None:
        super().__init__()
        self.kind, self.look_at = kind, look
        self.counter = Counter()
        self.found: list[Any] = []
        for backward in (False, True):
            self.add_inst_for_op(self.look, backward=backward)
            self.add_inst_for_op(self.look_after, backward=backward, require_outputs=True)

    def look(self, context: amanda.OpContext) -> None:
        if context.is_forward():
            context.insert_before_op(self.counter, inputs=[])
        else:
            context.insert_before_backward_op(self.counter, grad_outputs=[])
        self._look(context, "before")

    def look_after(self, context: amanda.OpContext) -> None:
        self._look(context, "after")

    def _look(self, context: amanda.OpContext, when: str) -> None:
        op = context.get_backward_op() if context.is_backward() else context.get_op()
        if f"{op.type} {when}" == self.kind:
            self.found.append(self.look_at(context))


LOOKS: dict[str, Callable[[amanda.OpContext], Any]] = {
    "inputs": lambda c: [t.shape for t in c.get_inputs()],
    "gradients": lambda c: [t.shape for t in c.get_grad_outputs() or ()],
    "an identity": lambda c: (
        c.insert_after_op(lambda *t: t)
        if c.is_forward()
        else c.insert_after_backward_op(lambda *t: t)
    ),
    "an operator": lambda c: tf.reduce_sum(c.get_inputs()[0]).shape,
}


@pytest.mark.parametrize(
    ("kind", "look"),
    [
        ("Sin before", "inputs"),
        ("Tanh before", "an operator"),
        ("Tanh after", "an identity"),
        ("AddV2 after", "inputs"),
        ("TanhGrad before", "gradients"),
        ("TanhGrad after", "an operator"),
        ("SigmoidGrad before", "inputs"),
        ("Neg before", "an identity"),
    ],
)
def test_a_tool_that_looks_at_tensors_late(kind: str, look: str) -> None:
    """Whichever operator an analysis looks at first, results and counts are the same."""
    expected = [t.numpy().tolist() for t in tf.function(program)(X)]
    plain = Late("", LOOKS[look])
    with amanda.apply(plain):
        tf.function(program)(X)
    tool = Late(kind, LOOKS[look])
    with amanda.apply(tool):
        function = tf.function(program)
        results = [[t.numpy().tolist() for t in function(X)] for _ in range(2)]
    assert results == [expected, expected]
    assert tool.found
    assert tool.counter.count == 2 * plain.counter.count


def test_actions_on_gradients_of_another_function() -> None:
    """A routine on the gradients of an operator as a whole acts in a gradient that is computed in a
    function of its own, in which no other routine acts."""
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: (
            c.insert_before_backward_op(lambda g: 2.0 * g) if c.get_op().type == "Tanh" else None
        )
    )

    def gradient() -> Any:
        function = tf.function(tf.tanh)
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = function(X)
        return tape.gradient(y, X)

    expected = (2.0 * gradient()).numpy().tolist()
    with amanda.apply(tool):
        assert gradient().numpy().tolist() == expected
