"""How many calls of our own Python functions one operator costs in the steady state.

Counted are the frames whose code lies in one of the Amanda packages, from the second iteration on,
in the thread that runs the model. Each bound is the count that was reached, so that a detour on the
path of every operator is noticed. Python 3.12 and later inline comprehensions: there the counts are
lower. An eager operator takes two calls and not one: what is asked before it runs is asked by a
function that has ended when TensorFlow finds the lines of all that run, which long ones make dear.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import tensorflow as tf

import amanda
from tests.counting import called

SOURCES = tuple(
    str(Path(sys.modules[name].__file__ or "").parent) + "/"
    for name in ("amanda", "amanda_tensorflow.plugin")
)
DRIVERS = ("tensorflow-eager", "tensorflow-function", "tensorflow-graph")
"""By name: drivers of other frameworks, which other tests import, would cost calls of their own."""

WARM_UP = 4
"""Iterations until no analysis runs any more and no plan is asked for."""

X = tf.ones([2, 2])
W = tf.ones([2, 2])


def by_name(codes: list[CodeType]) -> collections.Counter[str]:
    """How many calls there are of each function, by its file and name."""
    return collections.Counter(f"{Path(code.co_filename).name} {code.co_name}" for code in codes)


class Counting(amanda.Tool):
    """Runs a routine before each product of matrices, on one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.executed = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "MatMul":
            context.insert_before_op(self.count, inputs=[0])

    def count(self, *tensors: Any) -> None:
        self.executed += 1


class CountingBackward(Counting):
    """Runs a routine after each backward operator of a product of matrices."""

    def __init__(self) -> None:
        amanda.Tool.__init__(self)
        self.executed = 0
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().type == "MatMul":
            context.insert_after_backward_op(self.count)


class Looking(amanda.Tool):
    """Analyses all operators, and does nothing to them."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.executed = 0
        self.add_inst_for_op(lambda context: None, backward=backward)


class Timing(amanda.Tool):
    """Measures all operators, forward and backward, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.timer = amanda.inline.Timer()
        self.counter = amanda.inline.Counter()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    @property
    def executed(self) -> int:
        assert self.timer.executions == self.counter.count
        return self.counter.count

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.timer.start, inputs=[])
        context.insert_after_op(self.timer.stop, outputs=[])
        context.insert_after_op(self.counter, outputs=[])

    def analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.timer.start, grad_outputs=[])
        context.insert_after_backward_op(self.timer.stop, grad_inputs=[])
        context.insert_after_backward_op(self.counter, grad_inputs=[])


def forward(products: int) -> None:
    """An eager forward pass of so many products."""
    y = X
    for _ in range(products):
        y = tf.linalg.matmul(y, W)


def training(products: int) -> None:
    """An eager forward and backward pass of so many products."""
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = X
        for _ in range(products):
            y = tf.linalg.matmul(y, W)
    tape.gradient(y, X)


@tf.function
def compiled(x: Any) -> Any:
    return tf.linalg.matmul(x, W)


def calls_of_functions(calls: int) -> None:
    """So many calls of a graph function."""
    for _ in range(calls):
        compiled(X)


@functools.cache
def session_and_product() -> tuple[Any, Any]:
    """A session, and a product in its graph."""
    with tf.Graph().as_default() as graph:
        product = tf.linalg.matmul(tf.ones([2, 2]), tf.ones([2, 2]))
    return tf.compat.v1.Session(graph=graph), product


def runs_of_a_session(runs: int) -> None:
    """So many runs of a session."""
    session, product = session_and_product()
    for _ in range(runs):
        session.run(product)


def per_execution(
    make: Callable[[], Any], step: Callable[[int], None], routines: int
) -> tuple[float, str]:
    """The calls that one more operator of a step costs, and a list of them by function.

    Args:
        routines: how many routines run for one operator.
    """
    counts = []
    for size in (2, 6):
        tool = make()
        with amanda.apply(tool, drivers=DRIVERS):
            for _ in range(WARM_UP):
                step(size)
                amanda.new_iteration()
            before = tool.executed
            with called(SOURCES) as codes:
                step(size)
        assert tool.executed - before == routines * size
        counts.append(by_name(codes))
    more = {name: (n - counts[0][name]) / 4 for name, n in counts[1].items()}
    listed = "\n".join(f"{n:6.2f} {name}" for name, n in sorted(more.items(), key=lambda i: -i[1]))
    return sum(more.values()), listed


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], None], int, int]] = {
    "an eager operator, a routine": (Counting, forward, 1, 18),
    "an eager operator, no action": (lambda: Looking(False), forward, 0, 2),
    "forward and backward, a routine before the operator": (Counting, training, 1, 28),
    "forward and backward, a routine after the backward operator": (
        CountingBackward,
        training,
        1,
        30,
    ),
    "forward and backward, no action": (lambda: Looking(True), training, 0, 9),
    "an eager operator, a timer and a counter": (Timing, forward, 1, 3),
    "forward and backward, timers and counters": (Timing, training, 2, 11),
    "a graph function, a routine": (Counting, calls_of_functions, 1, 9),
    "a graph function, no action": (lambda: Looking(False), calls_of_functions, 0, 9),
    "a run of a session, a routine": (Counting, runs_of_a_session, 1, 25),
}
"""Tool, step, routines per operator, and the bound."""


@pytest.mark.parametrize("case", CASES)
def test_steady_state(case: str) -> None:
    """From the second iteration on, nothing is asked twice on the path of an operator."""
    make, step, routines, bound = CASES[case]
    found, listed = per_execution(make, step, routines)
    assert found <= bound, f"{case}: {found} calls, bound {bound}\n{listed}"


WEIGHT = tf.Variable(tf.ones([2, 2]))


def products_with_a_variable(products: int) -> None:
    """An eager forward pass of products with a variable, which the runtime reads in C."""
    y = X
    for _ in range(products):
        y = tf.linalg.matmul(y, WEIGHT)
    WEIGHT.read_value()


def test_a_variable_that_nobody_watches() -> None:
    """An operator that is passed a variable takes the fast path where nothing is done to it, nor to
    the reading of the variable; ids and plans of later readings stay as they are."""
    found, listed = per_execution(lambda: Looking(False), products_with_a_variable, 0)
    assert found <= 5, f"{found} calls\n{listed}"
    first, tools = list[str](), [amanda.Tool(), amanda.Tool()]
    tools[0].add_inst_for_op(lambda context: first.append(context.get_op_id()))
    later = list[str]()
    tools[1].add_inst_for_op(lambda context: later.append(context.get_op_id()))
    with amanda.apply(tools[0], drivers=DRIVERS):
        for _ in range(WARM_UP):
            products_with_a_variable(3)
            amanda.new_iteration()
        with amanda.apply(tools[1], drivers=DRIVERS):
            products_with_a_variable(3)
    assert "/ReadVariableOp:3" in first
    assert later == first


BIAS = tf.Variable(tf.ones([2]))


def biases(count: int) -> None:
    """So many additions of a variable that TensorFlow passes on to the runtime as it is."""
    y = X
    for _ in range(count):
        y = tf.nn.bias_add(y, BIAS)


def test_a_variable_under_timers() -> None:
    """An operator with counters and timers that is passed a variable stays on the fast path, beside
    the reading, which is an operator of its own."""
    found, listed = per_execution(Timing, biases, 2)
    assert "_forward" not in listed
    assert found <= 15, f"{found} calls\n{listed}"


def objects_of_a_function(tool: amanda.Tool, size: int) -> int:
    """The objects that the first run of a function of so many products, which is differentiated,
    leaves to the garbage collector."""

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(size):
                y = tf.linalg.matmul(y, tf.linalg.matmul(y, x))
        return tape.gradient(y, x)

    step.get_concrete_function(X)
    with amanda.apply(tool, drivers=DRIVERS):
        gc.collect()
        before = len(gc.get_objects())
        step(X)
        gc.collect()
        return len(gc.get_objects()) - before


@pytest.mark.parametrize(("tool", "bound"), [("count", 68), ("", 38)])
def test_a_new_operator_of_a_graph_is_few_objects(tool: str, bound: int) -> None:
    """What is kept of a product and its gradients is few objects for the garbage collector to
    visit: what operators have in common, such as shapes, exists once."""

    def made(size: int) -> int:
        return objects_of_a_function(amanda.tools.load(tool)() if tool else Looking(True), size)

    made(1)
    assert made(40) - made(20) <= bound * 40


class Replacing(amanda.Tool):
    """Replaces each exponential, so that its gradient is derived anew, and watches it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Exp":
            context.replace_op(amanda.traceable(lambda x: tf.exp(x)))
            context.insert_after_op(lambda *outputs: None)


def exponentials(size: int, x: Any) -> Any:
    """So many of them, one after the other."""
    for _ in range(size):
        x = tf.exp(x * 0.1)
    return x


def exponentials_and_a_loop(size: int, x: Any) -> Any:
    """The loop is one of TensorFlow 1, whose frames the graph has to be read for."""
    y = exponentials(size, x)
    return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), [0, y])[1]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many operators each list of a graph's operators has that is made meanwhile."""
    counts, vanilla = list[int](), tf.Graph.get_operations

    def get_operations(graph: Any) -> Any:
        found = vanilla(graph)
        counts.append(len(found))
        return found

    monkeypatch.setattr(tf.Graph, "get_operations", get_operations)
    tf.compat.v1.disable_control_flow_v2()
    yield counts
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.parametrize("build", [exponentials, exponentials_and_a_loop])
def test_a_graph_is_not_read_for_each_of_its_gradients(
    listed: list[int], build: Callable[[int, Any], Any]
) -> None:
    """Neither where gradients are noted nor where they are changed, so that the costs grow as the
    graph does."""

    def read(size: int) -> int:
        listed.clear()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant([0.5])
            gradient = tf.gradients(build(size, x), x)[0]
            with amanda.apply(Replacing(), drivers=DRIVERS):
                session.run(gradient)
        return sum(listed)

    read(1)
    assert read(32) < 3 * read(16)


def gradient_in_session(size: int) -> None:
    """The gradient of exponentials, which is in the graph."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant([0.5])
        session.run(tf.gradients(exponentials(size, x), x)[0])


def gradient_of_function(size: int) -> None:
    """The gradient of exponentials by a tape outside of their function."""
    x = tf.constant([0.5])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(functools.partial(exponentials, size), autograph=False)(x)
    tape.gradient(y, x)


@pytest.mark.parametrize("run", [gradient_in_session, gradient_of_function])
def test_a_derived_gradient_reads_the_operators_of_its_replacement(
    run: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all that depend on the replaced operator, so that the costs grow as the graph does."""
    with tf.Graph().as_default():
        kind = type(tf.constant(0.0))
    vanilla, count = kind.consumers, 0

    def consumers(tensor: Any) -> Any:
        nonlocal count
        count += 1
        return vanilla(tensor)

    monkeypatch.setattr(kind, "consumers", consumers)

    def asked(size: int) -> int:
        nonlocal count
        count = 0
        with amanda.apply(Replacing(), drivers=DRIVERS):
            run(size)
        return count

    asked(1)
    assert asked(32) < 3 * asked(16)


@pytest.mark.parametrize("name", ["count", "trace"])
def test_an_iteration_that_the_program_ends(name: str) -> None:
    """To end an iteration of code without layers takes few functions: the tool only notes its
    numbers at most of them."""
    with amanda.apply(amanda.tools.load(name)(), drivers=["tensorflow-eager"]):
        for _ in range(WARM_UP):
            tf.exp(X)
            amanda.new_iteration()
        tf.exp(X)
        with called(SOURCES) as codes:
            amanda.new_iteration()
    assert len(codes) <= 11, by_name(codes)
