"""Entry and exit of Keras layers in functions and sessions, as in eager execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amanda
from amanda.inline import Counter
from amanda.interface.points import PointContext

layers, tf1 = keras.layers, tf.compat.v1
X = np.random.default_rng(0).random((4, 5, 8), dtype=np.float32)
SMALL = tf.ones((2, 8))


class Calls(amanda.Tool):
    """The calls of layers: ids, shapes of inputs and of outputs; entry and exit are paired."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []
        self.left: list[tuple[str, Any, Any, str]] = []
        self.open: list[str] = []
        self.add_inst_for_module(self.enter)
        self.add_inst_for_module(self.leave, exit=True)

    def enter(self, point: PointContext) -> None:
        assert point.outputs is None
        self.entered.append(point.id)
        self.open.append(point.id)

    def leave(self, point: PointContext) -> None:
        assert self.open.pop() == point.id
        outputs = None if point.outputs is None else shapes(point.outputs)
        kind = type(point.target).__name__
        self.left.append((point.id, shapes(point.inputs), outputs, kind))


def shapes(tensors: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def called(run: Callable[[], object]) -> Calls:
    with amanda.apply(tool := Calls()):
        run()
    assert tool.open == []
    return tool


def network() -> Any:
    """Loops, layers within layers, and layers without operators."""
    inputs = keras.Input((5, 8))
    x = layers.SimpleRNN(8, return_sequences=True, name="rnn")(inputs)
    x = layers.Dropout(0.5, name="drop")(x)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    inner = keras.Sequential([layers.Flatten(name="flat"), layers.Identity()], name="inner")
    return keras.Model(inputs, layers.Dense(3, name="head")(inner(x)), name="net")


class Looping(layers.Layer):  # type: ignore[misc]
    """Parts in a loop, and in the branches within it."""

    def __init__(self) -> None:
        super().__init__(name="looping")
        self.parts = [layers.Dense(8, name=name) for name in ("first", "yes", "no", "last")]

    def call(self, x: Any, limit: Any) -> Any:
        first, yes, no, last = self.parts

        def body(step: Any, x: Any) -> tuple[Any, Any]:
            x = first(x)
            return step + 1, tf.cond(step < limit, lambda: yes(x), lambda: no(x))

        return last(tf.while_loop(lambda step, x: step < 3, body, (0, x))[1])


def test_functions_call_the_layers_that_eager_execution_calls() -> None:
    """In a function and in predict, in the same order, with the same tensors; cells of an RNN as
    often as they run."""
    net = network()
    eager, function = called(lambda: net(tf.constant(X))), tf.function(lambda x: net(x))
    function(X)
    assert eager.entered.count("net/rnn/simple_rnn_cell") >= 5
    assert {"net/drop", "net/inner/flat"} <= set(eager.entered)
    for run in (lambda: function(X), lambda: net.predict(X, verbose=0)):
        tool = called(run)
        assert tool.entered == eager.entered
        assert [call[0] for call in tool.left] == [call[0] for call in eager.left]
        assert tool.left[-1] == eager.left[-1] == ("net", [(4, 5, 8)], [(4, 3)], "Functional")


def test_each_step_of_fit_enters_each_layer() -> None:
    """Once, however many steps one call runs; validation too; the backward pass enters none."""
    net = keras.Sequential([keras.Input((8,)), layers.Dense(3, name="head")], name="small")
    data = np.ones((4, 8)), np.ones((4, 3))

    def fit() -> None:
        net.fit(*data, 1, verbose=0, validation_data=data)

    for at_once in (1, 2):
        net.compile("sgd", "mse", steps_per_execution=at_once, jit_compile=False)
        assert called(fit).entered == ["small", "small/head"] * (4 + 4)


def test_layers_in_loops_and_branches() -> None:
    """They are entered as often as the body or branch runs, also of a function called again, and
    with a tape outside of it."""
    layer = Looping()
    function = tf.function(lambda x, limit: layer(x, limit))
    wanted = function(SMALL, tf.constant(2))

    def run() -> None:
        with tf.GradientTape() as tape:
            tape.watch(SMALL)
            found = function(SMALL, tf.constant(2))
        np.testing.assert_array_equal(found, wanted)
        assert tape.gradient(found, SMALL) is not None

    branches = [f"looping/{name}" for name in ("yes", "yes", "no")]
    steps = [entered for branch in branches for entered in ("looping/first", branch)]
    assert called(lambda: (run(), run())).entered == 2 * ["looping", *steps, "looping/last"]


def test_models_in_a_loop_of_the_program() -> None:
    """A model that a loop calls, outside of all layers, is entered in each pass, in order with the
    models before and behind the loop."""
    names = ("before", "inside", "behind")
    before, inside, behind = (layers.Dense(8, name=name) for name in names)

    @tf.function
    def function(x: Any) -> Any:
        x = before(x)
        for _ in tf.range(3):
            x = inside(x)
        return behind(x)

    function(SMALL)
    expected = ["before", *3 * ["inside"], "behind"]
    assert called(lambda: function(SMALL)).entered == expected


def test_nothing_runs_for_the_sake_of_a_mark() -> None:
    """A layer whose result nothing reads does not run, and is not entered; an operator of a layer
    that nothing reads does not run either."""

    class Wasteful(layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            tf.nn.softplus(x)
            return tf.nn.relu(x)

    counters = {kind: Counter() for kind in ("Softplus", "Relu")}
    tool = Calls()

    def analyse(context: amanda.OpContext) -> None:
        counter = counters.get(context.get_op().type)
        if counter is not None:
            context.insert_before_op(lambda x: counter(), inputs=[0])

    used, unused = Wasteful(name="used"), Wasteful(name="unused")
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, (2,))
        y = used(x)
        unused(x)
    tool.add_inst_for_op(analyse)
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(y, {x: [1.0, 2.0]})
    assert tool.entered == ["used"]
    assert (counters["Relu"].count, counters["Softplus"].count) == (1, 0)


def test_what_a_session_fetches_decides_which_layers_are_entered() -> None:
    """Runs of one graph that fetch other tensors enter other layers; feeds, training and tables of
    the session's own are as in a vanilla run."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (None, 8))
        net = keras.Sequential([layers.Dense(4, name="a"), layers.Dropout(0.5, name="b")], name="n")
        hidden = net.layers[0](x)
        y = net(x)
        loss = tf.reduce_sum((y + hidden) ** 2)
        variables = tf1.trainable_variables()
        train = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, None, variables)
        batch = tf1.data.make_one_shot_iterator(tf1.data.Dataset.from_tensors(SMALL.numpy()))
        drawn = net(batch.get_next())
        initialize = tf1.global_variables_initializer()
    feed = {x: np.ones((2, 8), np.float32)}
    with tf1.Session(graph=graph) as session:
        session.run(initialize)
        expected, start = session.run([y, hidden], feed), session.run(variables)
        with amanda.apply(tool := Calls()):
            found = session.run([y, hidden], feed)
            session.run(hidden, feed)
            session.run(train, feed)
        assert tool.open == []
        after = session.run(variables)
        for variable, value in zip(variables, start, strict=True):
            variable.load(value, session)
        session.run(train, feed)
        for one, other in zip(session.run(variables), after, strict=True):
            np.testing.assert_array_equal(one, other)
        inline = called(lambda: session.run(drawn))
    np.testing.assert_array_equal(found[0], expected[0])
    assert tool.entered == ["a", "n", "n/a", "n/b", "a", "a", "n", "n/a", "n/b"]
    assert tool.left[0] == ("a", [(2, 8)], [(2, 4)], "Dense")
    assert inline.entered == ["n", "n/a", "n/b"]


def test_building_a_model_in_a_graph_enters_no_layer() -> None:
    """Neither a run that initialises its variables, nor the calls that build a model of Keras."""
    with tf.Graph().as_default() as graph:
        inputs = keras.Input((8,))
        net = keras.Model(inputs, layers.Dense(2, name="d")(inputs), name="net")
        x = tf1.placeholder(tf.float32, (None, 8))
        y, initialize = net(x), tf1.global_variables_initializer()
    with tf1.Session(graph=graph) as session:
        assert called(lambda: session.run(initialize)).entered == []
        run = called(lambda: session.run(y, {x: np.ones((2, 8), np.float32)}))
    assert run.entered == ["net", "net/d"]


def test_operators_wait_for_the_entry_of_their_layer_where_an_analysis_reads_variables() -> None:
    """Also where the shadow has the variables, and runs to give one while a copy is being made."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (None, 8))
        y = keras.Sequential([layers.Dense(4, name="a"), layers.Dense(2, name="b")], name="n")(x)
        initialize = tf1.global_variables_initializer()
    options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    read = list[Any]()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "MatMul":
            read.append(context.get_value(1))
        context.insert_after_op(lambda *tensors: None)

    (tool := Calls()).add_inst_for_op(analyse)
    with tf1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(initialize)
        session.run(y, {x: np.ones((2, 8), np.float32)}, options, metadata)
    assert [value.shape for value in read] == [(8, 4), (4, 2)]
    nodes = [node for part in metadata.partition_graphs for node in part.node]
    reads = [node for node in nodes if node.op == "ReadVariableOp" and "amanda" not in node.name]
    assert len(reads) == 4
    for node in reads:
        assert any(name.startswith("^amanda/module/") for name in node.input), node


def test_layers_in_control_flow_of_tensorflow_1_are_not_told() -> None:
    """They run as they do without a tool, and others of the graph are entered."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (2, 8))
        inside, outside = (layers.Activation("relu", name=name) for name in ("inside", "outside"))
        tf1.disable_control_flow_v2()
        try:
            looped = tf1.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, inside(x) + 1), (0, x))
        finally:
            tf1.enable_control_flow_v2()
        y = outside(looped[1])
    with tf1.Session(graph=graph) as session:
        result = list[Any]()
        tool = called(lambda: result.append(session.run(y, {x: np.zeros((2, 8))})))
    assert tool.entered == ["outside"]
    np.testing.assert_array_equal(result[0], np.full((2, 8), 3.0))


def test_routines_that_are_added_later_take_effect() -> None:
    """A routine at modules that is added after the first run is called from the next one on."""
    net = layers.Dense(2, name="net")
    function = tf.function(lambda x: net(x))
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *tensors: None))
    with amanda.apply(tool):
        function(SMALL)
        tool.add_inst_for_module(lambda point: seen.append(point.id))
        function(SMALL)
        function(SMALL)
    assert seen == ["net", "net"]
