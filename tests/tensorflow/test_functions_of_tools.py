"""Functions and sessions that a tool's code runs, in the threads of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CapabilityError
from amanda_tensorflow import _internals
from amanda_tensorflow.graphs.evaluation import evaluate
from tests.running import run_python

tf1 = tf.compat.v1

_BEGINNING = """
import threading
import amanda
import keras
import numpy as np
import tensorflow as tf
from tests.running import in_threads

tf1 = tf.compat.v1
# The thread of a routine is the only one then.
tf.config.threading.set_inter_op_parallelism_threads(1)
scale = tf.Variable(2.0)
calls = []

def parallel(x):
    return tf.add_n([tf.tanh(x @ (x + float(i))) for i in range(6)])

def instrumented(work):
    def routine(*tensors):
        for tensor in tensors:
            if tensor.shape == (4, 4):
                calls.append(work(tensor))
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(routine))
    return amanda.apply(tool)

x = tf.ones((4, 4))
"""

_EACH = """
import sys
for number, program in enumerate(sys.argv[1:]):
    print("---" if number else "")
    calls.clear()
    exec(program, globals())
"""

_FUNCTIONS = """
@tf.function
def total(t):
    return tf.reduce_sum(t)

@tf.function
def loop(t):
    def added(sum):
        return tf.cond(sum > 1.0, lambda: sum + 1.0, lambda: sum + tf.reduce_max(t))
    return tf.while_loop(lambda sum: sum < 3.0, lambda sum: [added(sum) + 1.0], [0.0])[0]

@tf.function
def through_numpy(t):
    return tf.numpy_function(lambda a: np.float32(a.sum()), [t], tf.float32)

@tf.function
def product(t):
    return tf.reduce_sum(scale * t * t)

@tf.function
def inner_gradient(t):
    with tf.GradientTape() as tape:
        tape.watch(t)
        y = product(t)
    return tape.gradient(y, t)

@tf.function(jit_compile=True)
def compiled(t):
    return tf.reduce_sum(t * t)

def gradient(t):
    with tf.GradientTape() as tape:
        tape.watch(t)
        y = product(t)
    return tape.gradient(y, [t, scale])

network = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
network(x)
predicted = tf.function(network)

def predict(t):
    return network.predict(t, verbose=0)

def mapped(t):
    return tf.map_fn(tf.reduce_sum, t)

def rows(t):
    return tf.vectorized_map(tf.reduce_sum, t)

function = tf.function(parallel)
works = total, loop, through_numpy, inner_gradient, compiled, gradient, predict, mapped, rows
for work in works:
    with instrumented(work):
        function(x)
    print(work.__name__, len(calls))
"""

_THREADS = """
def run():
    for _ in range(5):
        function(x)
        parallel(x)

@tf.function
def total(t):
    return tf.reduce_sum(t)

function = tf.function(parallel)
with instrumented(total):
    in_threads(*[run] * 3)
print(len(calls))
"""

_SESSIONS = """
def graph_of(function):
    with tf.Graph().as_default() as graph:
        given = tf1.placeholder(tf.float32, (4, 4))
        result = function(given)
    config = tf1.ConfigProto(inter_op_parallelism_threads=1)
    return tf1.Session(graph=graph, config=config), given, result

other, taken, sum = graph_of(lambda t: tf.reduce_sum(t @ t))

def run_other(t):
    # With options of the program's own.
    metadata = tf1.RunMetadata()
    options = tf1.RunOptions(trace_level=tf1.RunOptions.SOFTWARE_TRACE)
    found = other.run(sum, {taken: np.ones((4, 4))}, options, metadata)
    assert metadata.step_stats.dev_stats
    return found

session, given, result = graph_of(parallel)
with instrumented(run_other):
    session.run(result, {given: x.numpy()})
print(set(calls))
"""

_BLOCKS = """
import time

function = tf.function(parallel)
function(x)
waiting = threading.Event()

def routine(*tensors):
    if not waiting.is_set():
        waiting.set()
        # The other thread is making a copy by then, and needs this tool for it.
        time.sleep(3)
        with amanda.disabled(), amanda.cache_disabled(), amanda.apply(amanda.Tool()):
            calls.append(1)
        tool.add_inst_for_op(lambda context: None)

def analyse(context):
    if tf.executing_eagerly():
        context.insert_before_op(routine)

def first():
    tf.exp(x)

def second():
    waiting.wait()
    function(x)

tool = amanda.Tool()
tool.add_inst_for_op(analyse)
with amanda.apply(tool):
    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(calls)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each program prints, one after the other in a process with one thread for routines."""
    programs = _FUNCTIONS, _THREADS, _SESSIONS, _BLOCKS
    run = run_python("-c", _BEGINNING + _EACH, *programs)
    assert run.returncode == 0, run.stderr
    names = "functions", "threads", "sessions", "blocks"
    return dict(zip(names, run.stdout.split("---"), strict=True))


def test_a_routine_calls_a_function_where_no_thread_is_left(printed: dict[str, str]) -> None:
    """A routine in a graph calls functions, also if it has the only thread that could run them."""
    lines = printed["functions"].split()
    assert lines[::2] == [
        *("total", "loop", "through_numpy", "inner_gradient", "compiled"),
        *("gradient", "predict", "mapped", "rows"),
    ]
    counts = list(map(int, lines[1::2]))
    assert counts == [counts[0] * (i + 1) for i in range(len(counts))]
    assert counts[0] > 0


def test_threads_whose_routines_call_functions_do_not_wait_for_each_other(
    printed: dict[str, str],
) -> None:
    """Routines of eager operators and of graphs in several threads call functions."""
    assert int(printed["threads"]) > 0


def test_a_routine_in_a_session_runs_another_session(printed: dict[str, str]) -> None:
    """A routine runs another session, which needs no thread of the pool that both share."""
    assert printed["sessions"].strip() in ("{64.0}", "{np.float32(64.0)}")


def test_a_routine_opens_blocks_while_another_thread_makes_a_copy(printed: dict[str, str]) -> None:
    """Scopes, switches and analyses that a routine adds do not wait for a thread that copies."""
    assert printed["blocks"].strip() == "[1]"


def _case(index: tf.Tensor) -> tf.Tensor:
    branches = [lambda: tf.constant(1.0), lambda: tf.constant(2.0), lambda: tf.constant(3.0)]
    return tf.switch_case(index, branches)


_STATE = tf.Variable(1.0)


def _in_order(x: tf.Tensor) -> list[tf.Tensor]:
    before = tf.identity(_STATE)
    _STATE.assign(before * x)
    after = _STATE + 0.0
    _STATE.assign(1.0)
    return [before, after]


def _collatz(n: tf.Tensor) -> tf.Tensor:
    steps = tf.constant(0)
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@tf.custom_gradient
def _clipped(x: tf.Tensor) -> Any:
    return x * 2.0, lambda dy: tf.clip_by_value(dy, -1.0, 1.0)


def _next(numbers: Any) -> tf.Tensor:
    iterator = iter(numbers)
    return next(iterator) + next(iterator)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (_case, [tf.constant(1)]),
        (_case, [tf.constant(7)]),
        (_case, [tf.constant(-1)]),
        (_collatz, [tf.constant(27)]),
        (_in_order, [tf.constant(3.0)]),
        (lambda x: tf.function(lambda y: [y, y + 1.0])(x)[1], [tf.ones(2)]),
        (lambda x: tf.cond(x[0] > 0.0, lambda: x, lambda: -x), [tf.constant([-2.0])]),
        (lambda x: [x, x, tf.constant("text")], [tf.ones(2)]),
        (lambda x: tf.scan(lambda a, b: a + b, x), [tf.range(4.0)]),
        (lambda x: tf.gradients(_clipped(x) * 3.0, x), [tf.constant(2.0)]),
        (lambda x: tf.ensure_shape(x, [None, 2]), [tf.ones((3, 2))]),
        (lambda: tf.random.stateless_normal((2, 2), (1, 2)), []),
        (_next, [tf.data.Dataset.range(5)]),
    ],
)
def test_an_evaluated_function_computes_what_the_runtime_does(
    function: Callable[..., Any], args: list[Any]
) -> None:
    """Operator by operator, a function has the results that it has in the runtime."""
    traced = tf.function(function)
    concrete = traced.get_concrete_function(*args)
    inputs = [*tf.nest.flatten(args, expand_composites=True), *concrete.captured_inputs]
    found = evaluate(_internals.graph_of(concrete), inputs)
    expected = tf.nest.flatten(traced(*args))
    assert found is not None
    for new, old in zip(found, expected, strict=True):
        np.testing.assert_array_equal(new.numpy(), old.numpy())
        assert (new.dtype, new.shape) == (old.dtype, old.shape)


@tf.function(jit_compile=True)
def _compiled(x: tf.Tensor) -> tf.Tensor:
    return x + 1.0


def _assigning(x: tf.Tensor) -> tf.Tensor:
    _STATE.assign(5.0)
    return _compiled(x)


def test_a_function_that_cannot_be_evaluated_has_run_nothing() -> None:
    """A function that calls one of XLA is left to the runtime before any operator has run."""
    concrete = tf.function(_assigning).get_concrete_function(tf.TensorSpec([]))
    _STATE.assign(1.0)
    inputs = [tf.constant(2.0), *concrete.captured_inputs]
    assert evaluate(_internals.graph_of(concrete), inputs) is None
    assert _STATE.numpy() == 1.0


def test_the_operator_of_a_replacement_keeps_its_shape_attributes() -> None:
    """A replacement at run time runs the operator that it replaces, whose attribute is a shape."""
    calls = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "EnsureShape":
            run = context.get_function()

            def replacement(x: Any) -> Any:
                calls.append(x.shape)
                return run(x) + 1.0

            context.replace_op(replacement)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    ensured = tf.function(lambda x: tf.ensure_shape(x, [None, 2]) * 2.0)
    with amanda.apply(tool):
        np.testing.assert_array_equal(ensured(tf.ones((1, 2))), [[4.0, 4.0]])
    assert calls == [(1, 2)]


def _replacing_by_itself(types: Sequence[str], traceable: bool) -> amanda.Tool:
    """A tool that replaces the operators of some types by their own functions."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type in types:
            run = context.get_function()

            def replacement(*inputs: Any) -> Any:
                return run(*inputs)

            context.replace_op(amanda.traceable(replacement) if traceable else replacement)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool


@pytest.mark.parametrize("traceable", [False, True])
def test_replacement_of_operators_without_outputs(traceable: bool) -> None:
    """An operator that returns nothing may be replaced by its own function, and what waits for
    it waits for the replacement."""
    state = tf.Variable(1.0)

    @tf.function
    def step(x: Any) -> Any:
        tf.debugging.assert_greater(x, 0.0)
        if x > 1.0:
            state.assign(x)
        for _ in tf.range(2):
            state.assign_add(x)
        return state + 0.0

    tool = _replacing_by_itself(["AssignVariableOp", "AssignAddVariableOp", "Assert"], traceable)
    with amanda.apply(tool):
        assert [step(tf.constant(x)).numpy() for x in (0.5, 2.0)] == [2.0, 6.0]
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.constant(-1.0))


def test_replacement_of_operators_without_outputs_in_a_session() -> None:
    """In a session, too, if it is traceable. Python, which does not reach a session's variables,
    and references to variables of TensorFlow 1 are refused, with a way out."""

    def run(use_resource: bool, traceable: bool) -> float:
        tool = _replacing_by_itself(
            ["AssignVariableOp", "AssignAddVariableOp", "AssignAdd"], traceable
        )
        with tf.Graph().as_default(), tf1.Session() as session:
            w = tf1.get_variable("w", initializer=2.0, use_resource=use_resource)
            step = tf1.assign_add(w, 1.0)
            with amanda.apply(tool):
                session.run(w.initializer)
                session.run(step)
                return float(session.run(w))

    assert run(use_resource=True, traceable=True) == 3.0
    with pytest.raises(CapabilityError, match=r"AssignVariableOp.*@amanda"):
        run(use_resource=True, traceable=False)
    with pytest.raises(CapabilityError, match="use_resource=True"):
        run(use_resource=False, traceable=True)


class Passing(amanda.Tool):
    """Hands all inputs and outputs on, by traceable routines that take part in differentiation."""

    differentiable = True

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.passed)
        context.insert_after_op(self.passed)

    @amanda.traceable
    def passed(self, *tensors: Any) -> Any:
        return tensors


def test_slices_pass_traceable_routines_that_are_differentiated() -> None:
    """A gradient that is an IndexedSlices stays one, with a tape outside of the function too."""
    table = tf.Variable(tf.reshape(tf.range(12.0), (4, 3)))
    gathered = tf.function(lambda ids: tf.gather(tf.convert_to_tensor(table), ids))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(gathered(tf.constant([1, 2, 1])) ** 2)
        return tape.gradient(loss, table)

    vanilla = gradient()
    with amanda.apply(Passing()):
        found = gradient()
    assert isinstance(found, tf.IndexedSlices)
    assert found.values.numpy().tolist() == vanilla.values.numpy().tolist()
    assert found.indices.numpy().tolist() == [1, 2, 1]
