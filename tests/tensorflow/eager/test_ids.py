"""Which operators the eager driver sees, how often, and under which ids."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import amanda
from amanda.errors import CoverageWarning
from amanda.testing import loopback
from amanda.testing.loopback.driver import LoopbackDriver
from amanda_tensorflow.eager import op_ids
from tests.tensorflow.eager.support import DRIVERS, Acting, Seen, apply, bits

X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
KERNEL = tf.ones((2, 2, 1, 1))


@pytest.mark.parametrize(
    "operand",
    [X, tf.Variable(X), keras.Variable(X), X.numpy(), [[1.0, 0.0], [0.0, 1.0]]],
    ids=["tensor", "variable", "keras", "array", "list"],
)
def test_counted_once(operand: Any) -> None:
    """An operator counts once, whether its arguments make it leave the fast path or not."""
    calls: list[int] = []
    tool = Acting("MatMul", lambda c: c.insert_before_op(lambda *t: calls.append(len(t))))
    with apply(tool):
        for _ in range(3):
            amanda.new_iteration()
            tf.linalg.matmul(X, operand)
    assert calls == [2, 2, 2]


REFUSED_ATTRIBUTES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dtype of NumPy": ("Bitcast", lambda x: tf.bitcast(x, np.int32)),
    "name of a dtype": ("Shape", lambda x: tf.shape(x, out_type="int64")),
    "float of NumPy": (
        "LeakyRelu",
        lambda x: tf.raw_ops.LeakyRelu(features=x, alpha=np.float32(2)),
    ),
    "integer of NumPy": (
        "Conv2D",
        lambda x: tf.nn.conv2d(tf.reshape(x, (1, 2, 2, 1)), KERNEL, np.int64(1), "SAME"),
    ),
    "several outputs": ("Unpack", lambda x: tf.unstack(x, axis=np.int64(0))),
}
"""Operators with an attribute that only the slow path takes."""


@pytest.mark.parametrize("has_callback", [False, True])
@pytest.mark.parametrize("name", REFUSED_ATTRIBUTES)
def test_an_attribute_that_the_fast_path_refuses(name: str, has_callback: bool) -> None:
    """An operator with an attribute that only the slow path takes has one id, runs once between
    its routines, and computes with what they return."""
    kind, build = REFUSED_ATTRIBUTES[name]
    calls: list[str] = []

    def double(first: Any, *others: Any) -> list[Any]:
        calls.append("before")
        return [first * 2, *others]

    def analyse(context: amanda.OpContext) -> None:
        calls.append(context.get_op_id())
        context.insert_before_op(double)
        context.insert_after_op(lambda *outputs: calls.append(f"after {len(outputs)}"))

    expected, found, told = bits(build(X * 2)), [], list[Any]()
    if has_callback:
        op_callbacks.add_op_callback(lambda kind, *_: told.append(kind))
    with apply(Acting(kind, analyse)):
        for _ in range(3):
            found.append(bits(build(X)))
            amanda.new_iteration()
    if has_callback:
        op_callbacks.clear_op_callbacks()
    assert found == [expected] * 3
    assert calls == [f"/{kind}:0", *["before", f"after {len(expected)}"] * 3]
    assert len([t for t in told if t in (kind, kind.encode())]) == 3 * has_callback


def test_an_operator_that_fails_between_its_routines() -> None:
    """Routines before an operator that fails run once, as it counts once; one that TensorFlow
    refuses for an attribute, after its routines, does not count."""
    calls: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(lambda *_: calls.append(op_id))

    found: list[list[str]] = []
    with apply(Acting("Bitcast", analyse)):
        for dtypes in ([tf.int32] * 4, [tf.complex128, np.int32], ["no type", tf.int32]) * 2:
            calls.clear()
            for dtype in dtypes:
                try:
                    tf.bitcast(X, dtype)
                except (TypeError, tf.errors.InvalidArgumentError) as error:
                    calls.append(type(error).__name__)
            found.append(list(calls))
            amanda.new_iteration()
    first, second = "/Bitcast:0", "/Bitcast:1"
    assert found[1] == found[4] == [first, "InvalidArgumentError", second]
    assert found[2] == found[5] == [first, "TypeError", first]


def test_an_inner_scope_has_the_ids_of_readings() -> None:
    """Readings of variables have their ids in a scope that begins when they are known."""
    weight = tf.Variable(X)

    def products() -> None:
        y = X
        for _ in range(3):
            y = tf.linalg.matmul(y, weight)
        weight.read_value()

    outer, inner = Seen(), Seen()
    with apply(outer):
        for _ in range(4):
            products()
            amanda.new_iteration()
        first = outer.ids[:8]
        with apply(inner):
            products()
    assert "/ReadVariableOp:3" in first
    assert inner.ids == first


@pytest.mark.parametrize("routine", [True, False], ids=["routine", "none"])
def test_a_variable_is_read_in_every_iteration(routine: bool) -> None:
    """The runtime reads a variable that an operator is given; that is an operator, too."""
    calls: list[int] = []
    ids: list[str] = []
    variable = tf.Variable(X)

    def analyse(context: amanda.OpContext) -> None:
        ids.append(context.get_op_id())
        if context.get_op().type == "ReadVariableOp":
            context.insert_after_op(lambda *t: calls.append(len(t)))
        elif routine:
            context.insert_before_op(lambda *t: None, inputs=[])

    with apply(Acting("", analyse)):
        for _ in range(3):
            amanda.new_iteration()
            tf.nn.relu(variable)
            tf.add_n([variable, variable])
            variable.read_value()
    assert len(calls) == 3 * 4
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", ["tf", "keras", "list"])
@pytest.mark.parametrize("counted", ["readings", "all"])
def test_a_variable_is_read_where_a_tensor_was_passed_before(counted: str, kind: str) -> None:
    """The reading is seen of a variable that is passed under an id that was met with tensors."""
    counter = amanda.inline.Counter()
    variable: Any = keras.Variable(X) if kind == "keras" else tf.Variable(X)
    operands: Any = ([X, X], [X, variable]) if kind == "list" else (X, variable)
    join = tf.stack if kind == "list" else tf.math.square

    def analyse(context: amanda.OpContext) -> None:
        is_reading = context.get_op().type == "ReadVariableOp"
        if is_reading or counted == "all":
            context.insert_after_op(counter, outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with apply(tool):
        for operand in [operands[0]] * 3 + [operands[1]] * 3:
            amanda.new_iteration()
            join(operand)
    assert counter.count == (3 if counted == "readings" else 3 + 6)


def test_ids_outside_of_layers() -> None:
    """Outside of name scopes an id begins with a slash, and operators of a type are numbered."""
    tool = Seen()
    with apply(tool):
        tf.linalg.matmul(X, X)
        with tf.name_scope("part"):
            tf.nn.relu(X)
        tf.linalg.matmul(X, X)
    assert tool.ids == ["/MatMul:0", "part/Relu:0", "/MatMul:1"]


def test_the_end_of_a_backward_pass() -> None:
    """The outermost backward pass ends an iteration; one within a gradient function does not."""

    @tf.custom_gradient
    def twice(x: Any) -> Any:
        def backward(grad: Any) -> Any:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = x * 2.0
            return inner.gradient(y, x, grad)

        return x * 2.0, backward

    tool = Seen("Tanh")
    with apply(tool):
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(X)
                y = tf.tanh(twice(X))
            tape.gradient(y, X)
    assert tool.ids == ["/Tanh:0"]


def test_what_is_not_an_operator() -> None:
    """Handles of variables and calls of functions are not operators to tools."""
    function = tf.function(lambda x: x + 1.0)
    tool = Seen()
    with apply(tool):
        tf.Variable(X, name="made")
        function(X)
    assert tool.ids == ["made/AssignVariableOp:0"]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_callbacks_on_operators(inside: bool) -> None:
    """TensorFlow's callbacks on operators and a scope do not disturb each other; they are told the
    type as a text, as without a scope."""
    from tensorflow.python.eager import execute

    calls: list[int] = []
    called: list[Any] = []

    def callback(kind: Any, *_: Any) -> None:
        called.append(kind)

    found = execute.execute
    tool = Acting("Relu", lambda c: c.insert_before_op(lambda t: calls.append(1)))
    if not inside:
        op_callbacks.add_op_callback(callback)
    with apply(tool):
        tf.nn.relu(X)
        if inside:
            op_callbacks.add_op_callback(callback)
        tf.nn.relu(X)
        op_callbacks.remove_op_callback(callback)
        tf.nn.relu(X)
    assert len(calls) == 3
    assert called.count("Relu") == (1 if inside else 2)
    assert execute.execute is found


def test_what_tools_run_elsewhere() -> None:
    """Operators that a tool runs while another driver calls it are vanilla, and not counted."""
    ids: list[str] = []

    def routine(*tensors: Any) -> None:
        tf.nn.relu(X)

    def analyse(context: amanda.OpContext) -> None:
        tf.nn.relu(X)
        ids.append(context.get_op_id())
        context.insert_before_op(routine)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, drivers=[*DRIVERS, LoopbackDriver]):
        for _ in range(3):
            amanda.new_iteration()
            loopback.relu(loopback.tensor([1.0]))
            tf.nn.relu(X)
    assert ids == ["/relu:0", "/Relu:0"]


def test_a_loop_without_an_end_of_an_iteration_is_told_by_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warning names the program's line that runs the operators, not one of TensorFlow."""
    monkeypatch.setattr(op_ids, "_MANY", 3)

    def loop() -> None:
        for _ in range(4):
            tf.nn.relu(X)

    with apply(Seen()), pytest.warns(CoverageWarning, match="3 Relu operators") as said:
        loop()
    [warning] = said
    assert (warning.filename, linecache.getline(__file__, warning.lineno).strip()) == (
        __file__,
        "tf.nn.relu(X)",
    )
