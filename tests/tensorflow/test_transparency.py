"""Tools that change nothing leave results, graphs, files and registries as they are."""

from __future__ import annotations

import collections
import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.eager import context

import amanda
from amanda.cli.last_line import last_line
from amanda.errors import CoverageWarning
from amanda_tensorflow import _internals
from tests.identity import Identity
from tests.tensorflow import support
from tests.tensorflow.programs import placed
from tests.tensorflow.support import Counter, Session, Training, Watcher, tf1


class PlainSession(Session):
    """A session without graph optimizer."""

    def start(self, x: Any, weights: Any) -> None:
        super().start(x, weights)
        config = tf1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        self.session = tf1.Session(graph=self.graph, config=config)
        self.session.run([variable.initializer for variable in self.variables])


@pytest.mark.parametrize("placement", support.PLACEMENTS)
@pytest.mark.parametrize("second", [False, True])
def test_watching(placement: type[Training], second: bool) -> None:
    """Outputs, gradients and trained variables under a tool that only looks are bit-identical."""
    x, weights = support.data()
    vanilla = placement(support.network, x, weights, second)
    expected = [*vanilla.steps(2), *vanilla.steps(2)]
    watched = placement(support.network, x, weights, second)
    tool = Watcher()
    with amanda.apply(tool):
        actual = watched.steps(2)
    assert tool.seen
    support.assert_same_bits([*actual, *watched.steps(2)], expected)


@pytest.mark.usefixtures("without_optimizer")
@pytest.mark.parametrize(
    "placement", [support.Eager, support.TapeInside, support.TapeOutside, PlainSession]
)
@pytest.mark.parametrize("second", [False, True])
def test_identity_without_optimizer(placement: type[Training], second: bool) -> None:
    """With the graph optimizer off on both sides, identity routines at all points are too."""
    x, weights = support.data()
    expected = placement(support.network, x, weights, second).steps(2)
    training = placement(support.network, x, weights, second)
    tool = Identity()
    with amanda.apply(tool):
        support.assert_same_bits(training.steps(2), expected)
    assert tool.calls


def gated_loops(x: Any) -> Any:
    """A recurrent network whose state is read at several depths, in a loop within a loop."""
    kernels = [tf.constant(support.data(seed)[0][0, :4, :4, 0], tf.float32) for seed in range(3)]

    def gated(h: Any) -> Any:
        update, reset = tf.sigmoid(h @ kernels[0]), tf.sigmoid(h @ kernels[1]) * h
        return update * h + (1.0 - update) * tf.tanh(reset @ kernels[2])

    def inner(h: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, gated(h)), (0, h))[1]

    outer = lambda i, h: (i + 1, inner(h) + h * tf.tanh(h))  # noqa: E731
    return tf.while_loop(lambda i, h: i < 2, outer, (0, x))[1]


@pytest.mark.usefixtures("without_optimizer")
@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_the_order_in_which_gradients_are_added(placement: str) -> None:
    """Gradients that are derived anew add their parts in the order of the vanilla ones."""
    x = tf.constant(support.data(3)[0][0, :3, :4, 0], tf.float32)
    expected = placed(gated_loops, placement)(x)
    function = placed(gated_loops, placement)
    tool = Identity()
    with amanda.apply(tool):
        support.assert_same_bits(function(x), expected)
    assert tool.calls


def differentiated_within(x: Any) -> Any:
    """The gradient of one part of a function, within it, besides a loop."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        scaled = x * x[0]
    slope = tape.gradient(scaled, x, output_gradients=tf.sin(x))
    halved = tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h * 0.5 + x), (0, x))[1]
    return slope + halved * tf.tanh(x)


def looked_up(x: Any) -> Any:
    """Rows of a result that is read elsewhere, too, by a loop."""
    y = tf.sin(x)
    rows = tf.nn.embedding_lookup(y, range(23, -1, -1))
    halved = tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h * 0.5 + x), (0, rows))[1]
    return [halved / (tf.abs(y) + 1.0), y]


@pytest.mark.usefixtures("without_optimizer")
@pytest.mark.parametrize("program", [differentiated_within, looked_up])
@pytest.mark.parametrize("tool", [Counter, Identity])
def test_the_order_of_additions_is_not_mistaken(
    tool: type[amanda.Tool], program: Callable[[Any], Any]
) -> None:
    """The parts of a gradient are known from those of another one within the function, and those
    that are slices from gradients that were given."""
    x = tf.random.stateless_normal([24, 24], [1, 2])

    def gradient() -> Any:
        function = tf.function(program)
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
        return result, tape.gradient(result, x)

    expected = gradient()
    with amanda.apply(tool()):
        support.assert_same_bits(gradient(), expected)


def test_the_optimizer_rewrites_what_a_routine_looks_at() -> None:
    """A Python routine that returns nothing is beside the data path: ``log(1 + x)`` is still
    computed by ``log1p``, as in the vanilla graph."""
    x = tf.fill([64], 1e-9)

    @tf.function
    def logarithm(x: Any) -> Any:
        return tf.math.log(x + tf.ones([64]))

    expected = logarithm(x)
    assert float(expected[0]) == float(x[0])
    tool = Counter()
    with amanda.apply(tool):
        support.assert_same_bits(logarithm(x), expected)
    assert tool.forward["AddV2"] == tool.forward["Log"] == 1


class Looks(amanda.Tool):
    """Notes the ids of backward operators before and after they run, in routines that return
    nothing; on gradients of whole operators, too."""

    def __init__(self) -> None:
        super().__init__()
        self.analysed: list[str] = []
        self.order: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.noting(f"{context.get_op_id()}:0"))
        context.insert_after_backward_op(self.noting(f"{context.get_op_id()}:1"))

    def backward(self, context: amanda.OpContext) -> None:
        op_id = str(context.get_backward_op_id())
        self.analysed.append(op_id)
        context.insert_before_backward_op(self.noting(f"{op_id}:0"))
        context.insert_after_backward_op(self.noting(f"{op_id}:1"))

    def noting(self, what: str) -> Callable[..., None]:
        order = self.order

        def note(*tensors: Any) -> None:
            order.append(what)

        return note


REWRITES: dict[str, Callable[[Any, Any], Any]] = {
    "order of sums": lambda x, row: ((x + x[::-1]) + x[:, ::-1]) + x * 2.0,
    "broadcasts": lambda x, row: (x * row) * row[::-1],
    "constants": lambda x, row: (x * 3.1) * 1.7,
    "negations": lambda x, row: x[::-1] - (-x) + x[:, ::-1],
}


@pytest.mark.parametrize("rewrite", REWRITES)
def test_rewrites_that_a_look_at_a_sum_or_product_prevents(rewrite: str) -> None:
    """These are then computed as eager execution does, where vanilla runs differ in last bits. The
    last line says so; not under a tool that counts without Python."""
    random, function = np.random.RandomState(0), REWRITES[rewrite]
    x, row = (tf.Variable(random.randn(*shape).astype("float32")) for shape in ((64, 32), (32,)))
    vanilla, eager = tf.function(function)(x, row), function(x, row)
    look = lambda context: context.insert_after_op(lambda y: None)  # noqa: E731
    kinds = ("AddV2", "Sub", "Mul", "Neg")
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: look(c) if c.get_op().type in kinds else None)
    with amanda.apply(tool) as scope:
        watched = tf.function(function)(x, row)
    with amanda.apply(amanda.tools.load("count")()) as counting:
        tf.function(function)(x, row)
    assert [np.array_equal(found, eager) for found in (watched, vanilla)] == [True, False]
    assert "may round differently: 1" in last_line(scope.statistics, 1.0)
    assert not counting.statistics.compiled


def test_the_optimizers_rewrite_gradients_that_routines_look_at() -> None:
    """Python routines at backward operators that return nothing are beside the data path: oneDNN
    still computes the gradients of a kernel and a bias at once. Each is called, in order."""
    x = tf.random.stateless_normal([4, 8, 8, 3], [1, 2])
    weights = [
        tf.Variable(tf.random.stateless_normal(shape, [3, 4]))
        for shape in ([3, 3, 3, 8], [8], [3, 3, 8, 8], [8])
    ]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for kernel, bias in (weights[:2], weights[2:]):
                x = tf.tanh(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))
            loss = tf.reduce_mean(x)
        found = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.1 * gradient)
        return found

    before = [weight.numpy() for weight in weights]
    expected = step(x)
    for weight, value in zip(weights, before, strict=True):
        weight.assign(value)
    with amanda.apply(tool := Looks()):
        support.assert_same_bits(step(x), expected)
    place = {what: i for i, what in enumerate(tool.order)}
    assert len(place) == len(tool.order)
    # Of the first convolution nothing reads the gradient of the data: it is not computed.
    executed = [op_id for op_id in tool.analysed if f"{op_id}:0" in place]
    assert [op_id for op_id in tool.analysed if op_id not in executed] == [
        "step/Conv2D/grad/Conv2DBackpropInput:0"
    ]
    assert all(place[f"{op_id}:0"] < place[f"{op_id}:1"] for op_id in executed)
    tanh, inner = (op_id for op_id in executed if "TanhGrad" in op_id)
    assert place[f"{tanh}:1"] < place[f"{inner}:0"]


@pytest.mark.parametrize("placement", support.PLACEMENTS)
def test_identity_with_optimizer(placement: type[Training]) -> None:
    """With it on, they cost the fusion and nothing but rounding."""
    x, weights = support.data()
    expected = placement(support.network, x, weights).steps(2)
    with amanda.apply(Identity()):
        support.assert_close(placement(support.network, x, weights).steps(2), expected)


def test_the_graph_of_a_session() -> None:
    """The user's graph has the operators that it had, also where it is finalized."""
    x, weights = support.data()
    training = Session(support.network, x, weights)
    training.graph.finalize()
    before = training.graph.as_graph_def().SerializeToString(deterministic=True)
    with amanda.apply(Identity(), Counter()):
        training.steps(2)
        assert training.graph.as_graph_def().SerializeToString(deterministic=True) == before
    assert training.graph.finalized
    assert training.graph.as_graph_def().SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("traced", ["before", "inside"])
def test_the_graph_of_a_function(traced: str) -> None:
    """A function's graph is that of the vanilla function, whenever it is traced, and its
    vanilla calls run no routine."""
    x = tf.ones([2, 3])

    def model(x: Any) -> Any:
        return tf.nn.relu(x) * 2.0

    expected = tf.function(model).get_concrete_function(x).graph.as_graph_def()
    function = tf.function(model)
    tool = Counter()
    if traced == "before":
        function(x)
    with amanda.apply(tool):
        function(x)
        graph = function.get_concrete_function(x).graph
    assert function.experimental_get_tracing_count() == 1
    assert graph.as_graph_def().node == expected.node
    function(x)
    assert tool.forward["Relu"] == 1


def node_types(folder: Path) -> collections.Counter[str]:
    """How many nodes of each type a SavedModel has, in its graph and its functions."""
    model = saved_model_pb2.SavedModel()
    model.ParseFromString((folder / "saved_model.pb").read_bytes())
    graph = model.meta_graphs[0].graph_def
    lists = [graph.node, *(function.node_def for function in graph.library.function)]
    return collections.Counter(node.op for nodes in lists for node in nodes)


class Module(tf.Module):
    """A model that can be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.weight)


def test_saved_models(tmp_path: Path) -> None:
    """A SavedModel that is written inside of a scope has the nodes of one written outside."""
    tf.saved_model.save(Module(), tmp_path / "vanilla")
    module = Module()
    tool = Identity()
    with amanda.apply(tool):
        module(tf.ones([1, 2]))
        tf.saved_model.save(module, tmp_path / "applied")
    assert tool.calls
    assert node_types(tmp_path / "applied") == node_types(tmp_path / "vanilla")


def test_a_loaded_model(tmp_path: Path) -> None:
    """A function of a SavedModel is instrumented, whether it was loaded before or inside."""
    tf.saved_model.save(Module(), tmp_path / "model")
    before = tf.saved_model.load(tmp_path / "model")
    tool = Counter()
    x = tf.ones([1, 2])
    expected = before(x)
    with amanda.apply(tool):
        inside = tf.saved_model.load(tmp_path / "model")
        support.assert_same_bits([before(x), inside(x)], [expected, expected])
    before(x)
    assert tool.forward["MatMul"] == tool.forward["Relu"] == 2


def test_checkpoints(tmp_path: Path) -> None:
    """A checkpoint holds the variables of the model, with the values of the training."""
    x, weights = support.data()
    training = support.TapeInside(support.network, x, weights)
    with amanda.apply(Identity()):
        training.steps(1)
        checkpoint = tf.train.Checkpoint(
            filters=training.variables[0], kernel=training.variables[1]
        )
        path = checkpoint.write(str(tmp_path / "checkpoint"))
    names = {name for name, _ in tf.train.list_variables(path)}
    suffix = ".ATTRIBUTES/VARIABLE_VALUE"
    assert names == {f"{name}/{suffix}" for name in ("filters", "kernel")} | {
        "_CHECKPOINTABLE_OBJECT_GRAPH"
    }
    saved = tf.train.load_checkpoint(path).get_tensor(f"filters/{suffix}")
    support.assert_same_bits(saved, training.weights()[0])


def test_savers(tmp_path: Path) -> None:
    """A Saver of a session writes the trained values, and nothing else, inside of a scope."""
    x, weights = support.data()
    training = Session(support.network, x, weights)
    with training.graph.as_default(), amanda.apply(Identity()):
        training.steps(1)
        path = tf1.train.Saver().save(training.session, str(tmp_path / "model"))
    reader = tf.train.load_checkpoint(path)
    assert set(reader.get_variable_to_shape_map()) == {"w0", "w1"}
    support.assert_same_bits([reader.get_tensor("w0"), reader.get_tensor("w1")], training.weights())


def registries() -> tuple[int, int]:
    """The Python functions of graphs and the graph functions that the process knows."""
    gc.collect()
    # By type: isinstance() would run code of lazy objects.
    functions = [f for f in gc.get_objects() if issubclass(type(f), _internals.EagerFunc)]
    return len(functions), len(context.context().list_function_names())


@pytest.mark.parametrize("placement", support.PLACEMENTS)
def test_registries_do_not_grow(placement: type[Training]) -> None:
    """The functions that a scope registers are gone after it."""
    x, weights = support.data()
    training = placement(support.network, x, weights)
    training.step()
    before = registries()
    for _ in range(3):
        with amanda.apply(Identity()):
            training.step()
    # Routines of earlier tests may end meanwhile, so that fewer than before are no fault.
    assert all(now <= then for now, then in zip(registries(), before, strict=True))


def random_training() -> Callable[[], list[Any]]:
    """A function that draws random numbers in three ways."""
    generator = tf.random.Generator.from_seed(3)

    @tf.function
    def draw() -> Any:
        seeded = tf.random.stateless_uniform([4], seed=(1, 2))
        return generator.normal([4]), seeded, tf.nn.dropout(tf.ones([32]), 0.5)

    return lambda: [t.numpy() for t in [*draw(), tf.random.uniform([4]), generator.normal([2])]]


def test_random_numbers() -> None:
    """Random numbers in functions and outside of them are the same under a tool."""

    def drawn(*tools: amanda.Tool) -> list[Any]:
        tf.random.set_seed(5)
        draw = random_training()
        if not tools:
            return [draw(), draw()]
        with amanda.apply(*tools):
            return [draw(), draw()]

    support.assert_same_bits(drawn(Identity(), Watcher()), drawn())


@pytest.mark.parametrize("in_a_loop", [True, False])
def test_a_sequence_that_begins_anew_is_told(in_a_loop: bool) -> None:
    """A copy of a function that was there before draws its first numbers again, and says so; one
    that is traced in the scope draws what the function would have drawn."""

    def drawing() -> Any:
        def draw() -> Any:
            return tf.random.uniform([4], seed=3)

        if not in_a_loop:
            return tf.function(draw)
        body = lambda i, x: (i + 1, x + draw())  # noqa: E731
        first = 0, tf.zeros([4])
        return tf.function(lambda: tf.while_loop(lambda i, x: i < 2, body, first)[1])

    tf.random.set_seed(5)
    vanilla = drawing()
    numbers = [vanilla().numpy() for _ in range(2)]
    tf.random.set_seed(5)
    traced = drawing()
    with amanda.apply(Identity()):
        support.assert_same_bits([traced().numpy() for _ in range(2)], numbers)
    for older in vanilla, traced:
        with (
            pytest.warns(CoverageWarning, match="begins their sequence anew"),
            amanda.apply(Identity()),
        ):
            support.assert_same_bits([older().numpy()], numbers[:1])


def _wrong_calls() -> dict[str, Callable[[], Any]]:
    """Calls that TensorFlow refuses, of everything written in Python that the drivers replace."""
    x = tf.ones(2)
    session = tf1.Session(graph=tf.Graph())
    execute = _internals.EXECUTE
    attrs = "T", x.dtype.as_datatype_enum
    return {
        "no arguments": lambda: execute.execute(),
        "too few": lambda: execute.execute(b"AddV2", 1),
        "too many": lambda: execute.execute(b"AddV2", 1, [x, x], attrs, None, None, None),
        "unknown keyword": lambda: execute.execute(b"AddV2", 1, [x, x], attrs, None, names=""),
        "twice": lambda: execute.execute(b"AddV2", 1, [x, x], attrs, None, op_name=b"AddV2"),
        "no context": lambda: execute.execute(b"AddV2", 1, [x, x], attrs, None),
        "gradient": lambda: _internals.IMPERATIVE_GRAD.imperative_grad(),
        "gradient of nothing": lambda: _internals.IMPERATIVE_GRAD.imperative_grad(None),
        "record": lambda: _internals.RECORD.record_operation("AddV2"),
        "watch": lambda: tf.GradientTape().watch(),
        "watch two": lambda: tf.GradientTape().watch(x, x),
        "watch by another name": lambda: tf.GradientTape().watch(tensors=x),
        "partial run": lambda: session.partial_run_setup(),
        "gradient function": lambda: _internals.OPS.get_gradient_function(),
    }


@pytest.mark.parametrize("call", _wrong_calls())
def test_a_wrong_call_raises_the_error_of_tensorflow(call: str) -> None:
    """Arguments that do not fit are refused as they are without a tool, in the same words."""
    wrong = _wrong_calls()[call]
    with pytest.raises((TypeError, AttributeError)) as vanilla:
        wrong()
    assert "<locals>" not in str(vanilla.value)
    with amanda.apply(Identity()), pytest.raises(type(vanilla.value)) as instrumented:
        wrong()
    assert str(instrumented.value) == str(vanilla.value)


class _Wrong(tf.Module):
    """A module whose calls fail."""

    def __call__(self, x: Any) -> Any:
        return _fail(x)

    @tf.function
    def compiled(self, x: Any) -> Any:
        return _fail(x)

    @tf.Module.with_name_scope
    def scoped(self, x: Any) -> Any:
        return _fail(x)


def _fail(*_: Any) -> Any:
    raise ValueError("of the program")


@tf.custom_gradient
def _wrong_gradient(x: Any) -> Any:
    return tf.identity(x), _fail


def _differentiated(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = _wrong_gradient(x) @ x
    return tape.gradient(y, x)


def _failing_programs() -> dict[str, Callable[[], Any]]:
    """Programs whose own code fails, at everything that stays patched outside of scopes."""
    x, module = tf.ones((2, 2)), _Wrong()
    layer = keras.layers.Lambda(_fail, output_shape=lambda shape: shape)

    class Optimizer(keras.optimizers.SGD):
        update_step = _fail

    def step() -> None:
        Optimizer().apply([tf.ones(1)], [keras.Variable([1.0])])

    def define() -> None:
        class Parent:
            def __init_subclass__(cls) -> None:
                _fail()

        type("Child", (tf.Module, Parent), {})

    def wrong_shape() -> None:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x @ x
        tape.gradient(y, x, output_gradients=tf.ones(3))

    return {
        "function": lambda: tf.function(_fail)(x),
        "loop": lambda: tf.function(lambda: tf.while_loop(lambda x: True, _fail, [x]))(),
        "layer": lambda: layer(x),
        "layer in a function": lambda: tf.function(lambda: layer(x))(),
        "module": lambda: module(x),
        "module in a function": lambda: tf.function(lambda: module(x))(),
        "compiled": lambda: module.compiled(x),
        "scoped": lambda: tf.function(lambda: module.scoped(x))(),
        "gradient": lambda: _differentiated(x),
        "gradient in a function": lambda: tf.function(_differentiated)(x),
        "gradient of a wrong shape": wrong_shape,
        "optimizer": step,
        "class": define,
    }


@pytest.mark.parametrize("program", _failing_programs())
def test_outside_of_scopes_nothing_of_amanda_is_in_a_traceback(program: str) -> None:
    """What stays patched after the last scope does not show where the program fails."""
    fail = _failing_programs()[program]
    with amanda.apply(Identity()):
        tf.ones(2) + 1.0
    tf.debugging.disable_traceback_filtering()
    try:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as raised:
            fail()
    finally:
        tf.debugging.enable_traceback_filtering()
    text = "".join(traceback.format_exception(raised.value))
    assert [line for line in text.splitlines() if "amanda_tensorflow" in line] == []
