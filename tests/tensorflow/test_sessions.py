"""Sessions: state, resources, the ways to run, and v1's control flow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CoverageWarning
from amanda.interface.points import Point
from tests.identity import Identity
from tests.running import run_python
from tests.tensorflow import support
from tests.tensorflow.support import Counter, Watcher, tf1


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    """A graph that is the default one."""
    with tf.Graph().as_default() as graph:
        yield graph


@contextmanager
def applied(tool: amanda.Tool | None) -> Iterator[None]:
    """The scope of a tool, or none."""
    if tool is None:
        yield
    else:
        with amanda.apply(tool):
            yield


def started() -> Any:
    """A session of the default graph with its variables initialised."""
    session = tf1.Session()
    session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])
    return session


class AfterExp(amanda.Tool):
    """Has a routine after each exponential, which returns what `change` gives, or nothing."""

    def __init__(self, change: Callable[[Any], Any] = lambda y: None, **which: Any) -> None:
        super().__init__()
        self.executed = 0
        self.change = change
        self.which = which
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Exp":
            is_traced = hasattr(self.change, "amanda_traceable")
            routine = self.change if is_traced else self.routine
            context.insert_after_op(routine, **self.which)

    def routine(self, *outputs: Any) -> Any:
        self.executed += 1
        return self.change(*outputs) if outputs else None


def of_exp(stateful: bool = False) -> tuple[Any, Any, Any]:
    """A placeholder, its exponential and the gradient of a sum of these, which reads them."""
    x = tf1.placeholder(tf.float32, [2])
    scale: Any = 3.0
    if stateful:
        scale = tf1.data.make_one_shot_iterator(
            tf.data.Dataset.from_tensors(3.0).repeat()
        ).get_next()
    exponential = tf.exp(x)
    return x, exponential, tf1.gradients(exponential * scale, x)[0]


@pytest.mark.parametrize("which", [{}, {"outputs": []}])
def test_routines_run_where_only_the_gradient_reads_an_output(which: dict[str, Any]) -> None:
    """A routine after an operator runs as often as that, also if its gradient alone reads it."""
    x, _, gradient = of_exp()
    second = tf1.gradients(gradient, x)[0]
    with tf1.Session() as session:
        expected = session.run([gradient, second], {x: [0.5, 1.0]})
        for fetched, value in zip((gradient, second), expected, strict=True):
            with amanda.apply(tool := AfterExp(**which)):
                found = session.run(fetched, {x: [0.5, 1.0]})
            support.assert_same_bits([found], [value])
            assert tool.executed == 1


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    ("change", "which"),
    [
        (lambda y: None, {}),
        (lambda y: None, {"outputs": []}),
        (lambda y: y + 1.0, {}),
        (amanda.traceable(lambda y: y + 1.0), {}),
    ],
)
def test_gradients_read_what_is_fed(stateful: bool, change: Any, which: dict[str, Any]) -> None:
    """Where an output is fed, its gradient reads that, and no routine after the operator runs."""
    x, exponential, gradient = of_exp(stateful)
    feeds = {x: [0.5, 1.0], exponential: [5.0, 7.0]}
    with tf1.Session() as session:
        with amanda.apply(tool := AfterExp(change, **which)):
            for factor in (1.0, 2.0):
                feeds[exponential] = [5.0 * factor, 7.0 * factor]
                found = session.run(gradient, feeds)
                support.assert_same_bits([found], [np.float32([15.0, 21.0]) * np.float32(factor)])
        assert tool.executed == 0


# -- state --------------------------------------------------------------------


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("optimizer", ["Adam", "Momentum", "GradientDescent"])
def test_training_across_scopes(use_resource: bool, optimizer: str) -> None:
    """Training that enters and leaves scopes is one training: variables and slots go on."""
    w = tf1.get_variable("w", initializer=[1.0, 2.0, 3.0], use_resource=use_resource)
    loss = tf.reduce_sum(tf.square(w * [1.0, 0.5, 0.25] - 1.0))
    arguments = {"Momentum": (0.1, 0.9)}.get(optimizer, (0.1,))
    step = getattr(tf1.train, f"{optimizer}Optimizer")(*arguments).minimize(loss)

    def trained(*tools: amanda.Tool | None) -> list[Any]:
        session, seen = started(), []
        for tool in tools:
            with applied(tool):
                session.run(step)
                session.run(step)
                seen.append(session.run(w))
            seen.append(session.run([w, loss]))
        return seen

    expected = trained(None, None, None, None)
    support.assert_same_bits(trained(None, Watcher(), None, Watcher()), expected)
    support.assert_same_bits(trained(Watcher(), Watcher(), None, None), expected)


def test_initialisation_inside_of_the_scope() -> None:
    """Variables that are initialised and assigned under a tool keep their values."""
    w = tf1.get_variable("w", initializer=[1.0, 2.0])
    doubled = tf1.assign(w, w * 2.0)
    session = tf1.Session()
    with amanda.apply(Counter()):
        session.run(tf1.global_variables_initializer())
        session.run(doubled)
    assert session.run(w).tolist() == [2.0, 4.0]
    with pytest.raises(tf.errors.FailedPreconditionError), amanda.apply(Counter()):
        tf1.Session().run(w)


def test_variables_made_inside_of_the_scope() -> None:
    """The graph may grow between two runs of a scope."""
    x = tf.constant([1.0, -1.0])
    session = tf1.Session()
    tool = Counter(["Relu", "Mul"])
    with amanda.apply(tool):
        y = tf.nn.relu(x)
        session.run(y)
        w = tf1.get_variable("w", initializer=[3.0, 3.0])
        z = y * w
        session.run(w.initializer)
        assert session.run(z).tolist() == [3.0, 0.0]
    assert tool.forward == {"Relu": 2, "Mul": 1}
    assert session.run(z).tolist() == [3.0, 0.0]


def test_two_sessions() -> None:
    """Each session has the state of its own."""
    w = tf1.get_variable("w", initializer=0.0)
    step = tf1.assign_add(w, 1.0)
    one, two = started(), started()
    with amanda.apply(Watcher()):
        one.run(step)
        one.run(step)
        two.run(step)
        assert (one.run(w), two.run(w)) == (2.0, 1.0)
    assert (one.run(w), two.run(w)) == (2.0, 1.0)


def test_a_saver_restores_inside_of_the_scope(tmp_path: Any) -> None:
    """Values that a Saver restores under a tool are there under the tool and after it."""
    w = tf1.get_variable("w", initializer=[1.0, 2.0])
    saver = tf1.train.Saver()
    session = started()
    path = saver.save(session, str(tmp_path / "model"))
    session.run(tf1.assign(w, [0.0, 0.0]))
    with amanda.apply(Counter()):
        session.run(w)
        saver.restore(session, path)
        assert session.run(w).tolist() == [1.0, 2.0]
    assert session.run(w).tolist() == [1.0, 2.0]


def dropped(h: Any) -> Any:
    return tf1.nn.dropout(h, rate=0.5)


def dropped_in_a_branch(h: Any) -> Any:
    return tf1.cond(tf.reduce_sum(h) > -1.0, lambda: tf1.nn.dropout(h, rate=0.5), lambda: h)


def chosen_by_value(h: Any) -> Any:
    return h * tf.cast(tf.random.categorical(h, 3), tf.float32) + tf.random.gamma([], h + 1.0)


def drawn_after(h: Any) -> Any:
    with tf.control_dependencies([tf1.assign_add(tf1.get_variable("steps", ()), 1.0)]):
        return h * tf.random.uniform([3])


def drawn_in_a_loop(h: Any) -> Any:
    shape = tf.constant([3])
    body = lambda i, h: (i + 1, h * tf.random.uniform(shape))  # noqa: E731
    return tf1.while_loop(lambda i, h: i < 2, body, [0, h])[1]


@pytest.mark.filterwarnings("ignore:a run of graph runs vanilla")
@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize(
    "noise", [dropped, dropped_in_a_branch, chosen_by_value, drawn_after, drawn_in_a_loop]
)
def test_runs_share_random_generators(noise: Callable[[Any], Any], use_resource: bool) -> None:
    """All runs of a session draw from the same generators, whatever they fetch, in and outside of
    scopes: a program trains as without a tool."""
    tf1.set_random_seed(3)
    tf1.disable_control_flow_v2()
    try:
        x = tf1.placeholder(tf.float32, (None, 3))
        w = tf1.get_variable("w", (3, 3), use_resource=use_resource)
        loss = tf.reduce_sum(noise(tf.nn.relu(x @ w)) ** 2)
        step = tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    finally:
        tf1.enable_control_flow_v2()
    batch = {x: [[0.5, 1.0, 2.0], [1.0, 0.5, 0.25]]}

    def trained(*scopes: amanda.Tool | None) -> list[Any]:
        session, seen = started(), []
        for scope in scopes:
            with applied(scope):
                seen += [session.run(loss, batch), session.run(step, batch)]
                seen += [session.run(loss, batch), session.run(w)]
        return [value for value in seen if value is not None]

    # What the optimizer of graphs fuses in one of the two is equal but for rounding.
    for one, other in zip(
        trained(None, Identity(), None, Watcher()), trained(*[None] * 4), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def drawn_in_a_body(h: Any) -> Any:
    # In parallel, the iterations draw in any order, with vanilla TensorFlow (2.21), too.
    body = lambda i, h: (i + 1, h * tf.random.uniform([3], seed=5))  # noqa: E731
    return tf.while_loop(lambda i, h: i < 2, body, [0, h], parallel_iterations=1)[1]


def drawn_in_a_body_of_a_function(h: Any) -> Any:
    return tf.function(drawn_in_a_body)(h)


def drawn_in_a_function_in_a_branch(h: Any) -> Any:
    draw = tf.function(lambda h: h * tf.random.uniform([3], seed=5))
    return tf.cond(tf.reduce_sum(h) > -1.0, lambda: draw(h), lambda: h)


def drawn_in_a_case(h: Any) -> Any:
    return tf.switch_case(tf.size(h) - 3, [lambda: h * tf.random.uniform([3], seed=5)])


def between_runs(noise: Callable[[Any], Any], tool: amanda.Tool | None) -> list[Any]:
    """What a session draws before a scope, in it, and after it."""
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, (3,))
        y = noise(x)
        session, seen = tf1.Session(), []
        for scope in None, tool, None:
            with applied(scope):
                seen += [session.run(y, {x: [1.0, 2.0, 3.0]}) for _ in range(2)]
    return seen


@pytest.mark.parametrize(
    "noise",
    [
        drawn_in_a_body,
        drawn_in_a_body_of_a_function,
        drawn_in_a_function_in_a_branch,
        drawn_in_a_case,
    ],
)
def test_runs_with_seeded_numbers_in_loops_and_branches_are_vanilla(
    noise: Callable[[Any], Any],
) -> None:
    """Loops and branches draw what they would draw without a tool, and a warning tells why no
    tool sees the run; none is given where no tool has anything to do."""
    wanted = between_runs(noise, None)
    with pytest.warns(CoverageWarning, match="draws random numbers by a seed in a loop or branch"):
        support.assert_same_bits(between_runs(noise, Identity()), wanted)
    support.assert_same_bits(between_runs(noise, amanda.Tool()), wanted)


def test_runs_with_seeded_numbers_in_called_functions_are_vanilla() -> None:
    """They draw what they would draw without a tool."""

    def noise(h: Any) -> Any:
        draw = tf.function(lambda h: h * tf.random.uniform([3], seed=5))
        return tf.nn.relu(draw(h)) + 1.0

    wanted = between_runs(noise, None)
    with pytest.warns(CoverageWarning, match="by a seed in a function that the graph calls"):
        support.assert_same_bits(between_runs(noise, Identity()), wanted)


# -- resources ----------------------------------------------------------------


def test_tables() -> None:
    """A lookup table keeps what it holds."""
    initializer = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2])
    table = tf.lookup.StaticHashTable(initializer, -1)
    key = tf1.placeholder(tf.string, [None])
    found = tf.nn.relu(table.lookup(key))
    session = started()
    tool = Counter(["Relu"])
    with amanda.apply(tool):
        assert session.run(found, {key: ["b", "a", "c"]}).tolist() == [2, 1, 0]
    assert session.run(found, {key: ["b"]}).tolist() == [2]
    assert tool.forward["Relu"] == 1


@pytest.mark.parametrize("kind", ["one shot", "initializable"])
def test_iterators(kind: str) -> None:
    """An iterator goes on where it was, into the scope and out of it."""
    dataset = tf1.data.Dataset.range(10)
    if kind == "one shot":
        iterator = tf1.data.make_one_shot_iterator(dataset)
    else:
        iterator = tf1.data.make_initializable_iterator(dataset)
    square = tf.square(iterator.get_next())
    session = tf1.Session()
    if kind != "one shot":
        session.run(iterator.initializer)
    seen = [session.run(square)]
    tool = Counter(["Square"])
    with amanda.apply(tool):
        seen += [session.run(square), session.run(square)]
    seen.append(session.run(square))
    assert seen == [0, 1, 4, 9]
    assert tool.forward["Square"] == 2


@pytest.mark.parametrize("tool", [None, Identity])
def test_iterators_by_handle(tool: Any) -> None:
    """A run may be given the iterator that it reads from by its handle, and goes on there; what a
    tool does in it is done."""
    dataset = tf1.data.Dataset.range(1, 7)
    handle = tf1.placeholder(tf.string, [])
    kinds = tf1.data.get_output_types(dataset), tf1.data.get_output_shapes(dataset)
    number = tf1.data.Iterator.from_string_handle(handle, *kinds).get_next()
    weight = tf1.get_variable("w", initializer=2.0, use_resource=True)
    product = tf.cast(number, tf.float32) * weight
    step = weight.assign_add(tf.gradients(product, weight)[0])
    first, second = (tf1.data.make_initializable_iterator(dataset) for _ in range(2))
    session = started()
    session.run([first.initializer, second.initializer])
    handles = session.run([first.string_handle(), second.string_handle()])
    seen = []
    with applied(used := None if tool is None else tool()):
        for turn in (0, 1, 0, 0):
            seen.append(session.run(product, {handle: handles[turn]}))
            session.run(step, {handle: handles[turn]})
    seen.append(session.run(product, {handle: handles[1]}))
    assert seen == [2.0, 4.0, 18.0, 50.0, 48.0]
    assert used is None or used.calls > 0


@pytest.mark.parametrize("tool", [None, Identity])
def test_values_that_the_session_keeps(tool: Any) -> None:
    """Handles of a session are handles there: fed as they are, or to an operator that takes one.
    A run that makes one is vanilla, with a warning."""
    x = tf1.placeholder(tf.float32, [2])
    weight = tf1.get_variable("w", initializer=[2.0, 3.0], use_resource=True)
    product = x * weight
    step, keep = weight.assign_add(product), tf1.get_session_handle(product)
    session = started()
    with applied(used := None if tool is None else tool()):
        session.run(step, {x: [1.0, 2.0]})
        if tool is None:
            kept = session.run(keep, {x: [1.0, 1.0]})
        else:
            with pytest.warns(CoverageWarning, match="state of the session"):
                kept = session.run(keep, {x: [1.0, 1.0]})
        holder, value = tf1.get_session_tensor(kept.handle, tf.float32)
        total = value * weight + 1.0
        seen = [
            session.run(product, {x: [1.0, 0.5]}),
            session.run(product, {x: kept}),
            session.run(total, {holder: kept.handle}),
        ]
        calls = used and used.calls
        session.run(product, {x: kept})
        assert used is None or used.calls > calls
    np.testing.assert_array_equal(seen, [[4.0, 4.5], [16.0, 81.0], [17.0, 82.0]])


@pytest.mark.parametrize("tool", [None, Identity])
@pytest.mark.parametrize("name", ["area", ""])
def test_staging_areas(name: str, tool: Any) -> None:
    """What one run has staged another one gets, into the scope and out of it; an area that only the
    name of its operators identifies is left to vanilla runs."""
    weight = tf1.get_variable("w", initializer=2.0, use_resource=True)
    put = tf.raw_ops.Stage(values=[weight * 3.0], shared_name=name, name="stage")
    if name:
        (got,) = tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name=name)
        size = tf.raw_ops.StageSize(dtypes=[tf.float32], shared_name=name)
    else:
        (got,) = size, *_ = [tf.raw_ops.StageSize(dtypes=[tf.float32], shared_name="stage")]
    session, seen = started(), []
    session.run(put)
    with applied(None if tool is None else tool()), warnings.catch_warnings():
        warnings.simplefilter("error" if name else "ignore", CoverageWarning)
        session.run(put)
        seen += [session.run(size), session.run(got * 2), session.run(size)]
    seen += [session.run(got), session.run(size)]
    assert seen == ([2, 12.0, 1, 6.0, 0] if name else [2, 4, 2, 2, 2])


def test_queues() -> None:
    """A queue is filled and emptied across scopes."""
    queue = tf1.FIFOQueue(10, [tf.float32], [[]])
    put, got = queue.enqueue([2.0]), tf.square(queue.dequeue())
    session = tf1.Session()
    session.run(put)
    tool = Counter(["Square"])
    with amanda.apply(tool):
        session.run(put)
        assert session.run(got) == 4.0
    assert session.run(got) == 4.0
    assert tool.forward["Square"] == 1


def test_runs_that_fill_queues_are_no_passes() -> None:
    """What queue runners run in their threads prepares data: steps are the runs that train."""
    queue = tf1.FIFOQueue(10, [tf.float32], [[]])
    put, w = queue.enqueue([tf.sqrt(4.0)]), tf1.get_variable("w", initializer=1.0)
    train = tf1.train.GradientDescentOptimizer(0.1).minimize((w * queue.dequeue()) ** 2)
    session, points = started(), list[Point]()
    tool = amanda.Tool()
    tool.add_inst_for_pass(lambda context: points.append(context.point), end=True)
    tool.add_inst_for_iteration(lambda context: points.append(context.point), end=True)
    with amanda.apply(tool) as scope:
        for _ in range(3):
            session.run([put])
            session.run(tf.group(put, put))
            session.run(train)
        session.run(queue.close())
    assert points == [Point.FORWARD_END, Point.ITERATION_END] * 3
    assert scope.statistics.steps == 3


def test_variables_that_are_added_later_have_names() -> None:
    """A trainable variable that is added to a graph between two analyses is a parameter, too, and
    a frozen one is none."""
    found = list[str | None]()
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: found.append(c.get_parameter_name(1)) if c.get_op().type == "Mul" else None
    )
    with amanda.apply(tool):
        for name, trains in (("one", True), ("two", False), ("three", True)):
            w = tf1.get_variable(name, initializer=2.0, trainable=trains, use_resource=True)
            assert started().run(tf.sqrt(4.0) * w) == 4.0
    assert found == ["one", None, "three"]


# -- the ways to run ------------------------------------------------------------


def test_fetches_of_all_kinds() -> None:
    """Structures, names, sparse tensors, operations and fed tensors are as without a tool."""
    x = tf1.placeholder(tf.float32, [2], name="x")
    y = tf.nn.relu(x, name="y")
    sparse = tf.SparseTensor([[0, 0], [1, 1]], y, [2, 2])
    fetches = {"y": y, "list": [y, (y * 2.0,)], "name": "y:0", "sparse": sparse, "op": y.op}
    session = tf1.Session()
    expected = session.run(fetches, {"x:0": [1.0, -1.0]})
    tool = Counter(["Relu"])
    with amanda.apply(tool):
        actual = session.run(fetches, {"x:0": [1.0, -1.0]})
        assert session.run(y * 3.0, {y: [5.0, 5.0]}).tolist() == [15.0, 15.0]
    assert actual.keys() == expected.keys()
    assert actual["op"] is None
    support.assert_same_bits(tf.nest.flatten(actual["sparse"]), tf.nest.flatten(expected["sparse"]))
    support.assert_same_bits([actual["y"], actual["list"]], [expected["y"], expected["list"]])
    assert tool.forward["Relu"] == 1


@pytest.mark.parametrize("point", ["before", "after"])
def test_fed_tensors_beside_routines_without_tensors(point: str) -> None:
    """A tensor of the graph may be fed under routines that take no tensors: the operators that it
    is computed by do not run, nor do the routines around them."""
    runs: list[str] = []

    class Untaken(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            kind = context.get_op().type
            if point == "before":
                context.insert_before_op(lambda: runs.append(kind), [])
            else:
                context.insert_after_op(lambda: runs.append(kind), [])

    x = tf1.placeholder(tf.float32, [2])
    y = tf.nn.relu(x)
    z = tf.tanh(y)
    total = tf.reduce_sum(z)
    with tf1.Session() as session, amanda.apply(Untaken()):
        assert session.run(total, {y: [0.0, 0.0]}) == 0.0
        assert session.run(total, {z: [5.0, 5.0]}) == 10.0
        assert session.run(total, {x: [-1.0, -1.0]}) == 0.0
    assert runs == ["Tanh", "Sum", "Sum", "Relu", "Tanh", "Sum"]


@pytest.mark.parametrize("feeds", [True, False])
@pytest.mark.parametrize("made", ["before", "inside"])
def test_callables(feeds: bool, made: str) -> None:
    """A callable of a session is instrumented inside of the scope and vanilla outside."""
    x = tf1.placeholder_with_default([1.0, -1.0], [2])
    y = tf.nn.relu(x)
    session = tf1.Session()

    def make() -> Callable[[], Any]:
        if feeds:
            function = session.make_callable(y, [x])
            return lambda: function([1.0, -1.0])
        return session.make_callable(y)

    early = make()
    tool = Counter(["Relu"])
    with amanda.apply(tool):
        run = early if made == "before" else make()
        assert run().tolist() == [1.0, 0.0]
        assert run().tolist() == [1.0, 0.0]
    assert tool.forward["Relu"] == 2
    assert run().tolist() == [1.0, 0.0]
    assert tool.forward["Relu"] == 2


def test_default_sessions() -> None:
    """``eval`` and ``Operation.run`` go the same way."""
    w = tf1.get_variable("w", initializer=[1.0, -1.0])
    y = tf.nn.relu(w)
    tool = Counter(["Relu"])
    with tf1.Session().as_default(), amanda.apply(tool):
        w.initializer.run()
        assert y.eval().tolist() == [1.0, 0.0]
        y.op.run()
    assert tool.forward["Relu"] == 2


def test_monitored_sessions() -> None:
    """A MonitoredSession with its hooks, whose graph is finalized."""
    step = tf1.train.create_global_step()
    w = tf1.get_variable("w", initializer=1.0)
    loss = tf.square(w)
    train = tf1.train.GradientDescentOptimizer(0.25).minimize(loss, step)
    tool = Counter(["Square"])
    seen = []
    hooks = [tf1.train.StopAtStepHook(last_step=4)]
    with tf1.train.MonitoredSession(hooks=hooks) as session:
        session.run(train)
        with amanda.apply(tool):
            session.run(train)
            seen.append(session.run([step, w]))
        while not session.should_stop():
            session.run(train)
            seen.append(session.run([step, w]) if not session.should_stop() else None)
    assert seen == [[2, 0.25], [3, 0.125], None]
    # Neither step changes whether the loss itself is computed: only its gradient is.
    assert tool.forward["Square"] in (0, 1)


def test_run_metadata() -> None:
    """Options and metadata reach TensorFlow."""
    y = tf.nn.relu(tf.constant([1.0, -1.0]))
    metadata = tf1.RunMetadata()
    with amanda.apply(Counter()):
        options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
        tf1.Session().run(y, options=options, run_metadata=metadata)
    assert metadata.step_stats.dev_stats


def test_errors_of_the_user() -> None:
    """A run that fails without a tool fails with one, in the same way, and leaves no trace."""
    x = tf1.placeholder(tf.float32, [None])
    y = tf.nn.relu(tf1.check_numerics(x, "my message"))
    session = tf1.Session()
    with amanda.apply(Counter()) as scope:
        with pytest.raises(tf.errors.InvalidArgumentError, match="my message"):
            session.run(y, {x: [np.inf]})
        with pytest.raises(tf.errors.InvalidArgumentError, match="feed a value"):
            session.run(y)
        assert session.run(y, {x: [2.0]}).tolist() == [2.0]
    assert scope.statistics.not_seen == {"operators in runs of graphs that failed": 0}
    assert session.run(y, {x: [2.0]}).tolist() == [2.0]


# -- control flow ---------------------------------------------------------------


@contextmanager
def control_flow(version: int) -> Iterator[None]:
    """Graphs with the control flow of v1 (Switch and Merge) or v2 (If and While)."""
    enabled = tf1.control_flow_v2_enabled()
    switch = {1: tf1.disable_control_flow_v2, 2: tf1.enable_control_flow_v2}
    switch[version]()
    yield
    switch[2 if enabled else 1]()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("taken", [True, False])
def test_branches(version: int, taken: bool) -> None:
    """Only the branch that is taken is counted."""
    with control_flow(version):
        flag = tf1.placeholder(tf.bool, [])
        x = tf.constant([0.5, -0.25], tf.float64)
        y = tf1.cond(flag, lambda: tf.tanh(x), lambda: tf.sin(x))
        fetches = [y, *tf.gradients(y, x)]
    session = tf1.Session()
    expected = session.run(fetches, {flag: taken})
    tool = Counter(["Tanh", "Sin", "TanhGrad", "Cos"])
    with amanda.apply(tool):
        support.assert_close(session.run(fetches, {flag: taken}), expected)
    assert tool.forward == ({"Tanh": 1} if taken else {"Sin": 1})
    assert tool.backward == ({"TanhGrad": 1} if taken else {"Cos": 1})


def test_control_dependencies() -> None:
    """Control dependencies hold under a tool."""
    w = tf1.get_variable("w", initializer=1.0, use_resource=True)
    with tf.control_dependencies([tf1.assign_add(w, 1.0)]):
        y = tf.square(w.read_value())
    session = started()
    with amanda.apply(Identity()):
        assert session.run(y) == 4.0
        session.run(tf.group(y))
    assert session.run(w) == 3.0


def test_functions_in_a_graph() -> None:
    """A tf.function that a graph calls is instrumented within."""

    @tf.function
    def inner(x: Any) -> Any:
        return tf.nn.relu(x) * 2.0

    y = inner(tf.constant([1.0, -1.0]))
    tool = Counter(["Relu"])
    with amanda.apply(tool):
        assert tf1.Session().run(y).tolist() == [2.0, 0.0]
    assert tool.forward["Relu"] == 1


# -- runs that cannot be instrumented ---------------------------------------------


@pytest.mark.parametrize("use_resource", [True, False])
def test_sessions_of_a_server_share_variables(use_resource: bool) -> None:
    """Sessions of one server share their variables under a tool; they run vanilla and say so."""
    server = tf1.train.Server.create_local_server()
    v = tf1.get_variable("v", initializer=3.0, use_resource=use_resource)
    update = tf1.assign_add(v, 1.0)
    one, other = tf1.Session(server.target), tf1.Session(server.target)
    one.run(v.initializer)

    def shared() -> list[float]:
        one.run(update)
        seen = other.run(v)
        other.run(update)
        return [seen, one.run(v)]

    with amanda.apply(Counter()) as scope, pytest.warns(amanda.errors.CoverageWarning, match="Ser"):
        assert shared() == [4.0, 5.0]
    assert scope.statistics.not_seen == {"runs of a session of a tf.compat.v1.train.Server": 4}
    assert (one.run(v), other.run(v)) == (5.0, 5.0)


@pytest.mark.parametrize("use_resource", [True, False])
def test_partial_runs(use_resource: bool) -> None:
    """A partial run under a tool reads what the runs before it have written."""
    a, b = tf1.placeholder(tf.float32, []), tf1.placeholder(tf.float32, [])
    v = tf1.get_variable("v", initializer=3.0, use_resource=use_resource)
    update = tf1.assign_add(v, 1.0)
    first = a * v
    second = first * b
    session = started()

    def partly() -> list[float]:
        session.run(update)
        handle = session.partial_run_setup([first, second], [a, b])
        found = session.partial_run(handle, first, {a: 2.0})
        return [found, session.partial_run(handle, second, {b: found}), session.run(v)]

    expected = [partly(), partly()]
    session.run(v.initializer)
    with amanda.apply(Counter()) as scope:
        assert partly() == expected[0]
    assert sum(scope.statistics.not_seen.values()) == 3
    assert partly() == expected[1]


def test_reference_variables_and_an_iterator() -> None:
    """A run with both is vanilla, and says so; other runs of the session are instrumented."""
    v = tf1.get_variable("v", initializer=3.0, use_resource=False)
    number = tf1.data.make_one_shot_iterator(tf1.data.Dataset.range(9)).get_next()
    scaled, square = v * tf.cast(number, tf.float32), tf.square(v)
    session = started()
    tool = Counter(["Square", "Mul"])
    with (
        amanda.apply(tool) as scope,
        pytest.warns(amanda.errors.CoverageWarning, match="use_resource"),
    ):
        assert [session.run(scaled), session.run(scaled), session.run(square)] == [0.0, 3.0, 9.0]
    assert session.run(scaled) == 6.0
    assert tool.forward == {"Square": 1}
    assert scope.statistics.not_seen == {"graphs that cannot be copied": 1}


GROWN = """
import amanda
import tensorflow as tf

tf1 = tf.compat.v1
tool = amanda.Tool()
tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *outputs: None))
with tf.Graph().as_default(), tf1.Session() as session, amanda.apply(tool):
    first = tf.sin(tf.ones([2]))
    with tf.control_dependencies([first.op]):
        second = tf.cos(tf.ones([2]))
    session.run(first)
    session.run(second)
"""


def test_an_operator_that_has_run_is_not_changed() -> None:
    """A later run that waits for it adds operators; TensorFlow would warn of a changed one."""
    env = {"TF_CPP_MIN_LOG_LEVEL": "0", "CUDA_VISIBLE_DEVICES": ""}
    result = run_python("-c", GROWN, env=env, check=True)
    assert "after it was run by a session" not in result.stderr


def test_a_changed_reference_is_an_error() -> None:
    """A variable of TensorFlow 1's reference kind stays; the error says what may be changed."""
    v = tf1.get_variable("v", initializer=3.0, use_resource=False)
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "Identity":
            context.insert_before_op(tf.identity)

    tool.add_inst_for_op(analyse)
    session = started()
    wanted = "changes tensor 0 of .* float32.*a variable itself.*where its value is used"
    with amanda.apply(tool), pytest.raises(amanda.errors.CapabilityError, match=wanted):
        session.run(tf.identity(v))


def mapped(h: Any) -> Any:
    return tf.map_fn(tf.sin, h)


def branched(h: Any) -> Any:
    return tf.cond(tf.reduce_sum(h) > 0.0, lambda: tf.sin(h) * h, lambda: tf.exp(h))


def looped(h: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.sin(h) * h), (0, h))[1]


def called(h: Any) -> Any:
    return tf.function(lambda h: tf.sin(h) * tf.exp(h))(h)


@pytest.mark.parametrize("body", [mapped, branched, looped, called])
def test_a_gradient_is_fetched_after_what_it_is_of(body: Callable[[Any], Any]) -> None:
    """A run may fetch the gradient of a loop, branch or call that earlier runs have executed."""

    def program() -> list[Any]:
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [2, 3])
            w = tf1.get_variable("w", [3, 3], initializer=tf.initializers.ones(), use_resource=True)
            y = body(x @ w)
            loss = tf.reduce_sum(y * y)
            found = tf1.gradients(loss, [x, w])
            step = tf1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            session.run(tf1.global_variables_initializer())
            feed = {x: np.arange(6, dtype=np.float32).reshape(2, 3) / 10}
            fetched = [y, found, step, loss, step, w]
            return [session.run(each, feed) for each in fetched]

    expected = program()
    with amanda.apply(tool := Identity()):
        found = program()
    support.assert_same_bits(
        [v for v in tf.nest.flatten(found) if v is not None],
        [v for v in tf.nest.flatten(expected) if v is not None],
    )
    assert tool.calls > 0
