"""``kernels`` on TensorFlow: graphs by the names of their nodes, eager operators by annotation."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import amanda
from amanda_tools._timelines import tensorflow_profiler
from amanda_tools._timelines.activities import MARK
from amanda_tools._timelines.xplane import Names, planes_in, recording_of
from amanda_tools.count import CountTool
from amanda_tools.kernels import KernelsTool


def applied(run: Any, *tools: amanda.Tool) -> KernelsTool:
    tool = KernelsTool()
    with amanda.apply(tool, *tools):
        run()
    return tool


def calls(tool: KernelsTool) -> dict[str, int]:
    """How many kernels each operator ran, by id, those without any left out."""
    counted = {row["id"]: sum(k["calls"] for k in row["kernels"]) for row in tool.op_rows()}
    return {op_id: count for op_id, count in counted.items() if count}


WEIGHT = tf.Variable(tf.ones((4, 3)), name="weight")


def step(x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(x @ WEIGHT))
    return tape.gradient(loss, WEIGHT)


def test_eager_operators() -> None:
    """Each execution has its kernel, forward and backward."""
    data = tf.ones((2, 4))
    tool = applied(lambda: [step(data) for _ in range(2)])
    found = calls(tool)
    for op_id in ("/MatMul:0", "/Tanh:0", "/Sum:0", "/Tanh:0/grad/TanhGrad:0"):
        assert found[op_id] == 2, op_id
    row = next(row for row in tool.op_rows() if row["id"] == "/Tanh:0")
    assert [kernel["name"] for kernel in row["kernels"]] == ["Tanh"]
    assert row["executions"] == 2
    assert 0 < row["host_us"] < sum(e.span for e in tool.recording.executions)


def test_kernels_have_the_program_s_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the profiler begins late, as on a busy machine: steps are found by times."""

    def begin() -> Any:
        time.sleep(0.1)
        return session()

    session = tensorflow_profiler.ProfilerSession
    monkeypatch.setattr(tensorflow_profiler, "ProfilerSession", begin)
    times: list[float] = []

    def run() -> None:
        times.append(time.perf_counter())
        step(tf.ones((2, 4)))
        times.append(time.perf_counter())

    begins = [activity.begin / 1e6 for activity in applied(run).recording.activities]
    assert times[0] < min(begins) < max(begins) < times[1]


def test_eager_operators_have_their_kernels_whatever_the_name_of_the_layer() -> None:
    """Also with the signs of annotations and of the profiler's metadata."""
    data = tf.ones((2, 4))
    for name in ("a#b", 'a"b', "50%41", "漢字"):
        layer = tf.keras.layers.Dense(2, name=name)
        layer(data)
        tool = applied(lambda layer=layer: layer(data))
        assert tool.summary()["problems"] == []
        assert calls(tool)[f"{name}/MatMul:0"] == 1


@pytest.mark.parametrize("counted", [False, True])
def test_functions(counted: bool) -> None:
    """Kernels bear their nodes' names, in the vanilla graph and in an instrumented copy."""
    run, data = tf.function(step), tf.ones((2, 4))
    tool = applied(lambda: [run(data) for _ in range(2)], *([CountTool()] if counted else []))
    found = calls(tool)
    assert found["step/Tanh"] == 2
    assert found["step/Tanh/grad/TanhGrad:0"] == 2
    assert found["step/matmul/MatMul"] == 2
    assert tool.summary()["ambiguous"] == 0
    names = {activity.name for activity in tool.recording.activities}
    assert "EagerPyFunc" not in names


def test_a_fused_kernel_belongs_to_its_product() -> None:
    """It carries the name of the last operator fused; what is added behind a bias, perhaps of
    another product, is not it."""
    x, bias = tf.ones((2, 8, 8, 3)), tf.ones(4)
    kernels = [tf.ones((3, 3, 3, 4)) for _ in range(2)]

    @tf.function
    def run(x: Any) -> Any:
        with tf.name_scope("one"):
            y = tf.nn.bias_add(tf.nn.conv2d(x, kernels[0], 1, "SAME"), bias)
        with tf.name_scope("two"):
            y = tf.nn.relu(y + tf.nn.conv2d(x, kernels[1], 1, "SAME"))
        return tf.nn.relu(tf.nn.bias_add(tf.reshape(y, (-1, 4)) @ tf.ones((4, 4)), bias))

    tool = applied(lambda: run(x))
    rows = {row["id"]: [k["name"] for k in row["kernels"]] for row in tool.op_rows()}
    assert rows["run/one/Conv2D"] == ["_FusedConv2D"]
    assert "_FusedConv2D" not in rows["run/two/Conv2D"]
    assert rows["run/matmul/MatMul"] == ["_FusedMatMul"]
    assert rows["run/Relu"] == rows["run/BiasAdd"] == []


class Heavy(amanda.Tool):
    """Runs operators of its own around every product, eagerly, traced and in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "MatMul":
            context.insert_before_op(self.run, inputs=[0])
            context.insert_after_op(self.traced)

    def run(self, x: Any) -> Any:
        return tf.sinh(x) * 0.0 + x

    @amanda.traceable
    def traced(self, y: Any) -> Any:
        return tf.cosh(y) * 0.0 + y


@pytest.mark.parametrize("run", [step, tf.function(step)])
def test_kernels_of_other_tools_are_not_counted(run: Any) -> None:
    """What routines run, in Python or traced into the graph, is not an operator's kernel."""
    tool = applied(lambda: run(tf.ones((2, 4))), Heavy())
    kernels = {k["name"] for row in tool.op_rows() for k in row["kernels"]}
    assert kernels & {"MatMul", "_MklMatMul"}
    assert not kernels & {"Sinh", "Cosh", "EagerPyFunc", "EnsureShape"}
    if run is not step:
        assert not {a.name for a in tool.recording.activities} & {"Sinh", "Cosh", "EagerPyFunc"}


def test_functions_of_one_name_and_a_loop() -> None:
    """Told apart by their order; what a loop runs is found, forward and backward."""

    def made(factor: float) -> Any:
        @tf.function
        def looped(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in tf.range(3):
                    y = tf.sin(y) * factor
            return tape.gradient(y, x)

        return looped

    first, second = made(2.0), made(3.0)

    def run() -> None:
        first(tf.ones(4))
        for _ in range(2):
            second(tf.ones(4))

    found = calls(applied(run))
    sines = {op_id: n for op_id, n in found.items() if op_id.endswith("/Sin")}
    assert sines == {"looped/while/body/while/Sin": 3, "looped@1/while/body/while/Sin": 6}
    cosines = [n for op_id, n in found.items() if "grad/Cos" in op_id]
    assert cosines == [3, 6]


@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "function"])
def test_a_step_of_keras(run_eagerly: bool) -> None:
    """The kernels of the last of five steps stand beside those of the run."""
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3, name="only")])
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    data = np.ones((10, 4)), np.ones((10, 3))
    tool = applied(lambda: model.fit(*data, batch_size=2, epochs=1, verbose=0))
    # The forward product may be fused with the addition of the bias, under the name of that.
    [row] = [row for row in tool.op_rows() if row["type"] == "linear_backward"]
    assert (row["activities"], row["per_step"]["activities"]) == (5, 1)
    assert 0 < row["per_step"]["host_us"] < row["host_us"]
    assert row["per_step"]["executions"] == (1 if run_eagerly else None)
    assert tool.result()["summary"]["per_step"]["host_us"] < tool.summary()["host_us"]


def test_a_session() -> None:
    """A graph's kernels, those without outputs among them."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (2, 4), "x")
        weight = tf1.get_variable("w", (4, 3), use_resource=True)
        loss = tf.reduce_sum(tf.nn.relu(x @ weight))
        update = tf1.assign_sub(weight, tf.gradients(loss, weight)[0])
        initialize = tf1.global_variables_initializer()

    def run() -> None:
        with tf1.Session(graph=graph) as session:
            session.run(initialize)
            for _ in range(3):
                session.run([loss, update], {x: np.ones((2, 4))})

    tool = applied(run)
    found = calls(tool)
    assert found["graph/Relu"] == found["graph/Relu/grad/ReluGrad:0"] == 3
    assert found["graph/AssignSubVariableOp"] == 3
    # A share of time: how large depends on what else the machine does.
    assert 0 < tool.summary()["host_attributed"] <= 1
    assert {a.op for a in tool.recording.activities if a.op} <= {r["id"] for r in tool.op_rows()}


# -- a device: planes as TensorFlow writes them, made by hand --------------------


class Plane:
    """Builds a plane."""

    def __init__(self, space: Any, name: str) -> None:
        self.plane = space.planes.add(name=name)
        self._numbers: collections.defaultdict[Any, int] = collections.defaultdict(
            lambda: len(self._numbers) + 1
        )

    def line(self, name: str) -> Any:
        return self.plane.lines.add(id=5, name=name, timestamp_ns=1000)

    def add(self, line: Any, name: str, start: int, length: int, **stats: Any) -> None:
        """An event, its times in microseconds."""
        number = self._numbers[name]
        metadata = self.plane.event_metadata[number]
        metadata.id, metadata.name = number, name
        node, colon, kind = name.rpartition(":")
        metadata.display_name = kind if colon and ":" not in node and " " not in kind else ""
        event = line.events.add(
            metadata_id=number, offset_ps=start * 10**6, duration_ps=length * 10**6
        )
        for key, value in stats.items():
            stat = event.stats.add(metadata_id=self._numbers["stat", key])
            self.plane.stat_metadata[stat.metadata_id].name = key
            if isinstance(value, int):
                stat.int64_value = value
            else:
                stat.str_value = value


def test_kernels_of_a_device() -> None:
    """They name the node that launched them, or the annotation; copies say their bytes."""
    space = xplane_pb2.XSpace()
    host, device = Plane(space, "/host:CPU"), Plane(space, "/device:GPU:0")
    threads, stream = host.line("python"), device.line("Stream #1")
    host.add(threads, "net/conv:Conv2D", 0, 5)
    device.add(stream, "implicit_gemm", 10, 40, tf_op="net/conv:Conv2D")
    device.add(stream, "MemcpyH2D", 60, 4, memcpy_details="kind_src:pageable size:4096 dest:0")
    device.add(stream, "relu_kernel", 70, 8, tf_op=f"{MARK}/Relu:0")
    names = Names()
    names.add("net/conv", "step/net/conv/Conv2D")
    recording = recording_of(planes_in([space.SerializeToString()]), names)
    found = {a.name: a for a in recording.activities}
    gemm = found["implicit_gemm"]
    assert (gemm.op, gemm.device, gemm.start, gemm.duration) == (
        "step/net/conv/Conv2D", "gpu:0", 11.0, 40.0,
    )  # fmt: skip
    assert (found["MemcpyH2D"].op, found["MemcpyH2D"].bytes) == ("", 4096)
    assert found["relu_kernel"].op == "/Relu:0"
    assert (found["Conv2D"].device, found["Conv2D"].op) == ("cpu", "step/net/conv/Conv2D")


def test_a_name_that_several_operators_bear() -> None:
    """The first one has it, and it is counted; the function decides where it is known."""
    space = xplane_pb2.XSpace()
    plane = Plane(space, "/host:CPU")
    line = plane.line("tf_Compute")
    plane.add(line, "MatMul:MatMul", 0, 5)
    names = Names()
    names.add("MatMul", "train/MatMul")
    names.add("MatMul", "test/MatMul")
    recording = recording_of(space.planes, names)
    assert ([a.op for a in recording.activities], recording.ambiguous) == (["train/MatMul"], 1)
    plane.add(line, "EagerLocalExecute: __inference_test_12", 9, 9)
    plane.add(line, "FunctionRun", 10, 1, id=77)
    plane.add(line, "ExecutorState::Process", 12, 5, id=77)
    plane.add(line, "MatMul:MatMul", 13, 2)
    recording = recording_of(space.planes, names)
    assert [a.op for a in recording.activities] == ["train/MatMul", "test/MatMul"]
    assert recording.ambiguous == 1
