"""Iterations of programs that train by Keras, in functions, in loops within them, and eagerly."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.inline import Counter
from amanda.interface.points import Point, PointContext
from tests.running import run_python
from tests.tutorial.documents import ROOT

BATCH, STEPS = 4, 6
X, Y = np.ones((BATCH * STEPS, 8), "float32"), np.ones((BATCH * STEPS, 3), "float32")


class Steps(amanda.Tool):
    """The products that each iteration has computed, forward, and its points."""

    def __init__(self) -> None:
        super().__init__()
        self.products = Counter()
        self.found: list[int] = []
        self.begun: dict[int, int] = {}
        self.points: collections.Counter[Point] = collections.Counter()
        self.add_inst_for_op(self.analyse)
        for end in (False, True):
            self.add_inst_for_iteration(self.note, end=end)
            self.add_inst_for_pass(self.note, end=end)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "MatMul":
            context.insert_before_op(self.products, inputs=[])

    def note(self, context: PointContext) -> None:
        self.points[context.point] += 1
        if context.point is Point.ITERATION_BEGIN:
            earlier = {n: c for n, c in self.begun.items() if n < context.iteration}
            self.begun = {**earlier, context.iteration: self.products.count}
        elif context.point is Point.ITERATION_END:
            # An iteration that has looked ended before may go on.
            del self.found[context.iteration :]
            self.found.append(self.products.count - self.begun[context.iteration])


def model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([layers.Input((8,)), layers.Dense(4, "relu"), layers.Dense(3)])


class Own(keras.Model):  # type: ignore[misc]
    """A model with a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": step(self, self.optimizer, *data)}


def step(net: keras.Model, optimizer: keras.optimizers.Optimizer, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x) - y) ** 2)
    gradients = tape.gradient(loss, net.trainable_variables)
    optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
    return loss


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)


def fit(net: keras.Model, optimizer: Any = "adam", **options: Any) -> None:
    net.compile(optimizer, "mse", **options)
    net.fit(X, Y, BATCH, verbose=0)


def by_batches() -> None:
    net = model()
    net.compile("sgd", "mse")
    for _ in range(STEPS):
        net.train_on_batch(X[:BATCH], Y[:BATCH])


def within(strategy: Callable[[], tf.distribute.Strategy]) -> None:
    with strategy().scope():
        net = model()
        net.compile("sgd", "mse")
    net.fit(X, Y, BATCH, verbose=0)


def own_loop(over: str) -> None:
    """A function that trains all batches: over a data set, by numbers, or unrolled."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)
    optimizer.build(net.trainable_variables)
    x, y = tf.constant(X[:BATCH]), tf.constant(Y[:BATCH])

    @tf.function
    def train() -> None:
        if over == "data":
            for batch in tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH):
                step(net, optimizer, *batch)
        elif over == "numbers":
            for _ in tf.range(STEPS):
                step(net, optimizer, x, y)
        else:
            for _ in range(STEPS):
                step(net, optimizer, x, y)

    train()


def by_hand() -> None:
    net = model()
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(X[:BATCH]) - Y[:BATCH]) ** 2)
        for variable, slope in zip(
            net.trainable_variables, tape.gradient(loss, net.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * slope)


PROGRAMS: dict[str, tuple[Callable[[], object], int]] = {
    "fit": (lambda: fit(model()), STEPS),
    "three steps at once": (lambda: fit(model(), steps_per_execution=3), STEPS),
    "four steps at once": (lambda: fit(model(), steps_per_execution=4), STEPS),
    "compiled steps at once": (
        lambda: fit(model(), steps_per_execution=3, jit_compile=True),
        STEPS,
    ),
    "eager": (lambda: fit(model(), run_eagerly=True), STEPS),
    "eager steps at once": (lambda: fit(model(), run_eagerly=True, steps_per_execution=3), STEPS),
    "own step": (lambda: fit(Own(), steps_per_execution=2), STEPS),
    "accumulation": (lambda: fit(model(), accumulating()), STEPS // 2),
    "eager accumulation": (lambda: fit(model(), accumulating(), run_eagerly=True), STEPS // 2),
    "accumulation at once": (
        lambda: fit(model(), accumulating(), steps_per_execution=3),
        STEPS // 2,
    ),
    "batches": (by_batches, STEPS),
    "strategy": (lambda: within(lambda: tf.distribute.OneDeviceStrategy("/cpu:0")), STEPS),
    "mirrored": (lambda: within(lambda: tf.distribute.MirroredStrategy(["/cpu:0"])), STEPS),
    "data set": (lambda: own_loop("data"), STEPS),
    "loop": (lambda: own_loop("numbers"), STEPS),
    "unrolled": (lambda: own_loop("unrolled"), STEPS),
    "by hand": (by_hand, STEPS),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
def test_each_step_of_an_optimizer_is_an_iteration(program: str) -> None:
    """However many a run of a function has, each has a begin and an end, around what it runs."""
    run, steps = PROGRAMS[program]
    with amanda.apply(tool := Steps()) as scope:
        run()
    assert scope.statistics.steps == steps
    assert tool.found == [2 * STEPS // steps] * steps
    assert tool.points[Point.FORWARD_BEGIN] == tool.points[Point.FORWARD_END] == STEPS


def test_evaluations_belong_to_no_step() -> None:
    """Validation after an epoch of several steps at once is not part of the next one."""
    with amanda.apply(tool := Steps()) as scope:
        net = model()
        net.compile("sgd", "mse", steps_per_execution=3)
        net.fit(X, Y, BATCH, epochs=2, verbose=0, validation_data=(X, Y))
    assert scope.statistics.steps == 2 * STEPS
    assert tool.found == [2] * 2 * STEPS


def test_tangents_are_no_steps() -> None:
    """The functions by which an accumulator computes tangents end no iteration, so that operators
    of one have ids of their own; a gradient in it does. Operators of the tangents are seen."""
    x, ids = tf.Variable([1.0, 2.0]), []
    (tool := amanda.Tool()).add_inst_for_op(lambda context: ids.append(context.get_op_id()))
    with amanda.apply(tool, Steps()) as scope:
        for _ in range(3):
            with tf.autodiff.ForwardAccumulator(x, tf.ones(2)) as tangents:
                with tf.GradientTape() as tape:
                    y = tf.sin(tf.sin(x))
                found = tangents.jvp(tape.gradient(y, x))
    assert found is not None
    assert scope.statistics.steps == 3
    assert [i for i in ids if "/Sin:" in i and i.startswith("/")] == ["/Sin:0", "/Sin:1"]
    assert any(i.startswith("_jvp") and i.endswith("/Cos") for i in ids)


def test_a_run_that_raises_leaves_no_pass_open() -> None:
    """The next run is one again."""
    net, optimizer = model(), keras.optimizers.SGD(0.1)
    optimizer.build(net.trainable_variables)

    @tf.function
    def train(limit: Any) -> None:
        for number in tf.range(3):
            with tf.control_dependencies([tf.debugging.assert_less(number, limit)]):
                step(net, optimizer, tf.constant(X[:BATCH]), tf.constant(Y[:BATCH]))

    with amanda.apply(tool := Steps()):
        with pytest.raises(tf.errors.InvalidArgumentError):
            train(tf.constant(1))
        before = len(tool.found)
        train(tf.constant(9))
    assert len(tool.found) == before + 3
    assert tool.points[Point.FORWARD_BEGIN] == tool.points[Point.FORWARD_END]


def test_marks_change_no_result() -> None:
    """A loop of steps trains to the very weights of the vanilla one."""

    def train() -> list[Any]:
        keras.utils.set_random_seed(0)
        net = model()
        fit(net, steps_per_execution=3)
        return [variable.numpy() for variable in net.trainable_variables]

    expected = train()
    with amanda.apply(Steps()):
        found = train()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def singular(x: Any) -> Any:
    """An inverse that raises where it is computed."""
    return tf.linalg.inv(tf.zeros((3, 3)) * tf.reduce_sum(x))


class DeadInLoop(keras.layers.Layer):  # type: ignore[misc]
    """A loop with a result that nothing reads."""

    def call(self, x: Any) -> Any:
        def body(step: Any, x: Any, unread: Any) -> tuple[Any, Any, Any]:
            return step + 1, x * 2.0, singular(unread)

        return tf.while_loop(lambda step, *_: step < 3, body, (0, x, tf.eye(3)))[1]


class DeadInBranch(keras.layers.Layer):  # type: ignore[misc]
    """A condition with a result that nothing reads."""

    def call(self, x: Any) -> Any:
        is_positive = tf.reduce_sum(x) > 0
        return tf.cond(is_positive, lambda: (x * 2.0, singular(x)), lambda: (x, tf.eye(3)))[0]


class Products(amanda.Tool):
    """Counts products at run time, with the points that are told between them."""

    def __init__(self, modules: bool, iterations: bool) -> None:
        super().__init__()
        self.found: list[str] = []
        self.add_inst_for_op(self.analyse)
        if modules:
            self.add_inst_for_module(
                lambda point: self.found.append(f"leave {point.id}"), exit=True
            )
        if iterations:
            self.add_inst_for_iteration(lambda point: self.found.append("end"), end=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Mul" and context.get_module() == "net/dead":
            context.insert_after_op(self.count)

    def count(self, *tensors: Any) -> None:
        self.found.append("Mul")


@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize("iterations", [True, False])
@pytest.mark.parametrize("layer", [DeadInLoop, DeadInBranch])
def test_marks_compute_no_result_that_nothing_reads(
    layer: type[Any], modules: bool, iterations: bool
) -> None:
    """A result of a loop or branch that a run does not compute is not computed for a mark's sake;
    what it computes has run when the layer is left."""
    net = keras.Sequential([layer(name="dead"), keras.layers.Dense(3, name="fc")], name="net")
    optimizer = keras.optimizers.SGD(0.1)
    x = tf.ones((2, 3))

    @tf.function
    def train() -> None:
        for _ in tf.range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(net(x))
            weights = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    net.build((2, 3))
    optimizer.build(net.trainable_variables)
    train()
    with amanda.apply(tool := Products(modules, iterations)):
        train()
    step = ["Mul"] * (3 if layer is DeadInLoop else 1)
    step += modules * ["leave net/dead", "leave net/fc", "leave net"] + iterations * ["end"]
    assert tool.found == 2 * step


@pytest.mark.parametrize("before", [[], ["tensorflow"]], ids=["neither", "tensorflow"])
def test_keras_may_be_imported_inside(before: list[str]) -> None:
    """Its layers and optimizers are then seen as those of a Keras that was there before."""
    done = run_python("-m", "tests.tensorflow.keras_inside", *before, cwd=ROOT)
    assert done.returncode == 0, done.stderr


CONVOLUTIONS = """
import sys, keras, numpy as np, tensorflow as tf, amanda
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

def train():
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [keras.Input((6, 6, 2)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    )
    net.compile("sgd", "mse", steps_per_execution=2)
    net.fit(np.ones((8, 6, 6, 2)), np.ones((8, 64)), 2, verbose=0)
    return net.get_weights()

expected = train()
with amanda.apply(amanda.tools.load("count")()):
    found = train()
for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one, other)
"""


def test_marks_leave_convolutions_to_onednn() -> None:
    """Without TensorFlow's graph optimizer, too, a loop of steps may have convolutions with a bias:
    oneDNN fuses those that wait for nothing, and ends a process where both wait for one node."""
    done = run_python("-c", CONVOLUTIONS)
    assert done.returncode == 0, done.stderr
