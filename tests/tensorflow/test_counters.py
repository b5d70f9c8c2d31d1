"""Counters in graphs (``amanda.inline.Counter``): how often operators run, without Python."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.inline import Counter
from amanda_tensorflow.graphs.run_time_routines import PythonNode

tf1 = tf.compat.v1


class Counts(amanda.Tool):
    """Counts the executions of all operators, by the last part of their ids."""

    def __init__(self, is_inlined: bool = True, after: bool = False) -> None:
        super().__init__()
        self.counters: dict[str, Any] = collections.defaultdict(
            Counter if is_inlined else type("Plain", (Counter,), {})
        )
        self._after = after
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        counter = self.counters[context.get_backward_op_id() or context.get_op_id()]
        if context.is_forward():
            insert = context.insert_after_op if self._after else context.insert_before_op
        elif self._after:
            insert = context.insert_after_backward_op
        else:
            insert = context.insert_before_backward_op
        # Without tensors: the gradient of an operator that nobody needs would read the inputs
        # behind a node, and run it.
        insert(counter, [])

    @property
    def found(self) -> dict[str, int]:
        """The counts of the operators of functions."""
        return {k: c.count for k, c in self.counters.items() if not k.startswith("/")}


def with_dead_operators(x: Any) -> Any:
    tf.sin(x)
    y = tf.cos(x)
    tf.gradients(tf.exp(y), x)
    return y


def with_its_gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sin(x) * tf.cos(x)
    return tape.gradient(y, x)


def with_a_call(x: Any) -> Any:
    return tf.function(lambda a, b: (tf.sin(a), tf.cos(b)))(x, x * 2.0)[0]


def with_a_compiled_call(x: Any) -> Any:
    return tf.function(lambda a: tf.sin(a) * 2.0, jit_compile=True)(x) + 1.0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "program", [with_dead_operators, with_its_gradient, with_a_call, with_a_compiled_call]
)
def test_counters_agree_with_python_routines(program: Callable[..., Any], after: bool) -> None:
    """A counter in a function counts what a Python routine counts, operators that no result
    needs among them."""
    found = []
    for is_inlined in (True, False):
        function, tool = tf.function(program), Counts(is_inlined, after)
        with warnings.catch_warnings(), amanda.apply(tool):
            warnings.simplefilter("ignore", amanda.errors.CoverageWarning)
            function(tf.constant(0.5))
            function(tf.constant(0.5))
        found.append(tool.found)
    assert found[0] == found[1]
    assert set(found[0].values()) <= {0, 2}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_counters_in_loops_and_branches(after: bool, made: list[PythonNode]) -> None:
    """Counters in the condition and the body of a loop, and in branches, count each of their runs,
    by one Python node in each of these."""

    @tf.function
    def program(x: Any) -> Any:
        y = tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.sin(x)), (0, x))[1]
        return tf.cond(y > 0.0, lambda: tf.cos(y), lambda: tf.exp(y))

    tool = Counts(after=after)
    with amanda.apply(tool):
        program(tf.constant(0.5))
        program(tf.constant(-0.5))
    by_name = {name.rpartition("program/")[2]: n for name, n in tool.found.items()}
    expected = {"while/cond/while/Less": 8, "while/body/while/Sin": 6, "Greater": 2}
    expected |= {"cond/then_branch/cond/Cos": 1, "cond/else_branch/cond/Exp": 1}
    assert {name: by_name[name] for name in expected} == expected
    assert len(made) == 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PythonNode]:
    """The nodes that call Python of all graphs that are instrumented."""
    made: list[PythonNode] = []
    insert = PythonNode.insert

    def noted(node: PythonNode, *args: Any) -> Any:
        made.append(node)
        return insert(node, *args)

    monkeypatch.setattr(PythonNode, "insert", noted)
    return made


def fitted() -> None:
    """A fit of whole batches."""
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 5)), np.ones((8, 3)), batch_size=4, epochs=2, verbose=0)


def called() -> None:
    """A function with a gradient, called twice."""
    weight = tf.Variable(tf.ones([5, 3]))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(x @ weight))
        return tape.gradient(loss, weight)

    for _ in range(2):
        step(tf.ones([4, 5]))


def run_by_a_session() -> None:
    """The same in a graph that a session runs."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (4, 5))
        weight = tf1.get_variable("weight", initializer=tf.ones((5, 3)), use_resource=True)
        loss = tf.reduce_sum(tf.nn.relu(x @ weight))
        step = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
        initialize = tf1.global_variables_initializer()
    with tf1.Session(graph=graph) as session:
        session.run(initialize)
        for _ in range(2):
            session.run([loss, step], {x: np.ones((4, 5))})


@pytest.mark.parametrize(("program", "runs"), [(fitted, 4), (called, 2), (run_by_a_session, 2)])
@pytest.mark.parametrize("tool", ["count", "flops"])
def test_tools_that_count_need_no_nodes(
    tool: str, program: Callable[[], None], runs: int, made: list[PythonNode]
) -> None:
    """Without control flow, and with shapes that the graph tells, they call no Python in a graph,
    and count each run of an operator nevertheless: in a session, none of the gradient of the data,
    which TensorFlow 1 adds to the graph and its optimizer removes."""
    counting = amanda.tools.load(tool)()
    with amanda.apply(counting):
        program()
    products = {row["id"]: row["executions"] for row in counting.op_rows() if "MatMul" in row["id"]}
    assert made == []
    assert any("/grad/" in op_id for op_id in products)
    removed = {"graph/matmul/MatMul/grad/MatMul:0": 0} if program is run_by_a_session else {}
    assert products == {**dict.fromkeys(products, runs), **removed}


def test_flops_with_an_open_batch_need_one_node_for_each_product(made: list[PythonNode]) -> None:
    """Where the graph does not tell how many samples a run is given, one routine reads the shapes
    of a product, or of a gradient of it, one the samples, and one the bytes that an operator
    writes; the sums are those of each batch."""
    layers = [
        keras.layers.Conv2D(4, 3, use_bias=False),
        keras.layers.Conv2D(2, 3, use_bias=False),
        keras.layers.Flatten(),
        keras.layers.Dense(3, use_bias=False),
        keras.layers.Dense(3, use_bias=False),
    ]
    model = keras.Sequential([keras.Input((8, 8, 5)), *layers])
    model.compile("sgd", "mse")
    flops = amanda.tools.load("flops")()
    with amanda.apply(flops):
        # Batches of four, four and two.
        model.fit(np.ones((10, 8, 8, 5)), np.ones((10, 3)), batch_size=4, verbose=0)
    products = [6 * 6 * 9 * 5 * 4, 4 * 4 * 9 * 4 * 2, 4 * 4 * 2 * 3, 3 * 3]
    # The data has a gradient in the graph, too, which no run executes.
    found = [row["macs"] for row in flops.op_rows() if row["macs"]]
    assert sorted(found) == sorted(10 * macs for macs in [*products, *products, *products[1:]])
    open_ = [
        row["id"]
        for row in flops.op_rows()
        if row.get("activation_bytes") and any(None in spec["shape"] for spec in row["outputs"])
    ]
    assert len(made) == 3 * len(products) + 1 + len(open_)
    assert flops.summary()["batch"] == 4


def test_counters_keep_xla() -> None:
    """A function that XLA compiles stays compiled under counters."""
    function, tool = tf.function(lambda x: tf.sin(x) * 2.0, jit_compile=True), Counts()
    with warnings.catch_warnings(), amanda.apply(tool):
        warnings.simplefilter("error")
        function(tf.constant(0.5))
    assert set(tool.found.values()) == {1}


def test_counters_of_a_run_that_raises() -> None:
    """A run that raises is not counted, and the next one is."""

    @tf.function
    def program(x: Any) -> Any:
        tf.debugging.assert_positive(x)
        return tf.sin(x)

    tool = Counts()
    with amanda.apply(tool):
        with pytest.raises(tf.errors.InvalidArgumentError):
            program(tf.constant(-1.0))
        program(tf.constant(1.0))
    assert max(tool.found.values()) == 1


def test_counters_of_sessions() -> None:
    """A session's run counts the operators that its fetches need, given what is fed; not those
    that are only waited for, which the optimizer removes."""
    tool = Counts()
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, ())
        y = tf.sin(x)
        z = tf.cos(y)
        with tf.control_dependencies([tf.tan(z)]):
            last = tf.exp(x)
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(z, {y: 2.0})
        session.run(y, {x: 1.0})
        session.run([z, y, last], {x: 1.0})
    assert tool.found == {"graph/Cos": 2, "graph/Sin": 2, "graph/Tan": 0, "graph/Exp": 1}


def test_counters_beside_state_of_a_session() -> None:
    """Runs with iterators, which are instrumented in the user's session, are counted as well."""
    tool = Counts()
    with tf.Graph().as_default() as graph:
        numbers = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(9)).get_next()
        y = tf.sin(tf.cast(numbers, tf.float32))
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(y)
        session.run(y)
    assert tool.found["graph/Sin"] == 2


def test_counters_in_a_loop_of_tensorflow_1() -> None:
    """A counter in a loop of TensorFlow 1, where the graph does not tell how often, counts."""
    tool = Counts()
    with tf.Graph().as_default() as graph:
        tf1.disable_control_flow_v2()
        try:
            y = tf1.while_loop(lambda i: i < 4.0, lambda i: [tf.abs(i) + 1.0], [0.0])
        finally:
            tf1.enable_control_flow_v2()
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        assert session.run(y) == 4.0
    assert tool.found["graph/while/Abs"] == 4
