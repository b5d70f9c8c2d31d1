"""What a tool supplies in place of an operator's gradient has the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import RoutineResultError
from amanda.tools.subgraph_rewriting import Op, SubgraphRewritingTool
from tests.tensorflow import support

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


def _doubled(x: Any) -> Any:
    return tf.exp(x) * 2.0


def _squared(y: Any) -> Any:
    return y * y


class _AtExp(amanda.Tool):
    """Has an action on each exponential."""

    def __init__(self, action: str, routine: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.action, self.routine, self.options = action, routine, options
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Exp":
            getattr(context, self.action)(self.routine, **self.options)


class _Differentiated(_AtExp):
    """As `_AtExp`; its routine is differentiated."""

    differentiable = True


def _fused() -> amanda.Tool:
    """Puts one function in the place of an exponential and the product that it takes."""
    return SubgraphRewritingTool(Op("Exp", Op("Mul", "x", "y")), lambda x, y: tf.exp(x * y) * 2.0)


def _of_product(x: Any, y: Any) -> Any:
    """The gradient of one of them, for which the gradient of the fused function is captured."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        exponential = tf.exp(x * y)
    return tape.gradient(exponential, x)


def _of_gradient(x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        gradient = _of_product(x, y)
    return tape.gradient(gradient, x)


def _as_function(gradient: Callable[..., Any]) -> Callable[[], Any]:
    function = tf.function(gradient)
    return lambda: function(tf.constant(X), tf.constant(X + 1.0))


def _as_session(gradient: Callable[..., Any]) -> Callable[[], Any]:
    with tf.Graph().as_default() as graph:
        fetched = gradient(tf.constant(X), tf.constant(X + 1.0))
    session = tf.compat.v1.Session(graph=graph)
    return lambda: session.run(fetched)


@pytest.mark.usefixtures("without_optimizer")
@pytest.mark.parametrize("mode", [_as_function, _as_session])
@pytest.mark.parametrize("gradient", [_of_product, _of_gradient])
@pytest.mark.parametrize("which", [{}, {"outputs": []}], ids=["outputs", "no outputs"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: _AtExp("replace_op", _doubled),
        lambda: _AtExp("replace_op", amanda.traceable(_doubled)),
        lambda: _Differentiated("insert_after_op", _squared),
        lambda: _Differentiated("insert_after_op", amanda.traceable(_squared)),
        _fused,
    ],
    ids=["replaced", "traced", "differentiable", "traced differentiable", "fused"],
)
def test_routines_run_where_only_the_gradient_of_a_replacement_is_read(
    make: Callable[[], amanda.Tool],
    which: dict[str, Any],
    gradient: Callable[..., Any],
    mode: Callable[..., Any],
) -> None:
    """A gradient that is derived anew runs the replacement, and so the routines after it."""
    runs: list[str] = []
    after = _AtExp("insert_after_op", lambda *outputs: runs.append("exp"), **which)
    changing, run = make(), mode(gradient)
    with amanda.apply(changing):
        run()  # A tool that rewrites does so from the second run on.
        expected = np.asarray(run())
    with amanda.apply(make(), after):
        run()
        runs.clear()
        support.assert_same_bits([run()], [expected])
    assert runs == ["exp"]


def _exponentials(x: Any) -> Any:
    for _ in range(250):
        x = tf.exp(x) - 1.0
    return x


def _handed_on(x: Any) -> Any:
    """The gradients of many operators in a row are one tensor."""
    y = tf.exp(x)
    for _ in range(500):
        y = tf.identity(y)
    return tf.exp(y)


@pytest.mark.parametrize("mode", [_as_function, _as_session])
@pytest.mark.parametrize("deep", [_exponentials, _handed_on])
@pytest.mark.parametrize(
    "make",
    [
        lambda: _AtExp("replace_op", amanda.traceable(lambda x: tf.exp(x))),
        lambda: _Differentiated("insert_after_op", amanda.traceable(lambda x: tf.identity(x))),
        lambda: _AtExp("insert_before_backward_op", amanda.traceable(lambda x: tf.identity(x))),
    ],
    ids=["replaced", "differentiable", "gradient"],
)
def test_gradients_of_deep_networks_are_changed(
    make: Callable[[], amanda.Tool], deep: Callable[[Any], Any], mode: Callable[..., Any]
) -> None:
    """Python's recursion is not as deep as the network is."""

    def gradient(x: Any, _: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = deep(x * -0.01)
        return tape.gradient(y, x)

    run = mode(gradient)
    expected = run()
    with amanda.apply(make()):
        np.testing.assert_allclose(run(), expected, rtol=1e-5)
