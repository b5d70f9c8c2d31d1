"""Under routines that change nothing, eager programs of all kinds give the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from tests.tensorflow.eager.support import Identity, apply, bits, copies, gradients, nothing, same

A = tf.constant(np.random.RandomState(0).randn(4, 4).astype("float32"))
B = tf.constant(np.random.RandomState(1).randn(4, 4).astype("float32"))

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


@program
def arithmetic() -> Any:
    def build(a: Any, b: Any) -> Any:
        y = tf.reduce_sum(tf.tanh(a @ b) * tf.sigmoid(a) + tf.nn.relu(b) - tf.exp(-a) / 2)
        return y + tf.concat([a, b], 0)[:4] ** 2

    return gradients(build, A, B)


@program
def persistent_tape() -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([A, B])
        y = A @ B * A
        z = tf.reduce_sum(y)
    return tape.gradient(y, [A, B]), tape.gradient(z, [A, B]), tape.gradient(y, [A, B])


@program
def operators_with_lists() -> Any:
    def build(a: Any) -> Any:
        return tf.add_n([*tf.split(a, 2), *tf.unstack(tf.reshape(a, [2, 2, 4]))])

    return gradients(build, A), tf.meshgrid([1, 2], [3])


@program
def several_outputs() -> Any:
    singular = gradients(lambda a: tf.linalg.svd(a, compute_uv=True)[0], A)
    return singular, tf.unique([1, 2, 1]), tf.nn.top_k(A, 2), tf.nn.moments(A, 0)


@program
def second_order() -> Any:
    with tf.GradientTape() as outer:
        outer.watch(A)
        _, (first,) = gradients(lambda a: tf.reduce_sum(tf.tanh(a @ B) * a * a), A)
    return first, outer.gradient(first, A)


@program
def jacobian() -> Any:
    with tf.GradientTape() as tape:
        tape.watch(A)
        y = tf.tanh(A @ B)
    return tape.jacobian(y, A)


@program
def forward_mode() -> Any:
    with tf.autodiff.ForwardAccumulator(A, B) as accumulator:
        y = tf.tanh(A @ B) * A + tf.nn.softmax(A)
    return y, accumulator.jvp(y)


@program
def forward_over_reverse() -> Any:
    with tf.autodiff.ForwardAccumulator(A, B) as accumulator:
        _, (first,) = gradients(lambda a: tf.reduce_sum(tf.sin(a) * a @ B), A)
    return first, accumulator.jvp(first)


@program
def sparse() -> Any:
    tensor = tf.sparse.from_dense(tf.nn.relu(A))
    product = gradients(lambda b: tf.sparse.sparse_dense_matmul(tensor, b), B)
    return product, tf.sparse.add(tensor, tensor), tf.sparse.reduce_sum(tensor, 1)


@program
def ragged() -> Any:
    rows = tf.ragged.constant([[1.0, 2.0], [3.0], []])

    def build(values: Any) -> Any:
        other = tf.RaggedTensor.from_row_lengths(values, [2, 1, 0])
        return tf.reduce_sum(other * other + rows, axis=1)

    return gradients(build, tf.constant([1.0, 2.0, 3.0])), tf.concat([rows, rows], 1)


@program
def strings() -> Any:
    words = tf.constant(["b", "c"])
    parts = tf.strings.join(["a", words]), tf.strings.split(["a b", "c"])
    return parts, tf.strings.regex_replace(words, "b", "x"), tf.strings.to_number(["1", "2"])


@program
def slices() -> Any:
    variable = tf.Variable(A)
    with tf.GradientTape() as tape:
        y = tf.nn.embedding_lookup(variable, [0, 2, 0]) * 2.0
        z = tf.reduce_sum(y) + tf.reduce_sum(tf.gather(variable, [1, 1]))
    return y, tf.convert_to_tensor(tape.gradient(z, variable))


@program
def tensor_array() -> Any:
    def build(a: Any) -> Any:
        array = tf.TensorArray(tf.float32, 4)
        for i in range(4):
            array = array.write(i, a[i] * 2.0)
        return array.stack()

    return gradients(build, A)


@program
def control_flow() -> Any:
    def build(a: Any) -> Any:
        _, x = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x @ B), (tf.constant(0), a))
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x)

    return gradients(build, A), tf.map_fn(tf.abs, A), tf.scan(tf.add, A)


@program
def custom_gradients() -> Any:
    variable = tf.Variable(A)

    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        def backward(grad: Any, variables: Any = None) -> Any:
            return grad * variable, [tf.reduce_sum(grad) * x]

        return x * variable, backward

    with tf.GradientTape() as tape:
        tape.watch(A)
        y = scaled(A) + tf.nn.swish(A) + tf.nn.gelu(A)
    return y, tape.gradient(y, [A, variable])


@program
def recomputation() -> Any:
    variable = tf.Variable(A)
    inner = tf.recompute_grad(lambda x: tf.tanh(x @ variable))
    outer = tf.recompute_grad(lambda x: tf.sin(inner(x) @ variable))
    with tf.GradientTape() as tape:
        tape.watch(B)
        y = outer(B) * 2.0
    return y, tape.gradient(y, [B, variable])


@program
def python_functions() -> Any:
    def build(a: Any) -> Any:
        squared = tf.py_function(lambda x: x * x, [a], tf.float32)
        return squared + tf.numpy_function(np.abs, [a], tf.float32)

    return gradients(build, A)


@program
def tables() -> Any:
    pairs = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2])
    return tf.lookup.StaticHashTable(pairs, -1).lookup(tf.constant(["a", "x"]))


@program
def datasets() -> Any:
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(6.0))
    return list(numbers.map(lambda x: x * 2).batch(2).shuffle(3, seed=1))


@program
def random_numbers() -> Any:
    tf.random.set_seed(3)
    drawn = tf.random.normal([3]), tf.nn.dropout(A, 0.5), tf.random.shuffle(tf.range(5))
    generator = tf.random.Generator.from_seed(1)
    return drawn, generator.normal([2]), generator.state.read_value()


@program
def functions() -> Any:
    return gradients(tf.function(lambda a: tf.reduce_sum(tf.tanh(a @ B) * a)), A)


@program
def variables() -> Any:
    variable = tf.Variable(A)
    variable.assign_add(B)
    variable.assign(variable * 2.0)
    variable[0, 0].assign(1.0)
    variable.scatter_update(tf.IndexedSlices(tf.zeros([1, 4]), [1]))
    return variable.read_value(), tf.cast(variable, tf.float64)


@program
def mixed_precision() -> Any:
    variable = tf.Variable(A)
    with tf.GradientTape() as tape:
        y = tf.cast(variable, tf.float16) @ tf.cast(B, tf.float16)
    return y, tape.gradient(y, variable)


@program
def complex_numbers() -> Any:
    return gradients(lambda a: tf.abs(tf.signal.fft(tf.cast(a, tf.complex64))), A)


@program
def convolutions() -> Any:
    x, w, d = (
        tf.random.stateless_normal(shape, [1, seed])
        for seed, shape in enumerate([[1, 8, 8, 2], [3, 3, 2, 4], [3, 3, 2, 1]])
    )

    def build(x: Any, w: Any, d: Any) -> Any:
        y = tf.nn.conv2d(x, w, 2, "SAME")
        back = tf.nn.conv2d_transpose(y, w, [1, 8, 8, 2], 2)
        deep = tf.nn.depthwise_conv2d(x, d, [1, 1, 1, 1], "SAME")
        return tf.nn.max_pool2d(y, 2, 2, "VALID") + tf.reduce_sum(deep * back)

    return gradients(build, x, w, d)


@program
def an_eager_fit() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, activation="relu", name="c"),
            keras.layers.BatchNormalization(name="b"),
            keras.layers.Dropout(0.5, name="d"),
            keras.layers.Flatten(name="f"),
            keras.layers.Dense(3, activation="softmax", name="e"),
        ],
        name="fitted",
    )
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=True)
    x, y = np.random.RandomState(0).randn(16, 8, 8, 3).astype("float32"), np.arange(16) % 3
    history = model.fit(x, y, batch_size=8, verbose=0)
    return model.get_weights(), model.predict(x, verbose=0), history.history["loss"]


@program
def recurrent_layers() -> Any:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Embedding(10, 4, name="e"),
        keras.layers.GRU(3, name="g", return_sequences=True),
        keras.layers.LSTM(4, name="l"),
    ]
    with tf.GradientTape() as tape:
        x = functools.reduce(lambda x, layer: layer(x), layers, tf.constant([[1, 2, 3], [4, 5, 6]]))
        y = tf.reduce_sum(x)
    found = tape.gradient(y, [v for layer in layers for v in layer.trainable_variables])
    return y, [tf.convert_to_tensor(gradient) for gradient in found]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("returned", [nothing, same], ids=["None", "same"])
def test_identity_routines(name: str, returned: Callable[..., Any]) -> None:
    """Identity routines at all points of all operators leave every bit as it is."""
    expected = bits(PROGRAMS[name]())
    tool = Identity(returned)
    with apply(tool):
        assert bits(PROGRAMS[name]()) == expected
    assert tool.calls > 0 or name == "functions"
    assert bits(PROGRAMS[name]()) == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_copies(name: str) -> None:
    """Equal tensors in place of all that can be replaced leave every bit as it is."""
    expected = bits(PROGRAMS[name]())
    with apply(Identity(copies)):
        assert bits(PROGRAMS[name]()) == expected


MISTAKES: dict[str, Callable[[], Any]] = {
    "product": lambda: tf.ones((2, 3)) @ A,
    "named": lambda: tf.linalg.inv(tf.zeros((2, 2)), name="mine"),
    "variable": lambda: tf.matmul(tf.Variable(tf.ones((2, 3))), A),
    "types": lambda: tf.raw_ops.AddV2(x=A, y=tf.constant(1)),
    "numbers": lambda: tf.debugging.check_numerics(tf.constant([np.nan]), "found"),
    "gradient": lambda: gradients(lambda a: tf.reshape(a, [3, 3]), A),
    "converted": lambda: tf.gather([1, 2], 5),
    "list": lambda: tf.concat([A, tf.ones((2, 3))], 0),
    "list of numbers": lambda: tf.concat([A, [1.0]], 0),
    "array": lambda: tf.matmul(np.ones((2, 3), np.float32), A),
    "slow": lambda: tf.io.decode_png(tf.constant(["a"])),
}


@pytest.mark.parametrize("tool", [lambda: Identity(copies), lambda: amanda.tools.load("count")()])
@pytest.mark.parametrize("name", MISTAKES)
def test_errors_of_operators_are_those_of_vanilla(name: str, tool: Callable[[], Any]) -> None:
    """An operator that fails raises the error that it raises without a tool, with its message, when
    it is new and when it is known."""

    def raised() -> tuple[type, str, Any]:
        amanda.new_iteration()
        with pytest.raises(tf.errors.OpError) as caught:
            MISTAKES[name]()
        return type(caught.value), str(caught.value), caught.value.__cause__

    expected = raised()
    with amanda.apply(tool()):
        found = [raised() for _ in range(3)]
    assert found == [expected] * 3


REFUSED: dict[str, Callable[[], Any]] = {
    "no tensors": lambda: tf.raw_ops.ConcatV2(values=[], axis=0),
    "nothing to add": lambda: tf.raw_ops.AddN(inputs=[]),
    "nothing to pack": lambda: tf.raw_ops.Pack(values=[]),
    "no handle": lambda: tf.raw_ops.AssignAddVariableOp(resource=A, value=A),
    "other type": lambda: tf.raw_ops.StringLower(input=A),
    "variable and tensor": lambda: tf.raw_ops.BiasAdd(
        value=tf.Variable(tf.ones((2, 3))), bias=tf.constant([True])
    ),
    "axis": lambda: tf.raw_ops.ConcatV2(values=[A, A], axis=1.0),
    "dtype": lambda: tf.raw_ops.ArgMax(input=A, dimension=0, output_type=-1),
    "shape": lambda: tf.raw_ops.ImmutableConst(
        dtype=tf.float32, shape=[-1], memory_region_name="x"
    ),
    "no list": lambda: tf.raw_ops.AddN(inputs=1),
    "array": lambda: tf.raw_ops.Pack(values=np.ones((2, 2))),
    "nested list": lambda: tf.raw_ops.Relu(features=[[1.0], [2.0, 3.0]]),
    "None": lambda: tf.raw_ops.Relu(features=None),
    "text": lambda: tf.raw_ops.AddV2(x=A, y="text"),
    "no such argument": lambda: tf.raw_ops.Relu(features=A, axis=1),
}
"""Calls that TensorFlow refuses before an operator runs, or for what it makes of the arguments."""


@pytest.mark.parametrize(
    "tool",
    [lambda: Identity(nothing), lambda: Identity(copies), lambda: amanda.tools.load("count")()],
)
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_tensorflow_refuses_raises_the_error_of_vanilla(
    name: str, tool: Callable[[], Any]
) -> None:
    """A call that TensorFlow refuses has the error of a vanilla call, of whichever class it is."""

    def raised() -> tuple[type, str]:
        amanda.new_iteration()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            REFUSED[name]()
        return type(caught.value), str(caught.value)

    expected = raised()
    with amanda.apply(tool()):
        found = [raised() for _ in range(3)]
    assert found == [expected] * 3


@pytest.mark.parametrize("returned", [nothing, same, copies])
def test_numbers_beside_variables(returned: Callable[..., Any]) -> None:
    """A number beside a variable has the variable's type, whichever comes first; any sequence is
    taken for a list; and variables are read and have their gradients."""
    variable, whole = tf.Variable([1.0, -2.0]), tf.Variable([3, 4])

    def program() -> Any:
        with tf.GradientTape() as tape:
            y = tf.maximum(0, variable) * tf.raw_ops.Mul(x=2, y=variable)
            z = tf.math.floormod(7, whole)
            joined = tf.raw_ops.ConcatV2(values=[variable, [1, 2], variable], axis=0)
            rows = tf.raw_ops.AddN(inputs=A), tf.raw_ops.Pack(values=range(3))
        return y, z, joined, rows, tape.gradient([y, joined], variable)

    expected = bits(program())
    tool = Identity(returned)
    with apply(tool):
        assert bits(program()) == expected
        amanda.new_iteration()
        assert bits(program()) == expected
    with amanda.apply(tool := amanda.tools.load("count")()) as scope:
        assert bits(program()) == expected
    assert not any("convert" in what for what in scope.statistics.not_seen)
