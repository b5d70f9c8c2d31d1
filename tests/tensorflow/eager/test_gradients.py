"""Backward operators of eager execution: whose they are, their names, what acts on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import RoutineResultError
from tests.tensorflow.eager.support import Acting, Seen, apply, gradients

X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
W = tf.constant([[0.5, -1.0], [2.0, 1.0]])
ONES = tf.ones([2, 2])


def test_owners_of_sums() -> None:
    """A sum of gradients belongs to the operator whose output gradient is summed, or that reads the
    variable first; sums for other leaves belong to none, and are counted."""

    def inner(x: Any) -> Any:
        y = tf.tanh(x)
        return y * y + y

    tool, variable = Seen(), tf.Variable(ONES)
    with apply(tool) as scope:
        gradients(lambda x: tf.tanh(x) * 2.0 + tf.tanh(x) * tf.exp(x), X)
        gradients(inner, X)
        gradients(lambda v: v * X + v * W, variable)
    sums = [i for i in tool.backward_ids if "AddN" in i]
    assert sums == ["/Tanh:0/grad/AddN:0", "/ReadVariableOp:0/grad/AddN:0"]
    assert scope.statistics.not_seen["sums of gradients of leaves"] == 1


def test_routines_on_a_sum() -> None:
    """A routine before a sum changes its terms, one after it the sum."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().type == "AddN":
            context.insert_before_backward_op(lambda *terms: [t * 2.0 for t in terms])
            context.insert_after_backward_op(lambda total: total + 1.0)

    def build(x: Any) -> Any:
        y = tf.identity(x)
        return y + y * 3.0

    with apply(Acting("Identity", backward=analyse)):
        _, (dx,) = gradients(build, X)
    assert np.array_equal(dx, 9.0 * ONES)


def test_a_custom_gradient() -> None:
    """The operators of a custom gradient belong to the Identity that TensorFlow puts behind
    the function, and routines on that whole operator act on them together."""
    seen: list[Any] = []

    @tf.custom_gradient
    def scaled(x: Any, y: Any) -> Any:
        return x * y, lambda grad: (grad * y * 2.0, grad * x)

    def whole(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda g: g * 10.0)
        context.insert_after_backward_op(lambda *g: seen.append(len(g)))

    tool = Seen("Identity")
    with apply(tool, Acting("Identity", whole)):
        _, (dx, dy) = gradients(scaled, X, W)
    assert tool.backward_ids == [f"/Identity:0/grad/Mul:{i}" for i in range(3)]
    assert seen == [2]
    assert np.array_equal(dx, 20.0 * W)
    assert np.array_equal(dy, 10.0 * X)


@pytest.mark.parametrize("watching", [True, False], ids=["watched", "routine only"])
def test_recomputation(watching: bool) -> None:
    """Operators that tf.recompute_grad runs again have their first ids and their routines."""
    mask = tf.constant([[1.0, 0.0], [1.0, 1.0]])
    variable = tf.Variable(W)
    calls: list[int] = []

    def masked(weight: Any) -> Any:
        calls.append(1)
        return weight * mask

    def reference(x: Any, _: Any) -> Any:
        weight = variable + tf.stop_gradient(variable * mask - variable)
        return tf.tanh(tf.tanh(x @ weight) @ weight)

    again = tf.recompute_grad(lambda x: tf.tanh(tf.tanh(x @ variable) @ variable))

    def scoped(x: Any) -> Any:
        with tf.name_scope("model"):
            return again(x)

    expected = gradients(reference, X, variable)
    tools = [Acting("MatMul", lambda c: c.insert_before_op(masked, inputs=[1]))]
    if watching:
        tools.append(Seen("MatMul"))
    with apply(*tools):
        for _ in range(2):
            results = gradients(lambda x, _: scoped(x), X, variable)
    for result, wanted in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6)
    assert len(calls) == 2 * 4
    if watching:
        assert tools[1].ids == ["model/MatMul:0", "model/MatMul:1"]
        assert len(tools[1].backward_ids) == 4


def test_not_seen() -> None:
    """Backward operators whose forward ran outside of the scope are not counted where no tool looks
    at backward operators."""
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.tanh(X)
    with apply(Acting("Tanh", print)) as scope:
        tape.gradient(y, X)
    assert sum(scope.statistics.not_seen.values()) == 0


@pytest.mark.parametrize("watched", [(0,), (1,), (0, 1)], ids=str)
def test_names_of_products(watched: tuple[int, ...]) -> None:
    """A backward operator of a product of matrices is known by the factor it consumes, also
    where only one gradient is wanted."""
    names: list[Any] = []
    operands = [X, W]
    tool = Acting(
        "MatMul",
        backward=lambda c: c.insert_after_backward_op(lambda *g: None),
        after=lambda c: names.append(c.get_grad_input_names()),
    )
    with apply(tool), tf.GradientTape() as tape:
        sources = [operands[i] for i in watched]
        tape.watch(sources)
        tape.gradient(tf.linalg.matmul(X, W), sources)
    assert names == [["ab"[i]] for i in watched]


def test_names_that_types_tell() -> None:
    """Gradients of convolutions and biases are selected by the name of the forward input."""
    image = tf.ones([1, 4, 4, 2])
    kernel, bias = tf.Variable(tf.ones([3, 3, 2, 3])), tf.Variable(tf.ones([3]))
    shapes: list[Any] = []

    def analyse(context: amanda.OpContext) -> None:
        name = {"Conv2DBackpropFilter": "filter", "BiasAddGrad": "bias"}.get(
            context.get_backward_op().type
        )
        if name is not None:
            context.insert_after_backward_op(lambda g: shapes.append(g.shape), grad_inputs=[name])

    with apply(Acting("", backward=analyse)), tf.GradientTape() as tape:
        y = tf.nn.bias_add(tf.nn.conv2d(image, kernel, 1, "SAME"), bias)
        tape.gradient(y, [kernel, bias])
    assert shapes == [bias.shape, kernel.shape]


def test_learned_names() -> None:
    """After its first run a gradient function's results tell the names of all that it made."""
    names: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        names.append((context.get_backward_op().type, context.get_grad_input_names()))

    double = tf.cast(X, tf.float64)
    with apply(Acting("Mul", backward=look)), amanda.cache_disabled():
        for _ in range(2):
            gradients(lambda x: x * tf.cast(W, tf.float64), double)
    half = len(names) // 2
    assert not any("x" in found for _, found in names[:half])
    assert names[-1][1] == ["x"]


def test_slices_pass_through() -> None:
    """Gradients that are slices stay slices where no routine selects them."""
    variable = tf.Variable(X)

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *g: None)
        context.insert_after_backward_op(lambda *g: None, grad_inputs=[1])

    with apply(Acting("ResourceGather", analyse)), tf.GradientTape() as tape:
        found = tape.gradient(tf.nn.embedding_lookup(variable, [1, 1]), variable)
    assert isinstance(found, tf.IndexedSlices)


@pytest.mark.parametrize("change", [True, False], ids=["changed", "looked at"])
def test_slices_are_shown_dense(change: bool) -> None:
    """A routine that selects slices gets them in their dense form; they stay slices unless it
    returns something else."""
    variable = tf.Variable(X)
    seen: list[Any] = []

    def routine(gradient: Any) -> Any:
        seen.append(gradient.numpy().tolist())
        return gradient * 2.0 if change else None

    tool = Acting("ResourceGather", lambda c: c.insert_after_backward_op(routine, grad_inputs=[0]))
    with apply(tool), tf.GradientTape() as tape:
        found = tape.gradient(tf.nn.embedding_lookup(variable, [1, 1]), variable)
    assert seen == [[[0.0, 0.0], [2.0, 2.0]]]
    assert isinstance(found, tf.IndexedSlices) != change
    factor = 2.0 if change else 1.0
    assert tf.convert_to_tensor(found).numpy().tolist() == [[0.0, 0.0], [2.0 * factor] * 2]


def test_backward_of_a_replaced_operator() -> None:
    """The operators of a replacement's gradient are backward operators of the replaced one,
    between the routines on the whole operator."""
    order: list[str] = []

    def whole(context: amanda.OpContext) -> None:
        context.replace_op(lambda a, b: tf.tanh(a) * tf.exp(b))
        context.insert_before_backward_op(lambda g: order.append("first"))
        context.insert_after_backward_op(lambda *g: order.append("last"))

    def single(context: amanda.OpContext) -> None:
        op_id = context.get_backward_op_id()
        context.insert_before_backward_op(lambda *g: order.append(op_id))  # type: ignore[arg-type]

    expected = gradients(lambda a, b: tf.tanh(a) * tf.exp(b), X, W)
    with apply(Acting("AddV2", whole, single)):
        found = gradients(tf.add, X, W)
    assert np.array_equal(found[1], expected[1])
    assert (order[0], order[-1]) == ("first", "last")
    assert set(order[1:-1]) >= {"/AddV2:0/grad/TanhGrad:0", "/AddV2:0/grad/Mul:0"}
    assert len(order) == len(set(order))


def test_state_is_never_replaced() -> None:
    """A routine that returns another resource is an error; returning the same is none."""
    variable, other = tf.Variable(X), tf.Variable(X)
    tool = Acting("ReadVariableOp", lambda c: c.insert_before_op(lambda handle: handle))
    with apply(tool):
        assert np.array_equal(variable.read_value(), X)
    tool = Acting("ReadVariableOp", lambda c: c.insert_before_op(lambda handle: other.handle))
    with apply(tool), pytest.raises(RoutineResultError, match=r"ReadVariableOp:0.*resource"):
        variable.read_value()


def test_a_live_tensor_as_substitute() -> None:
    """A routine may return a tensor that others use: the gradient does not leak into it."""
    other = tf.constant([[2.0, 2.0], [2.0, 2.0]])

    def build(x: Any, kept: Any) -> Any:
        return tf.tanh(x) * kept + tf.exp(kept)

    tool = Acting("Tanh", lambda c: c.insert_before_op(lambda t: other))
    plain = gradients(build, other, other)
    with apply(tool):
        result, (dx, dkept) = gradients(build, X, other)
    assert np.array_equal(result, plain[0])
    factor = tf.identity(other)
    expected = gradients(lambda x: tf.tanh(x) * factor, other)[1][0]
    assert np.array_equal(dx, expected)
    assert np.array_equal(dkept, tf.tanh(other) + tf.exp(other))


def test_marks_of_later_passes() -> None:
    """From its second backward pass on an operator that is only looked at is marked on the
    fast path, and a backward operator met then is analysed."""
    tool = Seen("MatMul")
    with apply(tool):
        for watched in ([X], [X], [X, W]):
            with tf.GradientTape() as tape:
                tape.watch(watched)
                y = tf.linalg.matmul(X, W)
            tape.gradient(y, watched)
    assert tool.ids == ["/MatMul:0"]
    assert tool.backward_ids == ["/MatMul:0/grad/MatMul:0", "/MatMul:0/grad/MatMul:1"]


def test_forward_mode_of_a_substitute() -> None:
    """Tangents pass straight through a substitution as gradients do."""
    tool = Acting("Tanh", lambda c: c.insert_after_op(lambda t: tf.zeros_like(t)))
    with tf.autodiff.ForwardAccumulator(X, ONES) as accumulator:
        expected = accumulator.jvp(tf.tanh(X))
    with apply(tool), tf.autodiff.ForwardAccumulator(X, ONES) as accumulator:
        y = tf.tanh(X)
        tangent = accumulator.jvp(y)
    assert np.array_equal(y, tf.zeros([2, 2]))
    assert np.array_equal(tangent, expected)


def test_forward_mode_of_another_type() -> None:
    """A substitute of another type gets the tangent in its type, and gives the gradient back."""
    tool = Acting("Tanh", lambda c: c.insert_after_op(lambda t: tf.cast(t, tf.float64)))
    with apply(tool):
        with tf.autodiff.ForwardAccumulator(X, ONES) as accumulator:
            tangent = accumulator.jvp(tf.tanh(X))
        _, (gradient,) = gradients(tf.tanh, X)
    assert (tangent.dtype, gradient.dtype) == (tf.float64, tf.float32)
    assert np.array_equal(tf.cast(tangent, tf.float32), gradient)
