"""Loops, branches and functions of all kinds behind routines: flags, TensorFlow 1's functions,
static shapes, gradients that several inputs share."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function

import amanda
from amanda.errors import CapabilityError
from tests.identity import Identity
from tests.tensorflow import support
from tests.tensorflow.programs import X, differentiated, placed
from tests.tensorflow.support import Watcher, tf1

Program = Callable[[Any], Any]


class Silent(Identity):
    """Routines at all four points, which return nothing."""

    def same(self, *tensors: Any) -> None:
        self.calls += 1


class Traced(Identity):
    """Routines at all four points, which are traced."""

    @amanda.traceable
    def same(self, *tensors: Any) -> Any:
        return [tf.identity(t) if t is not None and t.dtype.is_floating else None for t in tensors]


class Whole(Identity):
    """Routines around the gradient of each operator as a whole."""

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.same)
        context.insert_after_backward_op(self.same)

    def backward(self, context: amanda.OpContext) -> None:
        """Nothing."""


def until_done(x: Any) -> Any:
    def body(i: Any, done: Any, x: Any) -> Any:
        return i + 1, i >= 2, tf.tanh(x) * 1.5

    start = [tf.constant(0), tf.constant(False), x]
    return tf.while_loop(lambda i, done, x: tf.logical_not(done), body, start)[2]


def finished_rows(x: Any) -> Any:
    def body(i: Any, done: Any, x: Any) -> Any:
        x = tf.where(done[:, None], x, tf.tanh(x) * 1.5)
        return i + 1, tf.reduce_max(x, 1) < 1.0, x

    start = [tf.constant(0), tf.constant([False, False]), x]
    return tf.while_loop(lambda i, done, x: i < 3, body, start)[2]


def flag_and_text(x: Any) -> Any:
    y, flag, text = tf.cond(
        tf.reduce_sum(x) > 0.0,
        lambda: (tf.tanh(x), tf.constant(True), tf.constant("a")),
        lambda: (x, tf.constant(False), tf.constant("bc")),
    )
    return tf.where(flag, y, x) * tf.cast(tf.strings.length(text), tf.float64)


def ctc(x: Any) -> Any:
    logits = tf.cast(tf.reshape(tf.tile(x, [3, 2]), [3, 2, 4]), tf.float32)
    labels = tf.constant([[1, 2], [2, 1]])
    return tf.nn.ctc_loss(labels, logits, [2, 2], [3, 3], blank_index=0)


def defun(x: Any) -> Any:
    @function.Defun(tf.float64)
    def inner(x: Any) -> Any:
        return tf.tanh(x)

    @function.Defun(tf.float64)
    def outer(x: Any) -> Any:
        return inner(x) * 2.0

    return outer(x) + x


def shapes(x: Any) -> Any:
    shape = tf.concat([tf.shape(x)[:-1], [2]], 0)
    diagonal = tf.linalg.diag_part(tf.reshape(tf.tanh(x), shape))
    return tf.linalg.diag(diagonal, num_rows=2, num_cols=2) @ x


def scanned(x: Any) -> Any:
    return tf.scan(lambda total, row: tf.tanh(total + row), x)


def compiled(x: Any) -> Any:
    return tf.function(lambda x: tf.tanh(x) * 2.0, jit_compile=True)(x)


@pytest.mark.parametrize("tool", [Identity, Silent, Traced, Whole])
@pytest.mark.parametrize(
    "program", [until_done, finished_rows, flag_and_text, ctc, defun, shapes, scanned]
)
def test_any_state_of_loops_and_branches(program: Program, tool: type[amanda.Tool]) -> None:
    """Flags, masks, text and functions of TensorFlow 1 in control flow change no gradient."""
    x = tf.constant(X)
    expected = [tensor.numpy() for tensor in placed(program, "inside")(x)]
    with amanda.apply(tool()):
        actual = [tensor.numpy() for tensor in placed(program, "inside")(x)]
    # CTC losses have gradients in single precision only.
    tolerance = 1e-5 if program is ctc else 1e-11
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        tf.debugging.assert_near(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
@pytest.mark.parametrize("tool", [Watcher, Identity, Traced])
@pytest.mark.parametrize("program", [compiled, defun, until_done])
def test_a_tape_around(program: Program, tool: type[amanda.Tool]) -> None:
    """The same holds where the tape is outside of the function, also for a call that XLA keeps."""
    x = tf.constant(X)
    expected = [tensor.numpy() for tensor in placed(program, "outside")(x)]
    with amanda.apply(tool()):
        actual = [tensor.numpy() for tensor in placed(program, "outside")(x)]
    support.assert_close(actual, expected)


def test_the_state_of_loops_in_a_session() -> None:
    """The same holds in a session, forward and backward."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float64, [2, 2])
        values = [f(x) for f in (until_done, flag_and_text, defun, shapes)]
        fetches = [*values, *tf.gradients(values, x)]
    with tf1.Session(graph=graph) as session:
        expected = session.run(fetches, {x: X})
        for tool in (Identity(), Silent(), Whole()):
            with amanda.apply(tool):
                support.assert_close(session.run(fetches, {x: X}), expected)


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_a_changed_function_of_tensorflow_1(placement: str) -> None:
    """A value that a routine changes in a ``Defun`` is the one that its gradient is of."""

    def by_hand(x: Any) -> Any:
        return tf.tanh(x + tf.stop_gradient(x)) * 2.0 + x

    class Double(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "Tanh":
                context.insert_before_op(lambda x: x * 2.0)

    expected = [tensor.numpy() for tensor in differentiated(by_hand)(tf.constant(X))]
    with amanda.apply(Double()):
        actual = [tensor.numpy() for tensor in placed(defun, placement)(tf.constant(X))]
    support.assert_close(actual, expected)


class Shapes(amanda.Tool):
    """Notes the static shapes of all outputs, behind routines if it is told so."""

    def __init__(self, routine: Any = None) -> None:
        super().__init__()
        self.seen: dict[str, list[Any]] = {}
        self.routine = routine
        self.add_inst_for_op(self.act)
        self.add_inst_for_op(self.look, require_outputs=True)

    def act(self, context: amanda.OpContext) -> None:
        if self.routine is not None:
            context.insert_after_op(self.routine)

    def look(self, context: amanda.OpContext) -> None:
        self.seen[context.get_op_id()] = [
            (t.dtype, t.shape.as_list()) for t in context.get_outputs() if t.dtype != tf.variant
        ]


@pytest.mark.parametrize("routine", [lambda *tensors: None, lambda *tensors: tensors])
@pytest.mark.parametrize("program", [shapes, finished_rows, scanned])
def test_static_shapes_behind_routines(program: Program, routine: Any) -> None:
    """Behind run-time routines every tensor has the static shape and dtype of the vanilla graph."""
    run = tf.function(program)
    vanilla, behind = Shapes(), Shapes(routine)
    for tool in (vanilla, behind):
        with amanda.apply(tool):
            run(tf.constant(X))
    assert behind.seen == vanilla.seen


def written(x: Any) -> Any:
    array = tf.TensorArray(x.dtype, 1)
    return tf.cond(x[0] > 0.0, lambda: array.write(0, x), lambda: array.write(0, x * 2.0)).stack()


def one_of_three(x: Any) -> Any:
    rest = lambda: tf.switch_case(tf.cast(x[0], tf.int32), [lambda: x + 1.0, lambda: x * 2.0])  # noqa: E731
    return tf.case([(x[0] > 5.0, lambda: tf.identity(x))], default=rest)


def counted_up(x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        return i + 1, tf.cond(i > 0, lambda: tf.identity(x), lambda: tf.tanh(x))

    return tf.while_loop(lambda i, x: i < 2, body, [0, x])[1]


class Bodies(amanda.Tool):
    """Counts the executions of the operators in bodies.

    Args:
        point: where the routines are, and whether they take tensors.
    """

    def __init__(self, point: str) -> None:
        super().__init__()
        self.runs: collections.Counter[str] = collections.Counter()
        self._point = point
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        key = context.get_op_id()
        if re.search("/(cond|body|then_branch|else_branch|branches[0-9])/", key):
            if self._point == "before":
                context.insert_before_op(self.count, key=key)
            elif self._point == "after":
                context.insert_after_op(self.count, key=key)
            else:
                context.insert_after_op(self.count, [], key=key)

    def count(self, *tensors: Any, key: str) -> None:
        self.runs[key] += 1


@pytest.mark.parametrize("is_session", [False, True], ids=["function", "session"])
@pytest.mark.parametrize("program", [written, one_of_three, counted_up, scanned])
def test_routines_without_tensors_in_bodies(program: Program, is_session: bool) -> None:
    """A routine around an operator in a body runs as often before as after it, and whether it takes
    tensors or not, also where the operator makes a condition, or what the body returns."""
    found = []
    for point in ("before", "after", "after, without tensors"):
        tool = Bodies(point)
        if is_session:
            with tf.Graph().as_default() as graph:
                y = program(tf.constant([0.5, 1.0]))
            with tf1.Session(graph=graph) as session, amanda.apply(tool):
                session.run(y)
        else:
            with amanda.apply(tool):
                tf.function(program)(tf.constant([0.5, 1.0]))
        found.append(tool.runs)
    # What nothing reads, as the bound of a loop that has none, runs for the last of them only.
    assert found[0]
    for other in found[1:]:
        assert {key: other[key] for key in found[0]} == found[0]


class Replaced(amanda.Tool):
    """Replaces operators of one type."""

    def __init__(self, kind: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.kind, self.function = kind, function
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context.get_op().type == self.kind:
            context.replace_op(self.function, function=context.get_function())


def read_and_squared(x: Any) -> Any:
    """The gradient of a variable, read in the graph."""
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.nn.relu(x * SCALE))
    return tape.gradient(y, SCALE)


SCALE = tf.Variable(2.0, dtype=tf.float64)


def test_a_replacement_of_another_dtype() -> None:
    """What a replacement returns is cast to the dtype of the graph, and so is its gradient."""
    halved = lambda x, function: tf.cast(function(x), tf.float16) * tf.cast(0.5, tf.float16)  # noqa: E731
    step = tf.function(read_and_squared)
    with amanda.apply(Replaced("Relu", halved)):
        assert step(tf.constant([1.0, 3.0], tf.float64)).numpy() == 2.0


def test_a_replacement_that_reads_a_variable() -> None:
    """In a graph it is traceable, or one error names the tool and the operator."""
    again = lambda handle, function: function(handle)  # noqa: E731
    zero = amanda.traceable(lambda handle, function: tf.constant(1.0, tf.float64))
    x = tf.constant([1.0, 3.0], tf.float64)
    traced = amanda.traceable(lambda handle, function: function(handle))
    for replacement, expected in ((traced, 4.0), (zero, 0.0)):
        step = tf.function(read_and_squared)
        with amanda.apply(Replaced("ReadVariableOp", replacement)):
            assert step(x).numpy() == expected
    step = tf.function(read_and_squared)
    with (
        amanda.apply(Replaced("ReadVariableOp", again)),
        pytest.raises(amanda.errors.CapabilityError, match=r"<lambda>.*ReadVariableOp.*traceable"),
    ):
        step(x)


def folded(x: Any) -> Any:
    """A loop over the rows of a tensor, which TensorFlow makes a list of."""
    return tf.foldl(lambda sum, row: sum * row, x)


def array(x: Any) -> Any:
    rows = tf.TensorArray(tf.float32, 3).unstack(x)
    return rows.read(0) * rows.read(2)


def gradient_in_graph(body: Callable[..., Any], x: Any, is_inside: bool) -> Any:
    """The gradient of a function that runs as a graph, by a tape inside or outside of that."""
    function = body if is_inside else tf.function(body)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return (tf.function(step) if is_inside else step)(x)


@pytest.mark.parametrize("is_inside", [True, False], ids=["tape inside", "tape outside"])
@pytest.mark.parametrize("kind", ["TensorListGetItem", "TensorListFromTensor"])
@pytest.mark.parametrize("body", [folded, array])
def test_a_replacement_that_takes_or_makes_a_list(
    body: Callable[..., Any], kind: str, is_inside: bool
) -> None:
    """The gradient passes a traceable one in a graph; one in Python is an error, and no gradient
    is left out silently."""
    x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def gradient() -> Any:
        return gradient_in_graph(body, x, is_inside)

    again = lambda *tensors, function: function(*tensors)  # noqa: E731
    traced = amanda.traceable(lambda *tensors, function: function(*tensors))
    expected = gradient()
    with amanda.apply(Replaced(kind, traced)):
        support.assert_same_bits([gradient()], [expected])
    with (
        amanda.apply(Replaced(kind, again)),
        pytest.raises(amanda.errors.CapabilityError, match=rf"<lambda>.*{kind}.*list.*traceable"),
    ):
        gradient()


@pytest.mark.parametrize("is_inside", [True, False], ids=["tape inside", "tape outside"])
def test_a_gradient_in_slices_passes_replacements_and_differentiable_routines(
    is_inside: bool,
) -> None:
    """The gradient that an operator gets from one that gathers rows is none of zeros."""
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    gathered = lambda x: tf.gather(tf.sin(x), [0, 0, 1])  # noqa: E731

    def gradient() -> Any:
        return gradient_in_graph(gathered, x, is_inside)

    expected = gradient()
    again = lambda x, function: function(x)  # noqa: E731
    same = amanda.Tool()
    same.add_inst_for_op(lambda context: context.insert_after_op(lambda *tensors: tensors))
    for tool in (Replaced("Sin", again), Replaced("Sin", amanda.traceable(again)), same):
        with amanda.apply(tool), amanda.ad_enabled():
            support.assert_same_bits([gradient()], [expected])


ITERATIONS = 40


def weighted(x: Any) -> Any:
    """A sum over iterations of which none needs what another one has computed."""

    def body(i: Any, total: Any) -> Any:
        weight = tf.cast(i, tf.float32)
        return i + 1, total + tf.reduce_sum(weight * tf.sin(x + weight))

    return tf.while_loop(lambda i, _: i < ITERATIONS, body, [tf.constant(0), tf.constant(0.0)])[1]


class InOrder(amanda.Tool):
    """The iterations of :func:`weighted` as its routines meet them, forward and backward."""

    def __init__(self, points: Collection[str], changes: bool) -> None:
        super().__init__()
        self.points, self.changes = points, changes
        self.met: dict[str, list[int]] = {point: [] for point in points}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Neg":
            context.insert_after_op(tf.identity)
        elif context.get_op().type == "Sin":
            if "forward" in self.points:
                context.insert_before_op(self.note, inputs=[0], point="forward")
            if "backward" in self.points:
                context.insert_before_backward_op(self.note, grad_outputs=[0], point="backward")

    def note(self, tensor: Any, point: str) -> Any:
        self.met[point].append(round(float(tensor[0, 0])))
        return tf.identity(tensor) if self.changes else None

    def assert_in_order(self) -> None:
        numbers = {"forward": [*range(ITERATIONS)], "backward": [*range(ITERATIONS)][::-1]}
        assert self.met == {point: numbers[point] for point in self.points}


@pytest.mark.parametrize("is_inside", [True, False], ids=["tape inside", "tape outside"])
@pytest.mark.parametrize("changes", [False, True], ids=["watching", "changing"])
@pytest.mark.parametrize("points", [{"forward", "backward"}, {"backward"}], ids=len)
def test_routines_meet_the_iterations_of_a_loop_in_order(
    points: set[str], changes: bool, is_inside: bool
) -> None:
    """Those that depend on nothing of the iteration before, too, forward and backward."""
    tool, x = InOrder(points, changes), tf.zeros([64, 64])
    expected = gradient_in_graph(weighted, x, is_inside)
    with amanda.apply(tool):
        support.assert_same_bits([gradient_in_graph(weighted, x, is_inside)], [expected])
    tool.assert_in_order()


# -- loops of TensorFlow 1 ------------------------------------------------------


@pytest.fixture
def tensorflow_1() -> Iterator[None]:
    """Loops and branches of graphs that are built within are those of TensorFlow 1."""
    tf1.disable_control_flow_v2()
    yield
    tf1.enable_control_flow_v2()


@pytest.mark.usefixtures("tensorflow_1")
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("changes", [False, True], ids=["watching", "changing"])
@pytest.mark.parametrize("points", [{"forward", "backward"}, {"backward"}], ids=len)
def test_routines_meet_the_iterations_of_a_loop_of_tensorflow_1_in_order(
    points: set[str], changes: bool, stateful: bool
) -> None:
    """As those of other loops, also where a run is a function in the user's session."""
    tool = InOrder(points, changes)
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [64, 64])
        of: Any = x
        if stateful:
            once = tf.data.Dataset.from_tensors(1.0).repeat()
            of = x * tf1.data.make_one_shot_iterator(once).get_next()
        fetched = [y := weighted(of), tf1.gradients(y, x)[0]]
        weight = graph.get_operation_by_name("while/Exit").outputs[0]
        negative = -x
    feeds = {x: np.zeros([64, 64], np.float32)}
    with tf1.Session(graph=graph) as session:
        expected = session.run(fetched, feeds)
        with amanda.apply(tool):
            # An earlier run of the loop has no routine there.
            session.run([weight, negative], feeds)
            support.assert_same_bits(session.run(fetched, feeds), expected)
    tool.assert_in_order()


def at_exp(routines: dict[str, Callable[..., Any]]) -> amanda.Tool:
    """A tool with routines at each exponential, by action."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "Exp":
            for action, routine in routines.items():
                getattr(context, action)(routine)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool


def halved(x: Any) -> Any:
    """A loop."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.exp(h * 0.5) + x), [0, x])[1]


@pytest.mark.usefixtures("tensorflow_1")
def test_a_function_with_a_loop_of_tensorflow_1_is_called_twice() -> None:
    """The copy has two loops, whose frames have names of their own."""
    with tf.Graph().as_default() as graph:
        tf.identity(halved(tf1.placeholder(tf.float32, [2], "x")), "y")
    definition = graph.as_graph_def()

    def imported(x: Any) -> Any:
        return tf1.import_graph_def(definition, {"x:0": x}, ["y:0"])[0]

    loop = tf1.wrap_function(imported, [tf.TensorSpec([2])])
    program = tf.function(lambda x: loop(x) + loop(x + 1.0))
    x = tf.constant([0.5, 1.0])
    expected = program(x)
    tool = Identity()
    with amanda.apply(tool):
        support.assert_same_bits([program(x)], [expected])
    assert tool.calls


@pytest.mark.usefixtures("tensorflow_1")
@pytest.mark.parametrize("action", ["insert_after_op", "replace_op"])
def test_traced_routines_use_constants_in_loops_of_tensorflow_1(action: str) -> None:
    """What they make without any input runs in the frame of the loop."""

    def doubled(x: Any) -> Any:
        return (tf.exp(x) if action == "replace_op" else x) * tf.constant([2.0, 2.0])

    x = [0.5, 1.0]
    h = np.float32(x)
    for _ in range(3):
        h = np.exp(h * np.float32(0.5)) * 2 + np.float32(x)
    with tf.Graph().as_default(), tf1.Session() as session:
        y = halved(tf.constant(x))
        with amanda.apply(at_exp({action: amanda.traceable(doubled)})):
            np.testing.assert_allclose(session.run(y), h, rtol=1e-5)


@pytest.mark.usefixtures("tensorflow_1")
@pytest.mark.parametrize("replace", [lambda x: tf.exp(x), amanda.traceable(lambda x: tf.exp(x))])
def test_a_gradient_in_a_loop_of_tensorflow_1_is_not_derived_anew(replace: Any) -> None:
    """The error says so before the graph runs; a gradient that the tool gives is taken."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf.constant([0.5, 1.0])
        gradient = tf1.gradients(halved(x), x)[0]
        with (
            amanda.apply(at_exp({"replace_op": replace})),
            pytest.raises(CapabilityError, match="in a loop of TensorFlow 1"),
        ):
            session.run(gradient)
        given = {"replace_op": replace, "replace_backward_op": lambda gradient: gradient * 2.0}
        with amanda.apply(at_exp(given)):
            # Half of it returns by the product, and all by the sum: 1 + 1 * (1 + 1 * (1 + 1)).
            support.assert_same_bits([session.run(gradient)], [np.float32([4.0, 4.0])])


def nested(function: Callable[[Any], Any], x: Any) -> Any:
    """A loop that calls a function."""

    def body(i: Any, h: Any) -> Any:
        return i + 1, function(h) * 0.5 + x

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


@pytest.mark.usefixtures("tensorflow_1")
def test_one_of_two_equal_inputs_is_changed_in_a_loop_of_tensorflow_1() -> None:
    """The gradient in the graph cannot tell them apart, which is an error where it reads them."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "Mul" and "mul_1" not in context.get_op_id():
            context.insert_before_op(lambda h: h * 2.0, inputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf.constant([0.5, 1.0])
        y = nested(lambda h: h * h, x)
        gradient = tf1.gradients(y, x)[0]
        with amanda.apply(tool):
            session.run(y)
            with pytest.raises(CapabilityError, match="reads while/Identity_1:0 twice in a loop"):
                session.run(gradient)


@tf.function(autograph=False)
def sine(h: Any) -> Any:
    return tf.sin(h) * h


@tf.function(autograph=False)
def sines(h: Any) -> Any:
    return sine(h) * sine(h * 0.5)


@pytest.mark.usefixtures("tensorflow_1")
@pytest.mark.parametrize(
    "called",
    [sine, sines, lambda h: h * h, lambda h: h + h],
    ids=["calling", "nested", "product", "sum"],
)
@pytest.mark.parametrize("makes", [Identity, Silent, Traced, Whole])
def test_a_loop_of_tensorflow_1_has_the_gradient_of_its_graph(
    makes: type[amanda.Tool], called: Callable[[Any], Any]
) -> None:
    """The gradient runs in another loop, and is given a called function's tensors by stacks; a
    tensor that an operator reads twice is read once."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf.constant([0.5, 1.0])
        y = nested(called, x)
        fetched = [y, tf1.gradients(y, x)[0]]
        expected = session.run(fetched)
        with amanda.apply(makes()):
            support.assert_same_bits(session.run(fetched), expected)


@function.Defun(tf.float32)
def defined(h: Any) -> Any:
    return tf.sin(h) * h


@pytest.mark.usefixtures("tensorflow_1")
@pytest.mark.parametrize("called", [sine, lambda h: tf.reshape(defined(h), [2])])
@pytest.mark.parametrize("action", ["insert_after_op", "replace_op"])
def test_a_changed_function_in_a_loop_of_tensorflow_1_has_no_gradient(
    action: str, called: Callable[[Any], Any]
) -> None:
    """The error says so; the values of the loop are there."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "Sin":
            getattr(context, action)(lambda y: y * 2.0)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf.constant([0.5, 1.0])
        y = nested(called, x)
        gradient = tf1.gradients(y, x)[0]
        with amanda.apply(tool):
            session.run(y)
            with pytest.raises(CapabilityError, match="in a loop of TensorFlow 1"):
                session.run(gradient)
