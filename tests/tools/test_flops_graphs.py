"""``flops`` in graphs of TensorFlow: executions by runs of the graph, where it tells the shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_tensorflow import _internals
from amanda_tools import flops
from amanda_tools.count import CountTool
from amanda_tools.flops import FlopsTool

IMAGES = tf.ones([2, 6, 6, 3])
KERNEL = tf.Variable(tf.ones([3, 3, 3, 4]))
WEIGHT = tf.Variable(tf.ones([4, 5]))
DATA = tf.data.Dataset.range(2)


def step(images: Any) -> Any:
    """A forward and backward pass of a convolution and a product."""
    with tf.GradientTape() as tape:
        y = tf.reduce_mean(tf.nn.conv2d(images, KERNEL, 1, "SAME"), [1, 2])
        loss = tf.reduce_sum(tf.matmul(y, WEIGHT))
    return loss, tape.gradient(loss, [KERNEL, WEIGHT])


def looping(images: Any) -> Any:
    """The same in each run of a loop's body."""

    def body(i: Any, total: Any) -> Any:
        loss, gradients = step(images)
        return i + 1, total + loss + sum(tf.reduce_sum(gradient) for gradient in gradients)

    return tf.while_loop(lambda i, total: i < 3, body, [0, 0.0])


def figures(run: Callable[[Any], Any], *others: amanda.Tool) -> tuple[dict[str, Any], Any]:
    """Operations and sizes of two runs, and executions by type."""
    tool, inputs = FlopsTool(), IMAGES
    with amanda.apply(tool, *others):
        run(inputs)
        amanda.new_iteration()
        run(inputs)
    found, rows = tool.summary(), tool.op_rows()
    counted = [row for row in rows if row["counted"] == "formula"]
    executed = sorted((row["name"], row["executions"], row["macs"]) for row in counted)
    keys = ("flops", "flops_backward", "params", "weight_bytes", "activation_bytes")
    return {key: found[key] for key in keys}, executed


UNKNOWN = [tf.TensorSpec([None, 6, 6, 3])]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("is_flipped", [False, True])
def test_a_sparse_matrix_counts_by_its_values(in_graph: bool, is_flipped: bool) -> None:
    """A product of five values with two columns has ten, as has either gradient of it."""
    values, dense = tf.ones([5]), tf.ones([2, 7] if is_flipped else [7, 2])

    def run(values: Any, dense: Any) -> Any:
        sparse = tf.SparseTensor([[i, i] for i in range(5)], values, [5, 7])
        with tf.GradientTape() as tape:
            tape.watch([values, dense])
            y = tf.sparse.sparse_dense_matmul(sparse, dense, adjoint_b=is_flipped)
        return y, tape.gradient(y, [values, dense])

    with amanda.apply(tool := FlopsTool()):
        (tf.function(run) if in_graph else run)(values, dense)
        # Neither a generator's state nor an iterator over several devices computes anything.
        tf.random.Generator.from_seed(1).normal([2])
        list(tf.distribute.OneDeviceStrategy("/cpu:0").experimental_distribute_dataset(DATA))
    found = tool.summary()
    assert (found["flops"], found["flops_backward"], found["bound"]) == (20, 40, None)


@pytest.mark.usefixtures("restored_table")
def test_a_formula_of_the_program_gets_all_shapes() -> None:
    """Also where the graph tells those of some tensors only."""
    seen = []

    def formula(call: flops.CallShapes) -> int:
        seen.append((tuple(call.inputs), tuple(call.outputs)))
        return 1

    flops.register("conv2d", formula)
    flops.register("Conv2DBackpropFilter", formula, backward=True)
    figures(tf.function(step, input_signature=UNKNOWN))
    image, kernel, sizes, result = (2, 6, 6, 3), (3, 3, 3, 4), (4,), (2, 6, 6, 4)
    assert set(seen) == {((image, kernel), (result,)), ((image, sizes, result), (kernel,))}


@pytest.mark.parametrize("program", [step, looping])
def test_figures_of_known_shapes_are_those_of_executions(program: Callable[..., Any]) -> None:
    """Operations are the same whether the graph tells the shapes or each execution does."""
    told = figures(tf.function(program))
    measured = figures(tf.function(program, input_signature=UNKNOWN))
    assert told == measured
    assert told[0]["flops_backward"] > 0


@pytest.mark.parametrize("tool", [FlopsTool, CountTool])
def test_counting_tools_run_no_copy_of_known_shapes(
    tool: Callable[[], amanda.Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function whose shapes are known runs itself under ``flops`` and ``count``."""

    def instrumented(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a copy is to run")

    monkeypatch.setattr(_internals, "instrumented", instrumented)
    with amanda.apply(tool()):
        tf.function(step)(IMAGES)


def test_an_operator_that_another_tool_replaces() -> None:
    """Beside a tool that replaces an operator by one with another shape, the shapes are those that
    operators have behind it."""

    def without_gradient(images: Any) -> Any:
        y = tf.nn.conv2d(images, KERNEL, 1, "SAME")
        return tf.reduce_sum(tf.nn.conv2d(y, tf.ones([1, 1, 4, 2]), 1, "SAME"))

    def smaller() -> amanda.Tool:
        tool, done = amanda.Tool(), set[str]()

        def analyse(context: amanda.OpContext) -> None:
            if context.get_op().type == "Conv2D" and not done - {context.get_op_id()}:
                done.add(context.get_op_id())
                context.replace_op(half)

        tool.add_inst_for_op(analyse)
        return tool

    @amanda.traceable
    def half(images: Any, kernel: Any) -> Any:
        return tf.nn.conv2d(images, kernel, 2, "SAME")

    eager = figures(without_gradient, smaller())[1]
    assert figures(tf.function(without_gradient), smaller())[1] == eager
