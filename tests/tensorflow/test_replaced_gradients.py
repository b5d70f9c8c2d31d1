"""What a tool supplies in place of an operator's gradient has the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import RoutineResultError

X = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]])
Supply = Callable[..., Any]


def _wrong(*gradients: Any) -> Any:
    """The gradient of one row only, which an optimizer would subtract from all of them."""
    return gradients[0][:1]


def _right(*gradients: Any) -> Any:
    return gradients[0] * 5.0


class _Supplies(amanda.Tool):
    """Supplies the gradient of relu, and replaces relu itself if `replaced`."""

    def __init__(self, supply: Supply, replaced: bool) -> None:
        super().__init__()
        self.supply = supply
        self.replaced = replaced
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Relu":
            context.replace_backward_op(self.supply)
            if self.replaced:
                context.replace_op(amanda.traceable(lambda x: tf.nn.softplus(x)))


def _gradient(run: Callable[[Any], Any]) -> Any:
    variable = tf.Variable(X)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(run(variable * 1.0))
    return tape.gradient(y, variable)


def _eager() -> Any:
    return _gradient(tf.nn.relu)


def _tape_inside() -> Any:
    return tf.function(lambda: _differentiated(tf.constant(X)))()


def _differentiated(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.relu(x * 1.0))
    return tape.gradient(y, x)


def _tape_outside() -> Any:
    return _gradient(tf.function(lambda x: tf.nn.relu(x)))


def _session() -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(X)
        [gradient] = tf.gradients(tf.reduce_sum(tf.nn.relu(x * 1.0)), [x])
        return session.run(gradient)


_MODES = [_eager, _tape_inside, _tape_outside, _session]


@pytest.mark.parametrize("run", _MODES)
@pytest.mark.parametrize("supply", [_wrong, amanda.traceable(lambda *g: g[0][:1])])
@pytest.mark.parametrize("replaced", [False, True], ids=["operator", "replaced"])
def test_a_supplied_gradient_of_another_shape_is_an_error(
    run: Callable[[], Any], supply: Supply, replaced: bool
) -> None:
    """It names the operator and both shapes; what reads a gradient would broadcast it."""
    message = r"op .*Relu.* gradient of shape \(3, 2\) for its input 0, got one of shape \(1, 2\)"
    with (
        amanda.apply(_Supplies(supply, replaced)),
        pytest.raises(RoutineResultError, match=message),
    ):
        run()


@pytest.mark.parametrize("run", _MODES)
@pytest.mark.parametrize("replaced", [False, True], ids=["operator", "replaced"])
def test_a_supplied_gradient_of_the_shape_is_taken(run: Callable[[], Any], replaced: bool) -> None:
    """One of the right shape takes the place of the operator's own."""
    with amanda.apply(_Supplies(_right, replaced)):
        found = np.asarray(run())
    assert np.array_equal(found, np.full_like(X, 5.0))


@pytest.mark.parametrize("run", _MODES)
@pytest.mark.parametrize("replaced", [False, True], ids=["operator", "replaced"])
def test_an_exception_in_the_gradient_reaches_the_caller_as_itself(
    run: Callable[[], Any], replaced: bool
) -> None:
    """Also where TensorFlow derives the gradient from the copy, which a tape does outside of it."""

    def fail(*gradients: Any) -> Any:
        raise KeyError("a mistake")

    with amanda.apply(_Supplies(fail, replaced)), pytest.raises(KeyError) as raised:
        run()
    [note] = raised.value.__notes__
    assert note.startswith("amanda: raised in _Supplies.fail at op ")
