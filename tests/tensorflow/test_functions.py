"""``tf.function``: substitution in loops, gradients of all kinds, tracing, XLA, older functions."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CapabilityError, CoverageWarning
from amanda_tensorflow.graphs import xla
from tests.identity import Identity
from tests.running import run_python
from tests.tensorflow import support
from tests.tensorflow.programs import X, differentiated, loop, nested_control_flow, placed
from tests.tensorflow.support import Counter, Watcher


class At(amanda.Tool):
    """Calls a function on the context of each operator of one type."""

    def __init__(self, kind: str, act: Callable[[amanda.OpContext], Any], **when: bool) -> None:
        super().__init__()
        self.kind = kind
        self.act = act
        self.add_inst_for_op(self.look, **when)

    def look(self, context: amanda.OpContext) -> None:
        if context.get_op().type == self.kind:
            self.act(context)


class Types(amanda.Tool):
    """Lists the types of the backward operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(self.look, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        self.seen.append(context.get_backward_op().type)


@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("routine", ["run time", "traced"])
def test_substitution_in_a_loop(placement: str, routine: str) -> None:
    """A substituted input in a loop's body is differentiated straight through."""

    def double(tensor: Any) -> Any:
        return tensor * 2.0

    func = amanda.traceable(double) if routine == "traced" else double

    def by_hand(x: Any) -> Any:
        for _ in range(3):
            x = tf.tanh(x + tf.stop_gradient(x * 2.0 - x)) * 1.5
        return x

    expected = [tensor.numpy() for tensor in differentiated(by_hand)(tf.constant(X))]
    tool = At("Tanh", lambda c: c.insert_before_op(func))
    with amanda.apply(tool):
        actual = [tensor.numpy() for tensor in placed(loop, placement)(tf.constant(X))]
    support.assert_close(actual, expected)


def test_a_call_with_too_few_tensors() -> None:
    """A call that the function refuses is refused in the same words under a tool."""
    spec = tf.TensorArraySpec([2], tf.float32, dynamic_size=True)
    function = tf.function(lambda array: array.stack(), input_signature=[spec])
    array = tf.TensorArray(tf.float32, 2, dynamic_size=True, element_shape=[2])
    texts = []
    for tool in None, Watcher():
        scope = nullcontext() if tool is None else amanda.apply(tool)
        with scope, pytest.raises(ValueError, match="arguments") as refusal:
            function(array)
        texts.append(str(refusal.value))
    assert texts[0] == texts[1]


# -- the ways to differentiate ----------------------------------------------------


def test_jacobians_and_forward_mode() -> None:
    """Persistent tapes, Jacobians and forward accumulators give what they give without a tool."""
    function = tf.function(lambda x: tf.tanh(tf.linalg.matmul(x, x)))
    x = tf.constant(X)

    def results() -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = function(x)
        found = [tape.gradient(y, x), tape.gradient(y, x), tape.jacobian(y, x)]
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = function(x)
        return [tensor.numpy() for tensor in [*found, y, accumulator.jvp(y)]]

    expected = results()
    with amanda.apply(Watcher()):
        support.assert_same_bits(results(), expected)
    with amanda.apply(Identity()):
        support.assert_close(results(), expected)


def test_a_tape_across_the_scope() -> None:
    """A function called outside of the scope and differentiated inside keeps its gradient."""
    function = tf.function(lambda x: tf.tanh(x) * x)
    x = tf.constant(X)
    expected = differentiated(function)(x)[1].numpy()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    with amanda.apply(Identity()):
        support.assert_close(tape.gradient(y, x).numpy(), expected)
    with tf.GradientTape() as tape, amanda.apply(Watcher()):
        tape.watch(x)
        y = function(x)
    support.assert_same_bits(tape.gradient(y, x).numpy(), expected)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("make", [Watcher, Identity])
def test_the_gradient_of_a_function_that_is_gone(order: int, make: Callable[[], Any]) -> None:
    """The gradient of a function that the program has dropped is seen as that of any other."""
    x = tf.constant(X)

    def results(keeps: list[Any]) -> list[Any]:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                function = tf.function(lambda x: tf.tanh(x) * x, autograph=False)
                keeps.append(function)
                y = function(x)
                del function
            gc.collect()
            first = inner.gradient(y, x)
        keeps.clear()
        gc.collect()
        found = [first] if order == 1 else [first, outer.gradient(first, x)]
        return [tensor.numpy() for tensor in found]

    class Forgets(list[Any]):
        def append(self, item: Any) -> None:
            """Keep nothing."""

    seen = []
    for keeps in [], Forgets():
        tool = make()
        backward = Types()
        with amanda.apply(tool, backward) as scope:
            found = results(keeps)
        assert not scope.statistics.not_seen
        seen.append((found, backward.seen))
    support.assert_same_bits(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]
    assert "Mul" in seen[0][1]


# -- tracing ------------------------------------------------------------------------


def test_functions_are_not_traced_again() -> None:
    """The user's Python runs once per signature, whatever tools come and go."""
    traces: list[Any] = []

    @tf.function
    def function(x: Any) -> Any:
        traces.append(x.shape)
        return tf.nn.relu(x)

    tool = Counter(["Relu"])
    function(tf.ones([2]))
    for _ in range(2):
        with amanda.apply(tool):
            function(tf.ones([2]))
            function(tf.ones([3]))
    function(tf.ones([3]))
    assert [shape.as_list() for shape in traces] == [[2], [3]]
    assert tool.forward["Relu"] == 4


def test_names_that_differ_by_a_type_only() -> None:
    """tf.tensordot has operators `Tensordot/Reshape` and `Tensordot`, a Reshape too."""
    x, kernel = tf.ones((2, 3, 4)), tf.ones((4, 5))
    function = tf.function(lambda x: tf.tensordot(x, kernel, 1))
    function(x)
    seen: list[str] = []
    with amanda.apply(At("Reshape", lambda context: seen.append(context.get_op_id()))):
        function(x)
    assert [op_id.rpartition("/")[2] for op_id in seen] == ["Reshape", "Tensordot:Reshape"]


def test_variables_of_a_function() -> None:
    """A function that makes, reads and assigns variables under a tool."""

    class Accumulator(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total: Any = None

        @tf.function
        def __call__(self, x: Any) -> Any:
            if self.total is None:
                self.total = tf.Variable(tf.zeros([2]), name="total")
            self.total.assign_add(tf.nn.relu(x))
            return self.total.read_value()

    module = Accumulator()
    tool = Counter(["Relu"])
    with amanda.apply(tool):
        for _ in range(3):
            result = module(tf.constant([1.0, -1.0]))
    assert result.numpy().tolist() == module.total.numpy().tolist() == [3.0, 0.0]
    assert module(tf.constant([1.0, -1.0])).numpy().tolist() == [4.0, 0.0]
    assert tool.forward["Relu"] == 3


@pytest.mark.parametrize("passed", ["captured", "argument"])
def test_values_of_variables(passed: str) -> None:
    """get_value gives a variable's value, also of one that is an argument."""
    weight = tf.Variable(X)
    seen: list[Any] = []
    if passed == "captured":
        function = tf.function(lambda x: tf.linalg.matmul(x, weight))
        run = lambda: function(tf.constant(X))  # noqa: E731
    else:
        function = tf.function(tf.linalg.matmul)
        run = lambda: function(tf.constant(X), weight)  # noqa: E731
    tool = At("MatMul", lambda c: seen.append([c.get_value(0), np.asarray(c.get_value(1))]))
    with amanda.apply(tool):
        run()
    assert seen[0][0] is None
    assert seen[0][1].tolist() == X.tolist()


# -- routines -------------------------------------------------------------------------


def test_a_function_as_a_routine() -> None:
    """A routine that is a tf.function is traced into the graph, as traceable ones are."""
    traced: list[bool] = []

    @tf.function
    def routine(tensor: Any) -> Any:
        traced.append(tf.inside_function())
        return tensor * 2.0

    function = tf.function(tf.nn.relu)
    tool = At("Relu", lambda c: c.insert_after_op(routine))
    with amanda.apply(tool):
        for _ in range(3):
            assert function(tf.constant([1.0, -1.0])).numpy().tolist() == [2.0, 0.0]
    assert traced == [True]


def test_a_routine_with_a_variable_of_the_tool() -> None:
    """A traced routine may read and write variables of its tool."""
    total = tf.Variable(0.0)

    @amanda.traceable
    def accumulate(tensor: Any) -> Any:
        return tensor + total.assign_add(tf.reduce_sum(tensor)) * 0.0

    function = tf.function(tf.nn.relu)
    with amanda.apply(At("Relu", lambda c: c.insert_after_op(accumulate))):
        for _ in range(3):
            function(tf.constant([1.0, -1.0]))
    assert total.numpy() == 3.0


@pytest.mark.parametrize("traceable", [False, True])
def test_symbolic_keywords(traceable: bool) -> None:
    """A symbolic tensor of the analysis that is passed as a keyword is a further input."""

    def routine(output: Any, source: Any) -> Any:
        return output + source

    func = amanda.traceable(routine) if traceable else routine
    tool = At(
        "Relu",
        lambda c: c.insert_after_op(func, source=c.get_inputs()[0] * 10.0),
        require_outputs=True,
    )
    function = tf.function(lambda x: tf.nn.relu(x) * 1.0)
    with amanda.apply(tool):
        for values in ([1.0, -1.0], [2.0, -3.0]):
            expected = [max(value, 0.0) + 10.0 * value for value in values]
            assert function(tf.constant(values)).numpy().tolist() == expected


@pytest.mark.parametrize("traceable", [False, True])
def test_xla(traceable: bool) -> None:
    """A compiled function computes with what a routine returns; run-time routines cost XLA."""

    def double(tensor: Any) -> Any:
        return tensor * 2.0

    func = amanda.traceable(double) if traceable else double
    function = tf.function(lambda x: tf.tanh(tf.nn.relu(x)), jit_compile=True)
    x = tf.constant([1.0, -1.0])
    vanilla = function(x).numpy()
    said = nullcontext() if traceable else pytest.warns(CoverageWarning, match="XLA")
    with said, amanda.apply(At("Relu", lambda c: c.insert_after_op(func))):
        np.testing.assert_allclose(function(x).numpy(), np.tanh([2.0, 0.0]), rtol=1e-6)
    support.assert_same_bits(function(x).numpy(), vanilla)


@pytest.mark.parametrize("way", ["outside", "inside", "inference"])
def test_what_only_xla_can_run(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function with an operator that the CPU refuses keeps XLA, which a warning says."""
    # As it is without oneDNN.
    monkeypatch.setattr(xla, "_runs_first", lambda: False)
    x = tf.reshape(tf.range(16.0), (1, 2, 2, 2, 2))
    kernel = tf.ones([1, 1, 1, 2, 3])
    convolution = tf.function(
        lambda x, kernel: tf.nn.conv3d(x, kernel, [1] * 5, "VALID", data_format="NCDHW"),
        jit_compile=True,
    )

    def gradients(x: Any, kernel: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            loss = tf.reduce_sum(convolution(x * 2.0, kernel) ** 2)
        return [loss, *tape.gradient(loss, [x, kernel])]

    run: Callable[..., Any] = {
        "outside": gradients,
        "inside": tf.function(gradients),
        "inference": lambda x, kernel: [convolution(x, kernel)],
    }[way]
    expected = [tensor.numpy() for tensor in run(x, kernel)]
    with amanda.apply(Identity()) as scope, pytest.warns(CoverageWarning, match="by XLA only"):
        found = [tensor.numpy() for tensor in run(x, kernel)]
    support.assert_close(found, expected)
    assert scope.statistics.not_seen["graphs that cannot be copied"]


def test_a_failing_routine_in_a_nested_call() -> None:
    """An exception crosses calls and loops as itself."""

    def fail(*tensors: Any) -> None:
        raise KeyError("as planned")

    function = tf.function(nested_control_flow)
    with (
        pytest.raises(KeyError, match="as planned") as caught,
        amanda.apply(At("Tanh", lambda c: c.insert_before_op(fail))),
    ):
        function(tf.constant(X))
    assert any("At.fail" in note and "Tanh" in note for note in caught.value.__notes__)
    expected = tf.function(nested_control_flow)(tf.constant(X)).numpy()
    support.assert_same_bits(function(tf.constant(X)).numpy(), expected)


# -- functions that are older than Amanda ---------------------------------------------


OLDER = """
import tensorflow as tf
w = [tf.Variable(tf.ones([3, 3, 2, 2])) for _ in range(3)]

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        for v in w:
            x = tf.nn.relu(tf.nn.conv2d(x, v, 1, "SAME"))
        loss = tf.reduce_sum(x * x)
    return tape.gradient(loss, w)

x = tf.ones([1, 4, 4, 2])
expected = [g.numpy().tolist() for g in step(x)]
import amanda
owners = {}
class Owners(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(self.look, backward=True)
    def look(self, context):
        if context.get_backward_op().type == "Conv2DBackpropFilter":
            context.insert_after_backward_op(self.note, owner=context.get_op_id())
    def note(self, *grads, owner):
        owners[owner] = owners.get(owner, 0) + 1
with amanda.apply(Owners()):
    assert [g.numpy().tolist() for g in step(x)] == expected
print(sorted(owners.values()), len(owners))
"""


def test_functions_from_before_the_import() -> None:
    """In a function that was traced before Amanda was imported, backward operators are
    still found, each for its own forward operator."""
    done = run_python("-c", OLDER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1, 1, 1] 3"


def test_what_is_not_known_of_a_loaded_function_says_so(tmp_path: Path) -> None:
    """A gradient in a SavedModel is as old as one from before the import, and named as loaded."""

    class Saved(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.eye(3, 2))

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def train(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ self.w))
            self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
            return loss

    saved = Saved()
    tf.saved_model.save(saved, str(tmp_path))
    expected, loaded = saved.train(tf.ones((2, 3))), tf.saved_model.load(str(tmp_path))
    warned = pytest.warns(CoverageWarning, match="was loaded, or traced before `import amanda`")
    with amanda.apply(Counter(["Mean"])), warned:
        assert loaded.train(tf.ones((2, 3))).numpy() == expected.numpy()
    assert loaded.w.numpy().tolist() == saved.w.numpy().tolist()


def test_errors_name_the_function() -> None:
    """A run-time error names the user's function and node, and the lines that define it, as without
    a tool."""

    @tf.function
    def checked(x: Any) -> Any:
        return tf.debugging.check_numerics(tf.math.log(x), "not a number")

    said, defined = [], []
    for tool in (None, Counter()):
        scope = nullcontext() if tool is None else amanda.apply(tool)
        with scope as found, pytest.raises(tf.errors.InvalidArgumentError) as raised:
            checked(tf.constant([-1.0]))
        said.append(re.findall(r"{{node .*}}|__inference_\D+_", str(raised.value)))
        defined.append(str(raised.value).partition("{{node")[0])
    assert said[0] == said[1] == ["{{node CheckNumerics}}", "__inference_checked_"]
    assert defined[0] == defined[1]
    assert "in checked\n" in defined[0]
    # Which operators have run is not known.
    assert found.statistics.not_seen == {"operators in runs of graphs that failed": 0}


def _of_a_sum(inside: bool) -> Any:
    """The gradients of ``a + b``, which the graph holds as one tensor."""
    add = (lambda a, b: a + b) if inside else tf.function(lambda a, b: a + b)

    def gradients(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            total = add(a, b)
        return tape.gradient(total, [a, b])

    function = tf.function(gradients) if inside else gradients
    return function(tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]))


@pytest.mark.parametrize("inside", [True, False], ids=["tape inside", "tape outside"])
def test_a_gradient_of_several_inputs_is_changed_alike(inside: bool) -> None:
    """Routines that leave it, or change it alike, act; another one is an error at run time."""

    def run(routine: Any) -> list[list[float]]:
        tool = At("AddV2", lambda context: context.insert_after_backward_op(routine))
        with amanda.apply(tool):
            return [gradient.numpy().tolist() for gradient in _of_a_sum(inside)]

    assert run(lambda *gradients: None) == [[1.0, 1.0]] * 2
    assert run(lambda *gradients: [gradient * 0.5 for gradient in gradients]) == [[0.5, 0.5]] * 2
    with pytest.raises(CapabilityError, match=r"inputs \[0, 1\] of op add.* one tensor"):
        run(lambda *gradients: [None, gradients[1] * 0.5])


@pytest.mark.parametrize("way", ["eager", "function", "session"])
@pytest.mark.parametrize(
    ("routine", "factor"),
    [
        (lambda gradient: None, 1.0),
        (lambda gradient: gradient, 1.0),
        (lambda gradient: tf.identity(gradient), 1.0),
        (lambda gradient: 2.0 * gradient, 2.0),
        (amanda.traceable(lambda gradient: 2.0 * gradient), 2.0),
    ],
    ids=["nothing", "same", "copy", "changed", "traced"],
)
@pytest.mark.parametrize("point", ["before", "after"])
def test_gradients_that_are_slices(way: str, routine: Any, factor: float, point: str) -> None:
    """Routines get the gradient of gathered rows dense, and what they return takes its place."""
    rows, indices = np.arange(12, dtype=np.float32).reshape(4, 3), [[0, 2], [2, 3]]
    shapes: list[Any] = []

    def act(context: amanda.OpContext) -> None:
        def run(gradient: Any) -> Any:
            shapes.append(gradient.shape.as_list())
            return routine(gradient)

        run.amanda_traceable = getattr(routine, "amanda_traceable", False)  # type: ignore[attr-defined]
        if point == "before":
            context.insert_before_backward_op(run)
        else:
            context.insert_after_backward_op(run, grad_inputs=[0])

    def of_rows(table: Any) -> Any:
        doubled = table * 2.0
        loss = tf.reduce_sum(tf.gather(doubled, indices) ** 2)
        return tf.convert_to_tensor(tf.gradients(loss, table)[0])

    tool = At("Mul" if point == "before" else "GatherV2", act)
    table = tf.constant(rows)
    expected = 8 * np.asarray([rows[0], 0 * rows[1], 2 * rows[2], rows[3]]) * factor
    if way == "session":
        with tf.Graph().as_default() as graph:
            fed = support.tf1.placeholder(tf.float32, [4, 3])
            gradient = of_rows(fed)
        with amanda.apply(tool), support.tf1.Session(graph=graph) as session:
            found = session.run(gradient, {fed: rows})
    elif way == "function":
        with amanda.apply(tool):
            found = tf.function(of_rows)(table).numpy()
    else:
        with amanda.apply(tool):
            with tf.GradientTape() as tape:
                tape.watch(table)
                loss = tf.reduce_sum(tf.gather(table * 2.0, indices) ** 2)
            found = tf.convert_to_tensor(tape.gradient(loss, table)).numpy()
    support.assert_close(found, expected)
    assert shapes
    assert all(shape == [4, 3] for shape in shapes)


@pytest.mark.parametrize("way", ["watched", "changed", "changed at the gather", "replaced"])
def test_gradients_whose_slices_have_slices_as_values(way: str) -> None:
    """Gradients through joined ragged tensors, slices of slices, are whole, and can be changed."""
    splits, rows = [0, 2, 2, 5], tf.range(20.0)
    double = amanda.traceable(lambda gradient: 2.0 * gradient)

    def act(context: amanda.OpContext) -> None:
        if not context.get_op_id().endswith("RaggedConcat/concat/ConcatV2"):
            return
        if way == "replaced":
            own = context.get_function()
            context.replace_op(amanda.traceable(lambda *inputs: 2.0 * own(*inputs)))
        else:
            context.insert_before_op(lambda *inputs: inputs)
        if way == "changed":
            context.insert_before_backward_op(double)

    def gradient(rows: Any) -> Any:
        values = tf.reshape(rows, (5, 4)) * 3.0
        ragged = tf.RaggedTensor.from_row_splits(values, splits)
        loss = tf.reduce_sum(tf.concat([ragged, ragged], 1).to_tensor() ** 2)
        return tf.convert_to_tensor(tf.gradients(loss, rows)[0])

    expected = tf.function(gradient)(rows).numpy()
    tools = [At("ConcatV2", act)]
    if way == "changed at the gather":
        tools.append(
            At("RaggedGather", lambda c: c.insert_after_backward_op(double, grad_inputs=[1]))
        )
    with amanda.apply(*tools):
        found = tf.function(gradient)(rows).numpy()
    support.assert_close(found, expected * {"watched": 1.0, "replaced": 4.0}.get(way, 2.0))


def test_rows_that_no_slice_stands_for() -> None:
    """A change of rows that were not gathered is an error that names the operator."""
    tool = At("GatherV2", lambda c: c.insert_after_backward_op(lambda g: g + 1.0, grad_inputs=[0]))

    @tf.function
    def function(table: Any) -> Any:
        gradient = tf.gradients(tf.reduce_sum(tf.gather(table, [0, 2])), table)[0]
        return tf.convert_to_tensor(gradient)

    with (
        amanda.apply(tool),
        pytest.raises(CapabilityError, match=r"rows of the gradient.*GatherV2"),
    ):
        function(tf.ones([4, 3]))


def test_a_replaced_gather() -> None:
    """The gradient of a replacement takes the place of slices, also where a row has several."""

    def gradient(table: Any) -> Any:
        loss = tf.reduce_sum(tf.gather(table, [0, 2, 2]) ** 2)
        return tf.gradients(loss, table)[0].values

    table, function = tf.reshape(tf.range(12.0), (4, 3)), tf.function(gradient)
    before = function(table).numpy()

    def act(context: amanda.OpContext) -> None:
        own = context.get_function()
        context.replace_op(amanda.traceable(lambda *inputs: 3.0 * own(*inputs)))

    with amanda.apply(At("GatherV2", act)):
        values = function(table).numpy()
    by_row = [before[0], before[1] + before[2]]
    support.assert_close([values[0], values[1] + values[2]], [9.0 * row for row in by_row])
    with amanda.apply(At("GatherV2", act)):
        values = function(tf.where(table == 7.0, np.inf, table)).numpy()
    assert values[1:].sum(axis=0).tolist() == [9.0 * by_row[1][0], np.inf, 9.0 * by_row[1][2]]


def test_a_gradient_of_several_operators_is_changed_alike() -> None:
    """One tensor is the gradient of all summands: halved twice it is not what is halved once."""
    values = [tf.constant([1.0, float(i)]) for i in range(3)]

    def gradients(a: Any, b: Any, c: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([a, b, c])
            total = a + (b + c)
        return tape.gradient(total, [a, b, c])

    def halve(*gradients: Any) -> list[Any]:
        return [gradient * 0.5 for gradient in gradients]

    tool = At("AddV2", lambda context: context.insert_after_backward_op(halve))
    with amanda.apply(tool), pytest.raises(CapabilityError, match=r"ops add_1, add are one tensor"):
        tf.function(gradients)(*values)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("which", [{}, {"outputs": []}])
def test_routines_run_where_only_the_gradient_reads_an_output(
    which: dict[str, Any], order: int
) -> None:
    """A routine after an operator runs as often as that, also if its gradient alone reads it."""

    def derived(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return tape.gradient(y, x)

        return gradient

    runs: list[str] = []
    gradient = derived(tf.exp) if order == 1 else derived(derived(tf.exp))
    function, x = tf.function(gradient), tf.constant([0.5, 1.0])
    expected = function(x)
    tool = At("Exp", lambda c: c.insert_after_op(lambda *outputs: runs.append("exp"), **which))
    with amanda.apply(tool):
        support.assert_same_bits([function(x)], [expected])
    assert runs == ["exp"]


def test_a_change_of_a_resource_is_refused_with_its_type_and_shape() -> None:
    """A graph has no place for another resource; the error says which tensor is meant."""
    variable = tf.Variable(1.0)
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().type == "ReadVariableOp":
            context.insert_before_op(tf.identity)

    tool.add_inst_for_op(analyse)
    wanted = r"changes tensor 0 of what it selects, resource of shape \(\): a resource, "
    with amanda.apply(tool), pytest.raises(CapabilityError, match=wanted):
        tf.function(lambda: variable + 1.0)()


def test_routines_run_in_the_order_of_the_operators() -> None:
    """Routines that return nothing run after those of the operators whose results they read."""
    seen: list[str] = []

    def note(*tensors: Any, where: str) -> None:
        seen.append(where)

    def analyse(context: amanda.OpContext) -> None:
        op_id = context.get_op_id()
        context.insert_before_op(note, where=f"before {op_id}")
        context.insert_after_op(note, where=f"after {op_id}")

    def chain(x: Any) -> Any:
        for _ in range(8):
            x = tf.sin(x)
        return x

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    function = tf.function(chain)
    with amanda.apply(tool):
        for _ in range(5):
            function(tf.constant([0.5, 1.0]))
    names = ["chain/Sin", *(f"chain/Sin_{i}" for i in range(1, 8))]
    run = [f"{when} {name}" for name in names for when in ("before", "after")]
    assert [where for where in seen if "/Sin" in where] == run * 5


def test_a_routine_on_a_gradient_that_passes_through_a_change() -> None:
    """A routine that returns nothing runs at each gradient of an input which a differentiable
    routine has changed, also where nothing else reads the gradient."""
    seen: list[float] = []

    def note(gradient: Any) -> None:
        seen.append(float(gradient[0, 0]))

    def change(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda tensor: tensor * 2.0, inputs=[1])
        context.insert_after_backward_op(note, grad_inputs=[1])

    weight = tf.Variable([[1.0]])

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.matmul(x, weight)
        return tape.gradient(y, weight)

    tool = At("MatMul", change)
    tool.differentiable = True
    function = tf.function(gradient)
    with amanda.apply(tool):
        assert [float(function(tf.constant([[3.0]]))[0, 0]) for _ in range(2)] == [6.0, 6.0]
    assert seen == [3.0, 3.0]
