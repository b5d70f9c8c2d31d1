"""What the driver does with sessions: ids, values, options, and what it cannot see."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import amanda
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from amanda.errors import CoverageWarning
from onnx import helper, numpy_helper

from models import BOOL, FLOAT, INT64, cnn, images, model, session

IDS = [
    "Net.stem/Conv:0", "Net.stem/Relu:0", "Net/GlobalAveragePool:0", "Net/Flatten:0",
    "Net.head/MatMul:0", "Net.head/Add:0",
]  # fmt: skip


def watched(run: Any, routine: Any = None, **where: Any) -> tuple[list[str], Any, Any]:
    """Run under a tool: ids in the order of the analyses, the result, and the statistics."""
    found: list[str] = []

    def analyse(context: Any) -> None:
        found.append(context.get_op_id())
        if routine is not None:
            context.insert_after_op(routine)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, **where)
    with amanda.apply(tool) as scope:
        result = run()
    return found, result, scope.statistics


def test_ids_and_modules_of_nodes_with_paths_as_names() -> None:
    """A session made before the scope is seen; ids are those of each run, bits those of vanilla."""
    made = session(cnn())
    expected = made.run(None, images())

    def run() -> Any:
        return [made.run(["y"], images()) for _ in range(3)]

    for routine in (None, lambda *tensors: None):
        ids, found, statistics = watched(run, routine)
        assert ids == IDS
        assert all(np.array_equal(one[0], expected[0]) for one in found)
        assert not statistics.not_seen


def test_without_routines_the_session_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second run on no node runs by itself; a routine for another session changes
    nothing there, and an id stays right where another one has not run node by node."""
    from amanda_onnx.program import Node

    computed: list[str] = []
    compute = Node.compute

    def counting(node: Node, *args: Any) -> Any:
        computed.append(node.label)
        return compute(node, *args)

    monkeypatch.setattr(Node, "compute", counting)
    one, two = session(cnn()), session(cnn())
    seen: list[str] = []

    def analyse(context: Any) -> None:
        seen.append(context.get_op_id())
        if context.get_op_id().startswith("Net@1"):
            context.insert_before_op(lambda *tensors: None)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        for made in (one, two):
            made.run(None, images())
        computed.clear()
        one.run(None, images())
        assert not computed
        two.run(None, images())
        assert len(computed) == len(IDS)
    assert seen == [*IDS, *(op_id.replace("Net", "Net@1", 1) for op_id in IDS)]


def test_outputs_of_an_optimized_session_stay_its_own() -> None:
    """The program gets the bits of the session; a warning tells what tools see instead."""
    random = np.random.default_rng(0)
    sizes = [(64, 64), (64, 64), (64, 64)]
    constants = {f"w{i}": random.normal(size=s).astype(np.float32) for i, s in enumerate(sizes)}
    nodes = []
    for i in range(3):
        nodes += [
            helper.make_node("MatMul", ["x" if i == 0 else f"h{i}", f"w{i}"], [f"m{i}"]),
            helper.make_node("Gelu", [f"m{i}"], [f"h{i + 1}"]),
        ]
    made = session(model(nodes, {"x": FLOAT}, {"h3": FLOAT}, constants), optimized=True)
    feed = {"x": random.normal(size=(5, 64)).astype(np.float32)}
    expected = made.run(None, feed)[0]
    values: list[Any] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _, found, _ = watched(lambda: made.run(None, feed)[0], values.append)
    assert np.array_equal(found, expected)
    assert np.allclose(values[-1], expected, rtol=1e-4)
    is_equal = np.array_equal(values[-1], expected)
    assert [w.category for w in warned] == [] if is_equal else [CoverageWarning]


def test_a_changed_value_reaches_the_outputs() -> None:
    """A routine's value is what later nodes compute with, and only in the scope."""
    made = session(cnn())
    expected = made.run(None, images())[0]
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_after_op(lambda y: y * 2) if "MatMul" in c.get_op_id() else None
    )
    with amanda.apply(tool):
        found = made.run(None, images())[0]
    bias = numpy_helper.to_array(cnn().graph.initializer[3])
    assert np.allclose(found, (expected - bias) * 2 + bias, rtol=1e-5)
    assert np.array_equal(made.run(None, images())[0], expected)


@pytest.mark.parametrize("feed", [{}, {"x": np.zeros(3, np.int64)}, {"z": np.zeros(1)}])
def test_errors_of_the_session_are_its_own(feed: Any) -> None:
    """A wrong input raises what it raises without tools, and no tool sees an operator."""
    made = session(cnn())
    with pytest.raises(Exception) as vanilla:
        made.run(None, feed)
    with pytest.raises(type(vanilla.value)) as found:
        watched(lambda: made.run(None, feed))
    assert str(found.value) == str(vanilla.value)


def test_names_of_outputs_and_forms_of_inputs() -> None:
    """Outputs are those asked for, in that order; inputs may be lists and OrtValues."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("Mul", ["x", "y"], ["z"]),
    ]
    made = session(model(nodes, {"x": FLOAT}, {"y": FLOAT, "z": FLOAT}))
    array = np.array([1.0, 2.0], np.float32)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.insert_before_op(lambda a: a + 1, inputs=[0]))
    for value in (array, [1.0, 2.0], ort.OrtValue.ortvalue_from_numpy(array)):
        with amanda.apply(tool):
            found = made.run(["z", "y"], {"x": value})
        assert [one.tolist() for one in found] == [[6.0, 15.0], [3.0, 5.0]]
        assert [one.tolist() for one in made.run(["z"], {"x": value})] == [[2.0, 8.0]]


def test_threads_have_ids_of_their_own() -> None:
    """A session may run in several threads at once."""
    made, found = session(cnn()), []
    expected = made.run(None, images())[0]
    counts: dict[int, int] = {}

    def count(*tensors: Any) -> None:
        counts[threading.get_ident()] = counts.get(threading.get_ident(), 0) + 1

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.insert_before_op(count))

    def work() -> None:
        for _ in range(5):
            found.append(made.run(None, images())[0])

    with amanda.apply(tool):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(counts.values()) == 15 * len(IDS)
    assert all(np.array_equal(one, expected) for one in found)


# -- models -------------------------------------------------------------------


def branch() -> onnx.ModelProto:
    """A model with an If whose branches read a value of the graph around them."""
    bodies = [
        helper.make_graph(
            [helper.make_node(kind, ["h", "two"], ["r"])],
            kind,
            [],
            [helper.make_tensor_value_info("r", FLOAT, None)],
        )
        for kind in ("Add", "Mul")
    ]
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("If", ["c"], ["i"], then_branch=bodies[0], else_branch=bodies[1]),
        helper.make_node("Neg", ["i"], ["y"]),
    ]
    two = np.array([2.0], np.float32)
    return model(nodes, {"x": FLOAT, "c": BOOL}, {"y": FLOAT}, {"two": two})


def test_control_flow_is_opaque_and_counted() -> None:
    """An If is one operator, whose branches are not seen, in each run; its values are right."""
    made = session(branch())
    for condition, expected in ((True, [-2.0, -5.0]), (False, [-0.0, -6.0])):
        feed = {"x": np.array([-1.0, 3.0], np.float32), "c": np.array(condition)}

        def run(feed: Any = feed) -> Any:
            return [made.run(None, feed)[0] for _ in range(2)]

        ids, found, statistics = watched(run)
        assert ids == ["Net/Relu:0", "Net/If:0", "Net/Neg:0"]
        assert dict(statistics.not_seen) == {"operators inside of If, Loop and Scan": 2}
        assert [one.tolist() for one in found] == [expected] * 2
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_after_op(lambda y: y + 1) if "Relu" in c.get_op_id() else None
    )
    with amanda.apply(tool):
        assert made.run(None, feed)[0].tolist() == [-2.0, -8.0]


def test_functions_of_a_model_are_written_out() -> None:
    """The nodes of a local function are operators."""
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="own")]
    made = session(model(nodes, {"x": FLOAT}, {"y": FLOAT}, functions=[function], own=1))
    ids, found, _ = watched(lambda: made.run(None, {"x": np.ones(2, np.float32)})[0])
    assert ids == ["Net/Add:0"]
    assert found.tolist() == [2.0, 2.0]


def test_what_no_input_reaches_is_a_constant() -> None:
    """Nodes of constants are no operators; their values are known, and random ones stay."""
    constant = numpy_helper.from_array(np.array([[1.0, 2.0]], np.float32))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=constant),
        helper.make_node("Transpose", ["c"], ["t"]),
        helper.make_node("RandomNormal", [], ["r"], shape=[1]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    made = session(model(nodes, {"x": FLOAT}, {"y": FLOAT, "r": FLOAT}))
    values: list[Any] = []
    tool = amanda.Tool()

    def look(context: Any) -> None:
        known = [
            (context.get_parameter_name(i), context.get_value(i))
            for i in context.get_inputs() and (1,)
        ]
        values.append((context.get_op_id(), *known))

    tool.add_inst_for_op(look)
    with pytest.warns(CoverageWarning, match="draws random numbers"), amanda.apply(tool):
        made.run(None, {"x": np.ones((1, 2), np.float32)})
    assert [op_id for op_id, *_ in values] == ["Net/RandomNormal:0", "Net/MatMul:0"]
    name, value = values[1][1]
    assert name == "t"
    assert value.tolist() == [[1.0], [2.0]]
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 0


def test_an_initializer_that_a_run_replaces_is_not_a_constant() -> None:
    """The value of the run is used, also where the session has a default."""
    node = helper.make_node("Add", ["x", "w"], ["y"])
    kinds = {"x": FLOAT, "w": FLOAT}
    made = session(model([node], kinds, {"y": FLOAT}, {"w": np.array([1.0], np.float32)}))
    x = np.ones(1, np.float32)
    feeds = [{"x": x}, {"x": x, "w": np.array([5.0], np.float32)}, {"x": x}]
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.insert_after_op(lambda y: y * 2))
    with amanda.apply(tool):
        found = [made.run(None, feed)[0].tolist() for feed in feeds]
    assert found == [[4.0], [12.0], [4.0]]


def test_sequences_pass_between_nodes() -> None:
    """A list of tensors is the output of one node and an input of others."""
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=1),
        helper.make_node("SequenceAt", ["s", "i"], ["y"]),
        helper.make_node("ConcatFromSequence", ["s"], ["z"], axis=0),
    ]
    made = session(model(nodes, {"x": FLOAT}, {"y": FLOAT, "z": FLOAT}, {"i": np.int64(1)}))
    ids, found, statistics = watched(
        lambda: made.run(None, {"x": np.arange(6.0, dtype=np.float32).reshape(3, 2)}),
        lambda *outputs: None,
    )
    assert len(ids) == 3
    assert found[0].tolist() == [[2.0, 3.0]]
    assert found[1].shape == (3, 2)
    assert not statistics.not_seen


# -- what is not seen ---------------------------------------------------------


def test_other_ways_to_run_a_session_are_counted() -> None:
    """Runs with an IOBinding or OrtValues run vanilla, and are counted by reason."""
    made = session(cnn())
    expected = made.run(None, images())[0]

    def run() -> Any:
        binding = made.io_binding()
        binding.bind_cpu_input("x", images()["x"])
        binding.bind_output("y")
        made.run_with_iobinding(binding)
        value = ort.OrtValue.ortvalue_from_numpy(images()["x"])
        return binding.copy_outputs_to_cpu()[0], made.run_with_ort_values(None, {"x": value})[0]

    ids, (bound, value), statistics = watched(run)
    assert not ids
    assert np.array_equal(bound, expected)
    assert np.array_equal(value.numpy(), expected)
    assert statistics.not_seen == {"runs with an IOBinding": 1, "runs with OrtValues": 1}


def test_a_model_that_is_gone_is_not_seen(tmp_path: Path) -> None:
    """The session runs vanilla, with a warning that names the reason, and is counted."""
    path = tmp_path / "model.onnx"
    onnx.save(cnn(), path)
    made = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = made.run(None, images())[0]
    path.unlink()
    with pytest.warns(CoverageWarning, match=r"cannot run one by one: .*model\.onnx"):
        ids, found, statistics = watched(lambda: [made.run(None, images())[0] for _ in range(2)])
    assert not ids
    assert np.array_equal(found[1], expected)
    assert statistics.not_seen == {"runs of sessions whose nodes cannot run one by one": 2}


def test_a_type_that_numpy_lacks_is_not_seen() -> None:
    """ONNX Runtime gives no bfloat16 to Python: the session runs vanilla."""
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=onnx.TensorProto.BFLOAT16),
        helper.make_node("Cast", ["b"], ["y"], to=FLOAT),
    ]
    made, feed = session(model(nodes, {"x": FLOAT}, {"y": FLOAT})), {"x": np.float32([1.5, 2.0])}
    with pytest.warns(CoverageWarning, match="cannot run one by one: .*bfloat16"):
        ids, found, statistics = watched(lambda: made.run(None, feed)[0])
    assert not ids
    assert found.tolist() == [1.5, 2.0]
    assert statistics.not_seen.total() == 1


def test_weights_beside_the_model(tmp_path: Path) -> None:
    """External data is read from the model's folder."""
    path = tmp_path / "model.onnx"
    onnx.save(cnn(), path, save_as_external_data=True, size_threshold=0)
    ids, _, statistics = watched(
        lambda: session_of(path).run(None, images()), lambda *tensors: None
    )
    assert ids == IDS
    assert not statistics.not_seen


def session_of(path: Path) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def test_integers_and_truth_values() -> None:
    """Values of any type pass, and comparisons give truth values."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["g"]),
        helper.make_node("Where", ["g", "x", "zero"], ["y"]),
    ]
    made = session(model(nodes, {"x": INT64}, {"y": INT64}, {"zero": np.int64(0)}))
    ids, found, _ = watched(lambda: made.run(None, {"x": np.array([-1, 4])})[0], lambda y: None)
    assert found.tolist() == [0, 4]
    assert len(ids) == 2
