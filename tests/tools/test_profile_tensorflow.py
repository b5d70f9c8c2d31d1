"""``profile`` and ``trace`` in TensorFlow's graphs: times come from the runtime."""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import CoverageWarning
from amanda_tools._timelines.timeline import Timeline, TimelineSpan
from amanda_tools.count import CountTool
from amanda_tools.kernels import KernelsTool
from amanda_tools.profile import ProfileTool
from amanda_tools.stats import StatsTool
from amanda_tools.trace import TraceTool
from tests.tools.xplane_support import kinds_in

STEPS = 3


def function() -> Any:
    """A training step, called several times."""
    weight = tf.Variable(tf.ones((64, 64)) / 64.0)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = x
            for _ in tf.range(2):
                y = tf.tanh(y @ weight)
            loss = tf.reduce_sum(y)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return lambda: [step(tf.ones((64, 64))).numpy() for _ in range(STEPS)]


def session() -> Any:
    """The same in a session."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, (64, 64))
        weight = tf1.get_variable("w", initializer=tf.ones((64, 64)) / 64.0, use_resource=True)
        loss = tf.reduce_sum(tf.tanh(x @ weight))
        update = tf1.assign_sub(weight, 0.01 * tf.gradients(loss, weight)[0])
        initialize = tf1.global_variables_initializer()
    running = tf1.Session(graph=graph)
    running.run(initialize)
    data = np.ones((64, 64), np.float32)
    return lambda: [running.run([loss, update], {x: data}) for _ in range(STEPS)]


def spans_of(timeline: Timeline) -> list[TimelineSpan]:
    return list(timeline.spans)


def kernels_beside(run: Any, folder: Path) -> collections.Counter[str]:
    """The kernels of a run by type, as TensorFlow's own profiler counts them without a tool."""
    tf.profiler.experimental.start(
        str(folder), tf.profiler.experimental.ProfilerOptions(host_tracer_level=2)
    )
    run()
    tf.profiler.experimental.stop()
    files = [file.read_bytes() for file in folder.rglob("*.xplane.pb")]
    return kinds_in(files)


@pytest.mark.parametrize("others", [[], [CountTool]])
@pytest.mark.parametrize("mode", [function, session])
def test_times_in_graphs_are_those_of_the_runtime(
    mode: Any, others: list[Any], tmp_path: Path
) -> None:
    """The times of one thread's operators never add up to more than its wall time; executions
    are those that TensorFlow's profiler counts."""
    run = mode()
    run()
    expected = kernels_beside(run, tmp_path)
    profile, trace = ProfileTool(), TraceTool()
    began = time.perf_counter_ns()
    with amanda.apply(profile, trace, *(other() for other in others)):
        run()
    wall = time.perf_counter_ns() - began
    for timeline in (profile.timeline, trace.timeline):
        by_thread: collections.Counter[int] = collections.Counter()
        for span in spans_of(timeline):
            by_thread[span.thread] += span.duration
            assert span.start >= 0
        assert by_thread
        assert max(by_thread.values()) <= wall
    for native, ending in (("Tanh", "/Tanh"), ("TanhGrad", "/TanhGrad:0")):
        calls = [row["calls"] for row in profile.op_rows() if row["id"].endswith(ending)]
        assert sum(calls) == expected[native] > 0


def test_runs_of_the_driver_are_not_the_programs() -> None:
    """Variables that are copied to an instrumented graph, and constants that are folded, are not
    executions; an assignment whose node lacks the type's name is one."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        weight = tf1.get_variable("w", initializer=tf.ones(4), use_resource=True)
        result = weight.read_value() * tf.fill([4], 2.0)
        initialize = tf1.global_variables_initializer()
    profile, count = ProfileTool(), CountTool()
    with amanda.apply(profile, count), tf1.Session(graph=graph) as running:
        running.run(initialize)
        for _ in range(STEPS):
            running.run(result)
            running.run(weight)
    executions = {row["id"]: row["executions"] for row in count.op_rows()}
    calls = {row["id"]: row["calls"] for row in profile.op_rows()}
    assert calls == {op_id: executions[op_id] for op_id in calls}
    assert calls["graph/w/Assign/AssignVariableOp"] == 1
    assert sum(n for op_id, n in calls.items() if "Read" in op_id) == 2 * STEPS


def test_times_in_a_session_that_takes_data_from_an_iterator() -> None:
    """Beside a tool with routines, which runs a copy of the operators as a function in the user's
    graph, operators have the executions that they have without it."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        data = tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(tf.ones(3)).repeat())
        result = tf.tanh(data.get_next())
    tools = ProfileTool(), StatsTool()
    with amanda.apply(*tools), tf1.Session(graph=graph) as running:
        for _ in range(STEPS):
            running.run(result)
    calls = {row["id"]: row["calls"] for row in tools[0].op_rows()}
    assert calls["graph/Tanh"] == STEPS


def test_a_node_without_outputs_in_a_loop_has_its_executions() -> None:
    """Also where its name is the user's, and lacks the type's."""
    total = tf.Variable(0.0)

    @tf.function
    def step(x: Any) -> None:
        for _ in tf.range(3):
            total.assign_add(tf.sinh(x), name="adding", read_value=False)

    with amanda.apply(tool := ProfileTool()):
        step(tf.ones(()))
    calls = [row["calls"] for row in tool.op_rows() if "adding" in row["id"]]
    assert calls == [3]


def test_a_graph_is_not_changed_to_be_timed() -> None:
    """A function that is timed and nothing else runs itself, and not a copy."""
    doubled = tf.function(lambda x: x + x)
    seen = []
    with amanda.apply(ProfileTool()) as scope:
        seen.append(doubled(tf.ones(3)).numpy().tolist())
    assert seen == [[2.0, 2.0, 2.0]]
    assert not scope.statistics.not_seen


def test_tools_share_the_profiler() -> None:
    """Tools that record beside each other, one within the other's scope, see what is theirs."""
    doubled = tf.function(lambda x: tf.sinh(x))
    x = tf.ones(3)
    outer, inner, kernels = ProfileTool(), ProfileTool(), KernelsTool()
    with amanda.apply(outer):
        doubled(x)
        with amanda.apply(inner, kernels):
            doubled(x)
        doubled(x)
    calls = [tool.summary()["by_type"]["sinh"]["calls"] for tool in (outer, inner)]
    assert calls == [3, 1]
    assert sum(a.name == "Sinh" for a in kernels.recording.activities) == 1


def test_a_profiler_in_use_is_said(tmp_path: Path) -> None:
    """Where the program itself uses the profiler, operators have no times; a warning says so."""
    doubled = tf.function(lambda x: tf.sinh(x))
    tf.profiler.experimental.start(str(tmp_path))
    tool = ProfileTool()
    with (
        pytest.warns(CoverageWarning, match="after the program had begun to use it"),
        amanda.apply(tool),
    ):
        doubled(tf.ones(3))
    tf.profiler.experimental.stop()
    assert "sinh" not in tool.summary()["by_type"]
