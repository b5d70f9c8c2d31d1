"""``kernels``: what belongs to which operator; against PyTorch's own profiler and sums by hand."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.testing import loopback as lb
from amanda_tools._internals import is_profiling
from amanda_tools._timelines.activities import MARK, Activity
from amanda_tools.kernels import KernelsTool, timeline_file
from amanda_tools.kernels.kineto import given_bytes, recording_of
from tests import models
from tests.running import applied, in_threads
from tests.tools.test_per_step import train


def rows(tool: KernelsTool) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in tool.op_rows()}


# -- PyTorch on a CPU ---------------------------------------------------------


def test_activities_are_assigned_whatever_the_name_of_the_module() -> None:
    """Lone surrogates, quotation marks, line breaks, and the escapes of annotations themselves."""
    names = ["\udc80", 'a"b', "back\\slash", "line\nbreak", "\x1b[2J", "50%41#", "漢字"]
    model = torch.nn.Sequential()
    for name in names:
        model.add_module(name, torch.nn.Linear(3, 3))
    x = torch.rand(2, 3)
    tool = applied(KernelsTool(), lambda: model(x))
    assert tool.summary()["problems"] == []
    expected = {f"Sequential.{name}/linear:0" for name in names}
    assert {a.op for a in tool.recording.activities if a.op} == expected


def test_activities_are_those_of_torch_profiler() -> None:
    """Forward and backward, each activity of the model belongs to an operator, and once."""
    model, inputs = models.build("resnet18")

    def step() -> None:
        models.loss(model(**inputs)).backward()

    step()
    tool = applied(KernelsTool(), lambda: [step() for _ in range(2)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as reference:
        step()
    expected = {event.key: event.count for event in reference.key_averages()}
    kernels = tool.summary()["by_kernel"]
    names = (
        "aten::mkldnn_convolution",
        "aten::convolution_backward",
        "ReluBackward0",
        "aten::add_",
    )
    for name in (*names, "aten::native_batch_norm", "torch::autograd::AccumulateGrad"):
        assert kernels[f"{name} (cpu)"]["calls"] == 2 * expected[name], name
    inside = [a for a in tool.recording.activities if a.op]
    assert {a.op for a in inside} <= set(rows(tool))
    outside = {a.name for a in tool.recording.activities if not a.op}
    assert not outside & {"aten::mkldnn_convolution", "aten::convolution_backward"}
    by_type = tool.summary()["by_type"]
    assert "aten::convolution_backward (cpu)" in by_type["conv2d_backward"]["kernels"]
    assert by_type["conv2d"]["ops"] == 20
    assert {row["executions"] for row in rows(tool).values() if row["type"] == "conv2d"} == {2}


def test_own_times_add_up_to_the_operators() -> None:
    """An activity's time does not hold that of the activities within it."""
    tool = applied(KernelsTool(), lambda: nn.Linear(64, 64)(torch.rand(4, 8, 64)).sum())
    [linear] = [row for row in rows(tool).values() if row["type"] == "linear"]
    mine = [a for a in tool.recording.activities if a.op == linear["id"]]
    [outermost] = [a for a in mine if a.name == "aten::linear"]
    assert len(mine) > 3
    assert sum(a.duration for a in mine) == pytest.approx(outermost.span, rel=1e-3)
    assert linear["host_us"] == pytest.approx(outermost.span, rel=1e-3)
    assert linear["device_us"] == 0


def test_bytes_are_those_of_what_an_activity_is_given() -> None:
    """From shapes and types; null where shapes are not recorded."""
    x, weight = torch.rand(3, 5, dtype=torch.float64), torch.rand(5, 7, dtype=torch.float64)

    def given(run: Callable[[], Any], name: str, **options: Any) -> int | None:
        found = applied(KernelsTool(**options), run).summary()["by_kernel"]
        return found[f"{name} (cpu)"]["bytes"]

    assert given(lambda: torch.mm(x, weight), "aten::mm") == x.nbytes + weight.nbytes
    assert given(lambda: torch.mm(x, weight), "aten::mm", shapes=False) is None
    # What is in a list has no type in the trace.
    assert given(lambda: torch.cat([x, x]), "aten::cat") is None


def test_an_operator_that_fails() -> None:
    """What runs after a caught exception is not taken for the operator that raised it."""

    def run() -> None:
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.exp(torch.ones(2))

    found = rows(applied(KernelsTool(), run))
    assert [kernel["name"] for kernel in found["/exp:0"]["kernels"]] == ["aten::exp"]
    assert "aten::exp" not in {kernel["name"] for kernel in found["/mm:0"]["kernels"]}


def test_a_limit() -> None:
    """After it nothing is recorded, and the result says how much that is."""
    x = torch.ones(3)

    def run() -> None:
        for _ in range(5):
            torch.exp(x)
            amanda.new_iteration()

    tool = applied(KernelsTool(limit=2), run)
    assert rows(tool)["/exp:0"]["executions"] == 2
    assert tool.summary()["by_kernel"]["aten::exp (cpu)"]["calls"] == 2
    assert tool.summary()["problems"] == ["3 executions came after the limit of 2"]
    assert list(tool.tables())[-1].title == "kernels: not recorded"
    assert applied(KernelsTool(), run).summary()["problems"] == []


def test_the_limit_within_a_backward_pass() -> None:
    """The profiler can be stopped between two nodes."""
    x = torch.ones(3, requires_grad=True)
    tool = applied(KernelsTool(limit=5), lambda: (x.exp() * 2).sum().backward())
    assert sum(row["executions"] or 0 for row in tool.op_rows()) == 5
    assert torch.equal(x.grad, 2 * torch.ones(3).exp())


def test_another_thread_is_not_recorded() -> None:
    """PyTorch's profiler follows the thread that starts it; its operators are still listed."""
    x = torch.ones(3)

    def run() -> None:
        in_threads(lambda: torch.exp(x))
        torch.sin(x)

    found = rows(applied(KernelsTool(), run))
    assert found["/sin:0"]["executions"] == 1
    assert (found["/exp:0"]["executions"], found["/exp:0"]["kernels"]) == (None, [])


CPU = [torch.profiler.ProfilerActivity.CPU]


def _ones() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _profile() -> torch.profiler.profile:
    return torch.profiler.profile(activities=CPU)


def _counts(profiler: Any) -> dict[str, int]:
    return {event.key: event.count for event in profiler.key_averages()}


def _kineto() -> dict[str, int]:
    with _profile() as profiler:
        torch.exp(_ones()).sum().backward()
    return _counts(profiler)


def _autograd() -> dict[str, int]:
    with torch.autograd.profiler.profile(use_kineto=False) as profiler:
        torch.exp(_ones()).sum().backward()
    return _counts(profiler)


def _legacy() -> dict[str, int]:
    with torch.autograd.profiler_legacy.profile() as profiler:
        torch.exp(_ones()).sum().backward()
    return _counts(profiler)


def _scheduled() -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    ready = functools.partial(_append, found)
    with torch.profiler.profile(activities=CPU, schedule=schedule, on_trace_ready=ready) as p:
        for _ in range(9):
            with torch.profiler.record_function("program"):
                torch.exp(_ones()).sum().backward()
            p.step()
    return found


def _append(found: list[dict[str, int]], profiler: Any) -> None:
    found.append(_counts(profiler))


def _in_a_thread() -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    in_threads(lambda: found.append(_kineto()))
    return found


def _execution_trace(folder: Path) -> list[str]:
    path = folder / "trace.json"
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    torch.exp(_ones())
    observer.stop()
    observer.unregister_callback()
    return sorted(node["name"] for node in json.loads(path.read_text())["nodes"])


PROFILING = {"kineto": _kineto, "autograd": _autograd, "legacy": _legacy, "schedule": _scheduled}


@pytest.mark.parametrize("how", [*PROFILING, "execution trace"])
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_program_that_profiles_itself(how: str, tmp_path: Path) -> None:
    """It records what it does without a tool; the tool has what ran before, and says so."""
    profiling = PROFILING.get(how, functools.partial(_execution_trace, tmp_path))
    found: list[Any] = []

    def run() -> None:
        torch.sin(_ones())
        found.append(profiling())
        torch.cos(_ones())

    vanilla = profiling()
    tool = applied(KernelsTool(), run)
    assert found == [vanilla]
    recorded_rows = rows(tool)
    assert recorded_rows["/sin:0"]["kernels"]
    assert not recorded_rows["/cos:0"]["kernels"]
    [problem] = tool.summary()["problems"]
    assert re.search("[0-9]+ executions ran after the program had used it", problem)


def test_a_program_that_profiles_another_thread() -> None:
    """Ours, which cannot stop there, is given up; theirs records what it does without a tool."""
    vanilla = _in_a_thread()
    found: list[Any] = []
    tool = applied(KernelsTool(), lambda: found.extend(_in_a_thread()))
    assert found == vanilla
    [problem] = tool.summary()["problems"]
    assert "which ended ours" in problem
    assert not is_profiling()


def test_a_program_that_profiles_the_scope() -> None:
    """Its profiler goes on as without the scope, whose tool records nothing."""
    tool = KernelsTool()
    profiler = _profile()
    profiler.start()
    with amanda.apply(tool):
        torch.exp(torch.ones(2))
        profiler.stop()
        torch.sin(torch.ones(2))
    counts = _counts(profiler)
    assert counts["aten::exp"] == 1
    assert not [name for name in counts if name.startswith("amanda")]
    assert not any(row["kernels"] for row in rows(tool).values())


def test_the_profiler_of_another_tool() -> None:
    """Of two scopes with the tool the outer one records; the other one says so."""
    outer, inner = KernelsTool(), KernelsTool()
    with amanda.apply(outer):
        with amanda.apply(inner):
            torch.exp(torch.ones(2))
        torch.sin(torch.ones(2))
    assert rows(outer)["/exp:0"]["executions"] == 1
    assert rows(outer)["/sin:0"]["executions"] == 1
    assert "problems" not in outer.summary() or not outer.summary()["problems"]
    [problem] = inner.summary()["problems"]
    assert "another tool kernels" in problem


def test_drivers_without_a_profiler() -> None:
    """Their operators are listed without kernels, with a line that says so."""
    tool = applied(KernelsTool(), lambda: (lb.sum(lb.parameter([1.0])), torch.ones(1)))
    assert rows(tool)["/other/ones:0"]["kernels"]
    other = [row for row in tool.op_rows() if not row["namespace"].startswith("pytorch")]
    assert [row["kernels"] for row in other] == [[]] * len(other) != []
    assert tool.summary()["problems"] == [f"no profiler is known for {other[0]['namespace']}"]


def test_files(tmp_path: Path) -> None:
    """A line for each operator and kernel, a timeline of both, and bars by type."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    tool = applied(KernelsTool(), lambda: model(torch.rand(1, 4)).sum().backward())
    paths = tool.write_files(tmp_path, "kernels")
    assert [p.name for p in paths] == ["kernels.csv", "kernels.timeline.json"]
    with paths[0].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["id"] for line in lines} == set(rows(tool))
    assert len(lines) > len(rows(tool))
    events = json.loads(paths[1].read_text())["traceEvents"]
    operators = [e for e in events if e.get("cat") == "operator"]
    assert [e["args"]["id"] for e in sorted(operators, key=lambda e: e["ts"])][:2] == [
        "/other/rand:0", "Sequential.0/linear:0",
    ]  # fmt: skip
    linear = next(e for e in operators if e["name"] == "linear")
    [inner] = [e for e in events if e["name"] == "aten::linear"]
    assert linear["tid"] == inner["tid"]
    assert linear["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= linear["ts"] + linear["dur"]
    [chart] = tool.charts()
    assert "linear" in chart.labels
    assert "aten::addmm (cpu)" in chart.values
    assert json.loads(json.dumps(tool.result())) == tool.result()


def test_tables() -> None:
    """By type, module or operator; nothing at all can be shown, too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for by, name in (("type", "linear"), ("module", "1"), ("op", "Sequential.0/linear:0")):
        kernels, groups, *_ = applied(KernelsTool(by=by), lambda: model(torch.rand(1, 4))).tables()
        assert "in operators" in kernels.title
        assert name in {row[0] for row in groups.rows}
    out = io.StringIO()
    KernelsTool().print_summary(out)
    assert "0.000 ms on the host" in out.getvalue()


def test_figures_are_those_of_the_last_step_beside_the_run(tmp_path: Path) -> None:
    """In rows, summary, tables, chart and file: equal steps have a third of their activities."""
    tool = applied(KernelsTool(), lambda: train(evaluations=1))
    found, summary = tool.op_rows(), tool.result()["summary"]
    for row in found:
        step, run = row["per_step"], row["activities"] - row["per_step"]["activities"]
        if row["phase"] in ("backward", "optimizer"):
            assert row["activities"] == 3 * step["activities"]
        assert (step["host_us"] > 0) is (step["activities"] > 0), row["id"]
        assert (row["host_us"] - step["host_us"] > 1e-6) is (run > 0), row["id"]
    forward = rows(tool)["Sequential.0/linear:0"]
    assert (forward["executions"], forward["per_step"]["executions"]) == (4, 1)
    step_us = sum(row["per_step"]["host_us"] for row in found)
    assert summary["steps"] == 3
    assert summary["per_step"]["host_us"] == pytest.approx(step_us)
    assert summary["phases"]["backward"]["host_us"] == pytest.approx(
        sum(row["host_us"] for row in found if row["phase"] == "backward")
    )
    kernels, groups, others = tool.tables()
    assert " in a step (" in kernels.title
    for table in (kernels, groups, others):
        assert table.columns[-1] == "run"
    calls = {row[0]: row[1] for row in kernels.rows}
    assert calls["aten::addmm"] == 2
    [chart] = tool.charts()
    assert chart.run.keys() == chart.values.keys()
    linear = chart.labels.index("linear")
    assert chart.run["aten::addmm (cpu)"][linear] > chart.values["aten::addmm (cpu)"][linear]
    tool.write_files(tmp_path, "kernels")
    with (tmp_path / "kernels.csv").open(newline="") as file:
        assert "host_us_per_step" in next(csv.reader(file))


def test_without_a_step_there_is_the_run_alone() -> None:
    """No column of the run stands beside the run."""
    model = nn.Linear(4, 4)
    tool = applied(KernelsTool(), lambda: model(torch.rand(1, 4)))
    kernels, *_ = tool.tables()
    assert ("run" in kernels.columns) is ("per_step" in tool.op_rows()[0])
    with torch.no_grad():
        model.eval()
        tool = applied(KernelsTool(), lambda: torch.rand(3).sum())
    kernels, *_ = tool.tables()
    assert "run" not in kernels.columns
    assert not any("per_step" in row for row in tool.op_rows())


def test_a_kernel_belongs_to_the_step_that_launched_it() -> None:
    """A device runs behind the program: what counts is the launch, on the clock of the steps."""
    found = {a.name: a for a in recording_of(DEVICE, 1000.0).activities}
    assert found["gemm"].start == 1130
    assert found["gemm"].begin == 1020
    assert found["late"].begin == 1300
    assert found["aten::conv2d"].begin == 1002


# -- a device: traces in Kineto's form, written by hand -----------------------


def event(category: str, name: str, start: float, length: float, **arguments: Any) -> Any:
    thread = arguments.pop("thread", 7)
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start,
        "dur": length, "args": {key.replace("_", " "): value for key, value in arguments.items()},
    }  # fmt: skip


DEVICE = [
    event("user_annotation", f"{MARK}Net.conv/conv2d:0", 0, 50, External_id=1),
    event(
        "cpu_op", "aten::conv2d", 2, 46, External_id=2,
        Input_Dims=[[2, 3, 8, 8], [4, 3, 3, 3], [], []],
        Input_type=["c10::Half", "c10::Half", "", "ScalarList"],
    ),
    event("cpu_op", "aten::cudnn_convolution", 10, 30, External_id=3),
    event("cuda_runtime", "cudaLaunchKernel", 12, 5, correlation=40),
    event("cuda_runtime", "cudaLaunchKernel", 20, 6, correlation=41),
    event("user_annotation", f"{MARK}Net/to:0", 60, 10, External_id=4),
    event("cuda_runtime", "cudaMemcpyAsync", 62, 6, correlation=42),
    event("cpu_op", "aten::rand", 80, 5, External_id=5),
    event("cuda_driver", "cuLaunchKernel", 82, 2, correlation=43),
    event("cpu_op", "evaluate", 5, 20, thread=8, External_id=6),
    event("user_annotation", f"{MARK}Net.conv/conv2d:0/grad/Conv:0", 6, 18, thread=8),
    event("cuda_runtime", "cudaLaunchKernel", 9, 4, thread=8, correlation=44),
    # On the device, later and on streams.
    event("kernel", "im2col", 100, 30, thread=20, device=0, stream=7, correlation=40),
    event("kernel", "gemm", 130, 70, thread=20, device=0, stream=7, correlation=41, External_id=3),
    event("gpu_memcpy", "Memcpy HtoD", 90, 5, device=1, stream=13, correlation=42, bytes=4096),
    event("kernel", "philox", 210, 3, thread=20, device=0, stream=7, correlation=43),
    event("kernel", "dgrad", 220, 40, thread=20, device=0, stream=7, correlation=44),
    # Its launch is not in the trace, its activity is.
    event("kernel", "late", 300, 8, thread=20, device=0, stream=7, correlation=99, External_id=2),
    event("gpu_user_annotation", f"{MARK}Net.conv/conv2d:0", 100, 100, thread=20),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 40, "pid": 1, "tid": 7, "ts": 12},
]  # fmt: skip


def device_tool() -> KernelsTool:
    """A tool as it is after a run on two devices."""
    x = torch.ones(1)
    tool = applied(KernelsTool(), lambda: x.exp())
    tool.recording = recording_of([e if e["ph"] != "X" else _renamed(e) for e in DEVICE])
    return tool


def _renamed(item: dict[str, Any]) -> dict[str, Any]:
    """The convolution's events, given to the operator that really ran."""
    return {**item, "name": item["name"].replace(f"{MARK}Net.conv/conv2d:0", f"{MARK}/exp:0")}


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    """By correlation, on whatever thread the launch was; else by the activity's number."""
    found = {a.name: a for a in recording_of(DEVICE).activities if a.is_kernel}
    forward, backward = "Net.conv/conv2d:0", "Net.conv/conv2d:0/grad/Conv:0"
    assert {name: a.op for name, a in found.items()} == {
        "im2col": forward, "gemm": forward, "late": forward, "Memcpy HtoD": "Net/to:0",
        "philox": "", "dgrad": backward,
    }  # fmt: skip
    gemm = found["gemm"]
    assert (gemm.device, gemm.track) == ("cuda:0", "cuda:0 stream 7")
    assert (gemm.start, gemm.duration, gemm.launch, gemm.waited) == (130, 70, 6, 110)
    assert (found["late"].launch, found["late"].waited) == (None, None)
    assert found["Memcpy HtoD"].bytes == 4096
    assert found["Memcpy HtoD"].device == "cuda:1"
    assert found["late"].bytes == 2 * (2 * 3 * 8 * 8 + 4 * 3 * 3 * 3)


def test_what_the_host_did_meanwhile() -> None:
    """Launches are within the activity's own time, inner activities are not."""
    found = {a.name: a for a in recording_of(DEVICE).activities if not a.is_kernel}
    assert found["aten::conv2d"].duration == 46 - 30
    assert found["aten::cudnn_convolution"].duration == 30
    assert found["aten::cudnn_convolution"].op == "Net.conv/conv2d:0"
    # An annotation within an activity is the operator's, not the activity's.
    assert (found["evaluate"].op, found["evaluate"].duration) == ("", 20 - 18)
    assert [(e.op, e.span) for e in recording_of(DEVICE).executions][1] == ("Net/to:0", 10)


def test_times_on_a_device(tmp_path: Path) -> None:
    """Where there is one its kernels are what is shown: in tables, picture and timeline."""
    tool = device_tool()
    summary = tool.summary()
    assert summary["launches"] == 6
    assert summary["device_us"] == 30 + 70 + 5 + 3 + 40 + 8
    assert summary["device_attributed"] == pytest.approx(153 / 156)
    [row] = tool.op_rows()
    assert (row["device_us"], row["kernels"][0]["name"]) == (108, "gemm")
    assert row["kernels"][0]["launch_us"] == 6
    assert list(summary["by_type"]["exp"]["kernels"])[:2] == [
        "gemm (cuda:0)",
        "aten::cudnn_convolution (cpu)",
    ]
    kernels, types = tool.tables()
    assert kernels.title == "kernels: 0.156 ms on the device in 6 kernels, 98.1 % in operators"
    assert kernels.rows[0][:4] == ("gemm", 1, "0.070", "44.9 %")
    assert types.rows == [("exp", 1, 5, "0.108", "69.2 %", "gemm")]
    _, path = tool.write_files(tmp_path, "kernels")
    tracks = {
        e["args"]["name"]: e["tid"]
        for e in json.loads(path.read_text())["traceEvents"]
        if e["ph"] == "M"
    }
    assert set(tracks) == {"thread 7", "thread 8", "cuda:0 stream 7", "cuda:1 stream 13"}
    [chart] = tool.charts()
    assert "gemm (cuda:0)" in chart.values
    assert not any("aten::" in kernel for kernel in chart.values)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"Input_Dims": [[2, 3]], "Input_type": ["float"]}, 24),
        ({"Input_Dims": [[], []], "Input_type": ["double", "Scalar"]}, 8),
        ({"Input_Dims": [[[2], [3]]], "Input_type": ["TensorList"]}, None),
    ],
)  # fmt: skip
def test_sizes(arguments: dict[str, Any], expected: int | None) -> None:
    """Of tensors only; a tensor without dimensions has one element."""
    assert given_bytes(event("cpu_op", "aten::add", 0, 1, **arguments)) == expected


def test_an_empty_timeline() -> None:
    """Nothing recorded is a file without slices."""
    assert list(timeline_file.events(KernelsTool().recording, {})) == []
    activity = Activity("gone", "k", "cpu", 5.0, 1.0, 1.0, "thread 1")
    recording = KernelsTool().recording
    recording.activities.append(activity)
    assert [e["name"] for e in timeline_file.events(recording, {})] == ["k", "thread_name"]
