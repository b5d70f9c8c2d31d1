"""The contract's adapters of TensorFlow, one for each way to run it.

They compute in double precision, so that results can be compared with ``==``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import session
from tensorflow.python.eager import backprop, context, execute, record
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import script_ops

from amanda.testing.framework import Build, Framework, Program, Trained, Values
from amanda_tensorflow import _internals
from amanda_tensorflow.gradient_map import recording
from tests.tensorflow import custom_op

tf1 = tf.compat.v1


class TensorFlowFramework(Framework):
    """The adapters of all modes of TensorFlow."""

    types: ClassVar[Mapping[str, Any]] = {
        "add": "AddV2",
        "mul": "Mul",
        "relu": "Relu",
        "linear": "MatMul",
        "cat": "ConcatV2",
        "split": "Split",
    }
    names: ClassVar[Mapping[str, Any]] = {"mul": ["x", "y"], "linear": ["a", "b"]}
    attributes: ClassVar[Mapping[str, Any]] = {"num_split": 2}
    backward_types: ClassVar[Mapping[str, Any]] = {
        "mul": ["Mul", "Mul"],
        "relu": ["ReluGrad"],
        "linear": ["MatMul", "MatMul"],
    }
    relu_consumes = 2
    forgetful = "relu"
    separator = "/"
    numbers_calls = False
    watched = (
        pywrap_tfe, execute, backprop, record, context, ops, ops.Graph, func_graph,
        func_graph.FuncGraph, concrete_function.ConcreteFunction, session.BaseSession,
        session.Session, script_ops, tf.Variable, tf.GradientTape,
    )  # fmt: skip

    def __init__(self) -> None:
        self.random = tf.random.Generator.from_seed(7)

    def add(self, x: Any, y: Any) -> Any:
        return tf.add(x, y)

    def mul(self, x: Any, y: Any) -> Any:
        return tf.multiply(x, y)

    def relu(self, features: Any) -> Any:
        return tf.nn.relu(features)

    def linear(self, a: Any, b: Any, bias: Any = None) -> Any:
        product = tf.linalg.matmul(a, b, transpose_b=True)
        return product if bias is None else tf.nn.bias_add(product, bias)

    def cat(self, tensors: Sequence[Any]) -> Any:
        return tf.concat(list(tensors), 0)

    def split(self, tensor: Any, sections: int = 2) -> Sequence[Any]:
        return tf.split(tensor, sections)

    def inputs(self, op: str, *tensors: Any) -> list[Any]:
        axis = tf.constant(0)
        return [axis, *tensors] if op == "split" else [*tensors, axis]

    def dropout(self, tensor: Any) -> Any:
        return tensor * self.random.uniform(tensor.shape, dtype=tensor.dtype)

    def user_op(self) -> tuple[str, Build]:
        return custom_op.TYPE, custom_op.twice()

    def model(self, weight: Values, calls: int = 1) -> Build:
        from tests.tensorflow.keras_model import Model

        return Model(self, weight, calls)

    def module_path(self, name: str) -> str:
        return f"Model/{name}"

    def tensor(self, values: Values) -> Any:
        return tf.constant(values, tf.float64)

    def parameter(self, values: Values) -> Any:
        return tf.Variable(values, dtype=tf.float64)

    def to_list(self, tensor: Any) -> Any:
        if tf.is_tensor(tensor):
            tensor = tf.get_static_value(tensor)
        return None if tensor is None else tensor.tolist()

    def scale(self, tensor: Any, factor: float) -> Any:
        return tensor * tf.constant(factor, tensor.dtype)

    def cast(self, tensor: Any) -> Any:
        return tf.cast(tensor, tf.float32)

    def further_ops(self) -> Mapping[str, Any]:
        return {
            "Softmax": tf.nn.softmax,
            "Tanh": tf.function(tf.tanh),
            "Exp": tf.function(tf.exp, jit_compile=True),
        }

    def seed(self) -> None:
        self.random.reset_from_seed(7)

    def rng_state(self) -> Any:
        return self.random.state.numpy().tolist()

    def global_state(self) -> Any:
        # What of a run of gradient functions is told, and whether tapes record.
        return recording.EAGER.run, _internals.recording_is_stopped(), tf.executing_eagerly()


def descending(wrap: Callable[..., Any]) -> Callable[[], Any]:
    """A function that trains one step by an optimizer of Keras that multiplies."""

    class Descent(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign_sub(variable, tf.multiply(gradient, learning_rate))

    optimizer, weight = Descent(0.1), keras.Variable([1.0, 2.0])
    optimizer.build([weight])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.multiply(weight.value, 2.0))
        optimizer.apply([tape.gradient(loss, weight.value)])

    stepping: Callable[[], Any] = wrap(step)
    return stepping


class EagerTensorFlow(TensorFlowFramework):
    """TensorFlow running operators at once, under a gradient tape."""

    backward_types: ClassVar[Mapping[str, Any]] = {
        **TensorFlowFramework.backward_types,
        # In double precision the shapes are compared first, which a graph does once for all.
        "mul": "Mul Mul Shape Shape BroadcastGradientArgs Sum Sum Reshape Reshape".split(),
    }

    def further_ops(self) -> Mapping[str, Any]:
        # Functions are those of another driver, which a program has beside this one.
        return {"Softmax": tf.nn.softmax}

    def training_step(self) -> Callable[[], Any]:
        return descending(lambda step: step)

    def program(self, build: Build, *values: Values) -> Program:
        return EagerProgram(self, build, [self.tensor(value) for value in values])


class TapeInside(TensorFlowFramework):
    """``tf.function`` with the tape in the function: forward and backward are one graph."""

    forks = False

    def training_step(self) -> Callable[[], Any]:
        return descending(tf.function)

    def program(self, build: Build, *values: Values) -> Program:
        return TapeInsideProgram(self, build, [self.tensor(value) for value in values])


class TapeOutside(TensorFlowFramework):
    """``tf.function`` called under a tape: the backward is a function of its own."""

    forks = False
    # A function and its gradient that are made, called and let go of leave 86 to 102 bytes, also
    # without Amanda (TensorFlow 2.21; 2,000 of them).
    keeps = 100

    def training_step(self) -> Callable[[], Any]:
        return descending(tf.function)

    def program(self, build: Build, *values: Values) -> Program:
        function = tf.function(build, autograph=False)
        return EagerProgram(self, function, [self.tensor(value) for value in values])


class Parameter:
    """A variable that is made in the graph in which it is first used."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._variable: Any = None

    def value(self) -> Any:
        """The variable."""
        if self._variable is None:
            self._variable = tf1.get_variable(
                "parameter", initializer=tf.constant(self._values, tf.float64), use_resource=True
            )
        return self._variable


class SessionFramework(TensorFlowFramework):
    """Graphs that are built first and run by a session, each program with its own."""

    forks = False

    def __init__(self) -> None:
        self.random: Any = None
        self._session: Any = None

    def parameter(self, values: Values) -> Any:
        return Parameter(values)

    def mul(self, x: Any, y: Any) -> Any:
        return super().mul(*(t.value() if isinstance(t, Parameter) else t for t in (x, y)))

    def training_step(self) -> Callable[[], Any]:
        with tf.Graph().as_default():
            weight = tf1.get_variable("weight", initializer=[1.0, 2.0], use_resource=True)
            train = tf1.train.AdamOptimizer().minimize(tf.reduce_sum(tf.multiply(weight, 2.0)))
            session = tf1.Session()
            session.run(tf1.global_variables_initializer())
        return lambda: session.run(train)

    def program(self, build: Build, *values: Values) -> Program:
        program = SessionProgram(self, build, values)
        self._session = program.session
        return program

    def dropout(self, tensor: Any) -> Any:
        # Variables of its own hold its state, in the program's graph.
        self.random = tf.random.Generator.from_seed(7)
        return super().dropout(tensor)

    def seed(self) -> None:
        self._session.run(self.random.state.initializer)

    def rng_state(self) -> Any:
        return self._session.run(self.random.state).tolist()


def _listed(outputs: Any) -> list[Any]:
    """The result of a program's function, as a list of tensors."""
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _without_none(tensors: Sequence[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor is not None]


class EagerProgram(Program):
    """Calls a function at every run, under a tape where gradients are wanted."""

    def __init__(self, framework: Framework, build: Build, leaves: Sequence[Any]) -> None:
        self._framework = framework
        self._build = build
        self._leaves = list(leaves)

    def run(self) -> list[Any]:
        return self._values(_listed(self._build(*self._leaves)))

    def train(self) -> Trained:
        outputs, gradients = self._first_gradients()
        return Trained(self._values(outputs), self._values(gradients))

    def second_gradients(self) -> list[Any]:
        return self._values(self._second_gradients())

    def forward(self) -> Callable[[], list[Any]]:
        with tf.GradientTape() as tape:
            tape.watch(self._leaves)
            outputs = _listed(self._build(*self._leaves))
        return lambda: self._values(tape.gradient(outputs, self._leaves))

    def _first_gradients(self) -> tuple[list[Any], list[Any]]:
        return first_gradients(self._build, self._leaves)

    def _second_gradients(self) -> list[Any]:
        return second_gradients(self._build, self._leaves)

    def _values(self, tensors: Sequence[Any]) -> list[Any]:
        return [None if t is None else self._framework.to_list(t) for t in tensors]


def first_gradients(build: Build, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The outputs of a function, and the gradients of their sum."""
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        outputs = _listed(build(*leaves))
    return outputs, tape.gradient(outputs, leaves)


def second_gradients(build: Build, leaves: Sequence[Any]) -> list[Any]:
    """The gradients of the sum of the first gradients."""
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        _, gradients = first_gradients(build, leaves)
        used = _without_none(gradients)
    return list(tape.gradient(used, leaves))


class TapeInsideProgram(EagerProgram):
    """Calls functions that are traced at their first call."""

    def __init__(self, framework: Framework, build: Build, leaves: Sequence[Any]) -> None:
        super().__init__(framework, tf.function(build, autograph=False), leaves)
        self._first = tf.function(lambda *t: first_gradients(build, t), autograph=False)
        self._second = tf.function(lambda *t: second_gradients(build, t), autograph=False)

    def _first_gradients(self) -> tuple[list[Any], list[Any]]:
        return self._first(*self._leaves)

    def _second_gradients(self) -> list[Any]:
        return self._second(*self._leaves)


class SessionProgram(Program):
    """Runs tensors of a graph; gradients are added to it when they are first wanted."""

    def __init__(self, framework: Framework, build: Build, values: Sequence[Values]) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self._leaves = [self._leaf(i, value) for i, value in enumerate(values)]
            self._outputs = _listed(build(*self._leaves))
            initialize = tf1.global_variables_initializer()
        self.session = tf1.Session(graph=self.graph)
        self.session.run(initialize)
        self._first: list[Any] | None = None
        self._second: list[Any] | None = None

    def _leaf(self, index: int, value: Values) -> Any:
        initial = tf.constant(value, tf.float64)
        return tf1.get_variable(f"leaf{index}", initializer=initial, use_resource=True).read_value()

    def run(self) -> list[Any]:
        return self._values(self._outputs)

    def train(self) -> Trained:
        if self._first is None:
            with self.graph.as_default():
                self._first = tf.gradients(self._outputs, self._leaves)
        values = self._values([*self._outputs, *self._first])
        count = len(self._outputs)
        return Trained(values[:count], values[count:])

    def second_gradients(self) -> list[Any]:
        if self._second is None:
            with self.graph.as_default():
                first = _without_none(tf.gradients(self._outputs, self._leaves))
                self._second = tf.gradients(first, self._leaves)
        return self._values(self._second)

    def _values(self, tensors: Sequence[Any]) -> list[Any]:
        values = iter(self.session.run(_without_none(tensors)))
        return [None if t is None else next(values).tolist() for t in tensors]
