"""Eager execution: values, attributes and functions for tools, and their exceptions."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import TensorReleased
from amanda_tensorflow.eager.variable_readings import VariableValues
from tests.tensorflow.eager.support import Acting, Seen, apply, gradients

X = tf.constant([[1.0, 2.0], [3.0, 4.0]])


def values_of(kind: str, build: Callable[[], Any]) -> list[Any]:
    """The results of get_value for the inputs of the first operator of a type."""
    found: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        values = [context.get_value(i) for i in range(len(context.get_inputs()))]
        found.append([None if value is None else value.numpy().tolist() for value in values])

    with apply(Acting(kind, look)):
        build()
    first: list[Any] = found[0]
    return first


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["variable", "keras"])
def test_value_of_a_variable(make: Callable[[Any], Any]) -> None:
    """The value of a variable is known whether it is passed, read, copied or cast."""
    variable, value = make(X), X.numpy().tolist()
    assert values_of("MatMul", lambda: tf.linalg.matmul(X, variable)) == [None, value]
    copy = lambda: tf.linalg.matmul(X, tf.identity(variable))  # noqa: E731
    assert values_of("MatMul", copy) == [None, value]
    cast = lambda: tf.cast(X, tf.float64) @ tf.cast(variable, tf.float64)  # noqa: E731
    assert values_of("MatMul", cast) == [None, value]
    assert values_of("MatMul", lambda: tf.linalg.matmul(X, variable * 1.0)) == [None, None]


def test_value_of_a_handle() -> None:
    """Where an operator reads a variable itself, its handle has the variable's value."""
    variable = tf.Variable(X)
    values = values_of("ResourceGather", lambda: tf.nn.embedding_lookup(variable, [0]))
    assert values == [X.numpy().tolist(), None]


def test_names_of_parameters_that_are_made_in_the_scope() -> None:
    """A weight has its path, also where it was asked for when its initial value was written, before
    any object had it."""
    model, found = keras.Sequential([keras.layers.BatchNormalization()]), set[str | None]()
    names = lambda c: found.update(map(c.get_parameter_name, range(len(c.get_inputs()))))  # noqa: E731
    with apply(Acting("", names)):
        model(X)
    found.clear()
    with apply(Acting("ReadVariableOp", names)):
        model(X)
    assert found == {variable.path for variable in model.weights}


def test_the_search_for_a_variable_waits_until_it_is_made(monkeypatch: Any) -> None:
    """The objects of the process, in which a variable is searched for, are not looked through for
    each variable that a program makes."""
    searches, vanilla = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or vanilla())
    with apply(Acting("", lambda context: context.get_parameter_name(0))):
        made = [tf.Variable(X) for _ in range(5)]
        assert not searches
        for variable in made:
            variable.assign_add(X)
    assert len(searches) == 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_value_after_the_tensor_is_gone(dtype: Any) -> None:
    """A backward analysis gets the value of a variable also when the tensor was released."""
    variable = tf.Variable([1.0, 2.0])
    x = tf.cast(X, dtype)
    found: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        with pytest.raises(TensorReleased, match="input 1 of op /BiasAdd:0"):
            context.get_inputs()[1]
        value = context.get_value(1)
        found.append((value.dtype, value.numpy().tolist()))

    with apply(Acting("BiasAdd", backward=look)):
        gradients(lambda x: tf.nn.bias_add(x, tf.cast(variable, dtype)), x)
    assert found == [(dtype, [1.0, 2.0])]


def test_attributes_and_names() -> None:
    """Attributes are presented as in graphs, and names are those of the operator's definition."""
    seen: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        attributes = context.get_attrs()
        seen.append((attributes["T"], attributes["strides"], attributes["padding"]))
        seen.append(context.get_input_names())

    with apply(Acting("Conv2D", look)):
        tf.nn.conv2d(tf.ones([1, 4, 4, 1]), tf.ones([3, 3, 1, 1]), 1, "SAME")
    assert seen == [(tf.float32, [1, 1, 1, 1], "SAME"), ["input", "filter"]]


def test_routines_without_tensors_stay_on_the_fast_path() -> None:
    """A routine that selects nothing runs around the operator, once per execution."""
    order: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda: order.append("before"), inputs=[])
        context.insert_after_op(lambda: order.append("after"), outputs=[])

    with apply(Acting("Relu", analyse)):
        for operand in (X, X, keras.Variable(X), tf.Variable(X), X):
            amanda.new_iteration()
            tf.nn.relu(operand)
    assert order == ["before", "after"] * 5


class Unlucky(Exception):
    """Raised by the tools of these tests."""


OPERATIONS = {
    "tensors": lambda: X * X,
    "number": lambda: X * 2.0,
    "reflected": lambda: 2.0 * X,
    "function": lambda: tf.multiply(X, X),
    "py_function": lambda: tf.py_function(lambda x: x * x, [X], tf.float32),
}


@pytest.mark.parametrize("error", [TypeError, ValueError, Unlucky])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("selection", [None, []], ids=["tensors", "nothing"])
def test_exceptions_arrive(
    error: type[Exception], operation: Callable[[], Any], selection: Any
) -> None:
    """A tool's exception reaches the user as itself, and is raised once: TensorFlow would try
    an operator again, reflected, after some, and turn others into errors of its runtime."""
    calls: list[int] = []

    def fails_first(*tensors: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise error("as planned")

    tool = Acting("Mul", lambda c: c.insert_before_op(fails_first, inputs=selection))
    with apply(tool), pytest.raises(error, match="as planned") as caught:
        operation()
    assert len(calls) == 1
    assert len([n for n in caught.value.__notes__ if "Acting." in n and "Mul" in n]) == 1


def test_the_user_goes_on_after_an_exception() -> None:
    """Operators that the user runs while handling a tool's exception are ordinary ones."""
    failing = [True]

    def routine(*tensors: Any) -> None:
        if failing.pop():
            failing.append(False)
            raise ValueError("as planned")
        failing.append(False)

    result = None
    with apply(Acting("Mul", lambda c: c.insert_before_op(routine))):
        try:
            X * X
        except ValueError:
            result = X * X
    assert np.array_equal(result, X * X)


def test_keras_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a Keras that is imported inside of the scope are noticed, too."""
    (tmp_path / "tf_keras.py").write_text(
        "class layers:\n"
        "    class Layer:\n"
        "        def __call__(self, x):\n"
        "            return x + x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tool = Seen()
    finders = list(sys.meta_path)
    with apply(tool):
        import tf_keras

        layer = tf_keras.layers.Layer()
        for _ in range(3):
            tf.nn.relu(layer(X))
    assert tool.ids == ["/AddV2:0", "/Relu:0"]
    assert tf_keras.layers.Layer.__call__.__module__ == "tf_keras"
    # What waited for this module before the scope began has ended, too.
    assert all(finder in finders for finder in sys.meta_path)
    del sys.modules["tf_keras"]


def with_bias(bias: Any) -> tuple[Any, Any]:
    """Two additions of a bias, and its gradient."""
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = tf.nn.bias_add(tf.nn.bias_add(tf.ones([2, 3]), bias), bias)
        loss = tf.reduce_sum(y * y)
    return y.numpy(), tape.gradient(loss, bias).numpy()


def test_a_variable_that_a_counted_operator_is_passed() -> None:
    """It is read by an operator with an id and counters of its own, once for each time that it is
    passed, and its gradient is the vanilla one."""
    bias = tf.Variable([1.0, 2.0, 3.0])
    counters: dict[str, amanda.inline.Counter] = {}

    def analyse(context: amanda.OpContext) -> None:
        counter = counters[context.get_op_id()] = amanda.inline.Counter()
        context.insert_after_op(counter, outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    vanilla = with_bias(bias)
    with amanda.apply(tool):
        for _ in range(5):
            for found, expected in zip(with_bias(bias), vanilla, strict=True):
                np.testing.assert_array_equal(found, expected)
    kinds = ("/BiasAdd", "/ReadVariableOp")
    counted = {op_id: c.count for op_id, c in counters.items() if op_id.startswith(kinds)}
    names = ["/BiasAdd:0", "/BiasAdd:1", "/ReadVariableOp:0", "/ReadVariableOp:1"]
    assert dict(sorted(counted.items())) == dict.fromkeys(names, 5)


@pytest.mark.parametrize("counting", [False, True])
def test_a_variable_after_iterations_with_a_tensor(counting: bool) -> None:
    """The reading is analysed although the operator was known without a variable."""
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.get_op_id())
        if counting:
            context.insert_after_op(amanda.inline.Counter(), outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    x, tensor, variable = tf.ones([2, 3]), tf.ones([3]), tf.Variable([1.0, 2.0, 3.0])
    with amanda.apply(tool):
        for bias in [tensor] * 3 + [variable] * 3:
            tf.nn.bias_add(x, bias)
            amanda.new_iteration()
    assert seen == ["/BiasAdd:0", "/ReadVariableOp:0"]


class Result:
    """Stands for a tensor, which may have the address of an earlier one; the size differs."""

    def __init__(self) -> None:
        self.kept = [0]


def test_readings_of_variables_are_not_noted_for_ever() -> None:
    """What is noted of tensors that have died is dropped while the program runs."""
    values, variable = VariableValues(), tf.Variable([1.0])
    first = [tf.constant([1.0]) for _ in range(1100)]
    for tensor in first:
        values.note("ReadVariableOp", [variable.handle], tensor)
    assert values.noted == len(first)
    assert values.source_of(first[0]) is values.source_of(first[-1]) is not None
    del first, tensor
    second = [Result() for _ in range(2000)]
    for result in second:
        values.note("ReadVariableOp", [variable.handle], result)
    assert values.noted <= 2100
    assert values.source_of(second[-1]) is not None


def test_a_variable_that_cannot_be_read_raises_the_error_of_vanilla() -> None:
    """An operator that is passed a variable without a value raises vanilla's error, uncounted."""
    weight, counters = tf.Variable([[2.0]]), dict[str, amanda.inline.Counter]()

    def analyse(context: amanda.OpContext) -> None:
        counter = counters.setdefault(context.get_op_id(), amanda.inline.Counter())
        context.insert_after_op(counter, outputs=[])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with apply(tool):
        for _ in range(4):
            tf.nn.relu(weight)
            amanda.new_iteration()
        counts = {key: counter.count for key, counter in counters.items()}
        gone = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[1, 1], shared_name="gone")
        weight._handle = gone  # noqa: SLF001 - no public function deletes a variable
        with pytest.raises(tf.errors.OpError) as raised:
            tf.nn.relu(weight)
        after = {key: counters[key].count for key in counts}
    with pytest.raises(tf.errors.OpError) as expected:
        tf.nn.relu(weight)
    assert after == counts == {"/ReadVariableOp:0": 4, "/Relu:0": 4}
    assert type(raised.value) is type(expected.value)
