"""The tool ``trace``."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda.testing import loopback as lb
from amanda_tools.trace import TraceTool
from tests.running import line_of

HERE = "tests/tools/test_trace.py"


def step(net: Any) -> None:
    lb.sum(lb.relu(net(lb.tensor([[2.0]])))).backward()  # the step


def traced(times: int = 2, **options: Any) -> TraceTool:
    net, tool = lb.Sequential(lb.Linear([[1.0]], [0.5])), TraceTool(**options)
    with amanda.apply(tool):
        for _ in range(times):
            step(net)
    return tool


def test_the_result_holds_the_graph() -> None:
    """Rows lead to tensors by number, edges and backward operators to rows by id."""
    result = traced().result()
    rows = {row["id"]: row for row in result["ops"]}

    def tensor(number: int, *shape: int) -> dict[str, Any]:
        return {"tensor": number, "shape": list(shape), "dtype": "", "device": ""}

    assert rows["Sequential.0/linear:0"] == {
        "id": "Sequential.0/linear:0",
        "type": "linear",
        "name": "linear",
        "direction": "forward",
        "module": "0",
        "namespace": "loopback/1.0/eager",
        "source": f"{HERE}:{line_of(__file__, '# the step')}",
        "phase": "forward",
        "inputs": [tensor(0, 1, 1), tensor(1, 1, 1), tensor(2, 1)],
        "input_names": ["input", "weight", "bias"],
        "outputs": [tensor(3, 1, 1)],
        "attributes": {},
    }
    assert result["tensors"][1]["is_parameter"]
    assert [(edge["producer"], edge["consumer"]) for edge in result["edges"]] == [
        ("Sequential.0/linear:0", "/relu:0"),
        ("/relu:0", "/sum:0"),
    ]
    backward = rows["/sum:0/grad/SumBackward:0"]
    assert (backward["direction"], backward["forward"]) == ("backward", "/sum:0")
    assert (result["tool"], result["schema"]) == ("trace", 2)
    assert result["summary"]["forward"] == 3
    assert result["summary"]["backward"] == len(rows) - 3
    assert result["summary"]["edges"] == 2


def test_the_timeline_has_every_execution() -> None:
    """Each iteration's operators have a span, forward and backward, in order of time."""
    tool = traced(times=3)
    assert len(tool.timeline.spans) == 3 * len(tool.result()["ops"])
    ends = [span.start + span.duration for span in tool.timeline.spans]
    assert ends == sorted(ends)
    assert all(span.duration > 0 for span in tool.timeline.spans)
    assert {span.thread for span in tool.timeline.spans} == {threading.get_native_id()}


def test_the_timeline_can_be_limited_or_left_out() -> None:
    """Executions after the limit are counted only; without a timeline there are none."""
    limited = traced(limit=4)
    assert len(limited.timeline.spans) == 4
    assert limited.result()["summary"]["executions_not_kept"] == limited.timeline.dropped > 0
    out = io.StringIO()
    limited.print_summary(out)
    assert "the timeline is full (limit=4)" in out.getvalue()
    without = traced(limit=0)
    assert (without.timeline.spans, without.timeline.dropped) == ([], 0)
    assert without.result()["ops"] == limited.result()["ops"]


def events_of(path: Path, phase: str) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    assert data["displayTimeUnit"] == "ms"
    return [event for event in data["traceEvents"] if event["ph"] == phase]


def test_the_file_for_perfetto(tmp_path: Path) -> None:
    """The timeline is in the trace-event format."""
    tool = traced()
    [path] = tool.write_files(tmp_path, "trace")
    assert path.name == "trace.timeline.json"
    operators = [e for e in events_of(path, "X") if e["cat"] in ("forward", "backward")]
    assert len(operators) == len(tool.timeline.spans)
    assert {**operators[0], "ts": 0, "dur": 0, "pid": 0, "tid": 0} == {
        "name": "linear",
        "cat": "forward",
        "ph": "X",
        "ts": 0,
        "dur": 0,
        "pid": 0,
        "tid": 0,
        "args": {
            "id": "Sequential.0/linear:0",
            "module": "0",
            "source": f"{HERE}:{line_of(__file__, '# the step')}",
        },
    }


def test_modules_have_tracks_above_their_operators(tmp_path: Path) -> None:
    """Each call of a module is a slice around its operators, inside of its parent's slice."""
    inner = lb.Sequential(lb.Linear([[1.0]]), lb.Linear([[2.0]]))
    net, tool = lb.Sequential(inner, lb.Linear([[3.0]])), TraceTool()
    with amanda.apply(tool):
        for _ in range(2):
            step(net)
    [path] = tool.write_files(tmp_path, "trace")
    slices = [e for e in events_of(path, "X") if e["cat"] == "module"]
    forward = [e for e in slices if "(backward)" not in e["args"]["module"]]
    assert [e["args"]["module"] for e in forward] == 2 * [
        "Sequential.0.0", "Sequential.0.1", "Sequential.0", "Sequential.1", "Sequential",
    ]  # fmt: skip
    operators = [e for e in events_of(path, "X") if e["cat"] in ("forward", "backward")]
    assert {e["tid"] for e in slices}.isdisjoint(e["tid"] for e in operators)
    for event in forward[:4]:
        outer = forward[4]
        assert outer["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-6
    held = [e for e in operators if e["args"]["id"].startswith("Sequential.0.0/")]
    assert any(forward[0]["ts"] <= e["ts"] for e in held)
    names = {e["tid"]: e["args"]["name"] for e in events_of(path, "M")}
    assert all(names[e["tid"]].startswith("modules") for e in slices)


def test_a_long_run_is_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    """Most spans of many are in a file; all of them are read back and written."""
    tool = TraceTool()
    with amanda.apply(tool):
        for _ in range(5000):
            lb.relu(lb.tensor([1.0]))
            amanda.new_iteration()
    timeline = tool.timeline
    assert len(timeline.spans) == timeline.kept == 5000
    assert sum(s.duration for s in timeline.spans) / 1e9 == pytest.approx(
        sum(timeline.seconds().values())
    )
    [path] = tool.write_files(tmp_path, "trace")
    assert sum(e["cat"] in ("forward", "backward") for e in events_of(path, "X")) == 5000


def test_a_limit_within_what_waits() -> None:
    """The first spans are kept, to the very one; the others are counted with their times."""
    tool = TraceTool(limit=3000)
    with amanda.apply(tool):
        for _ in range(5000):
            lb.relu(lb.tensor([1.0]))
            amanda.new_iteration()
    timeline = tool.timeline
    assert (timeline.kept, timeline.dropped) == (3000, 2000)
    starts = [span.start for span in timeline.spans]
    assert len(starts) == 3000
    assert starts == sorted(starts)
    [total] = timeline.totals().values()
    assert total.calls == 5000
    assert 0 < total.shortest <= total.nanoseconds / 5000 <= total.longest
    assert sum(span.duration for span in timeline.spans) < total.nanoseconds


def test_a_full_disk_costs_the_timeline_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be written is counted, and the program goes on."""

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            """Nothing waits."""

        def close(self) -> None:
            """Nothing has been opened."""

    tool = TraceTool()
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with amanda.apply(tool):
        for _ in range(5000):
            lb.relu(lb.tensor([1.0]))
            amanda.new_iteration()
    assert (tool.timeline.kept, tool.timeline.dropped) == (0, 5000)
    assert tool.summary()["executions_not_kept"] == 5000


def test_operators_that_are_met_later_are_connected_on_demand() -> None:
    """A branch that is first taken in the second iteration reads a tensor of the first."""

    def run(tool: TraceTool) -> list[tuple[str, str]]:
        with amanda.apply(tool):
            for i in range(2):
                y = lb.relu(lb.tensor([1.0]))
                if i:
                    lb.mul(y, 2.0)
                amanda.new_iteration()
        return [(edge.producer, edge.consumer) for edge in tool.graph.edges]

    assert run(TraceTool(follow=True)) == [("/relu:0", "/mul:0")]
    assert run(TraceTool()) == []


def test_nothing_more_is_written_than_asked_for(tmp_path: Path) -> None:
    """Without a timeline the JSON file is all there is."""
    assert list(traced(limit=0).write_files(tmp_path, "trace")) == []


def test_the_summary_shows_types_and_modules() -> None:
    """The tables count operators by type, forward and backward, and by module."""
    out = io.StringIO()
    tool = traced(limit=0)
    tool.prints_all = True
    tool.print_summary(out)
    text = out.getvalue()
    assert "trace: 3 forward ops, 2 edges" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["relu", "1"] in rows
    assert ["SumBackward", "1"] in rows
    assert ["0", "forward", "1"] in rows


def test_arrows_lead_from_forward_to_backward_operators(tmp_path: Path) -> None:
    """Of each execution, within the slices of both."""
    [path] = traced(times=2).write_files(tmp_path, "trace")
    events = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] in ("forward", "backward")]
    ends = {way: {e["id"]: e for e in events if e["ph"] == way} for way in "sf"}
    assert len(ends["s"]) == len(ends["f"]) == sum(e["cat"] == "backward" for e in slices) > 0

    def around(event: dict[str, Any], category: str) -> dict[str, Any]:
        [found] = [
            e
            for e in slices
            if e["cat"] == category and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
        ]
        return found

    for number, begin in ends["s"].items():
        forward, backward = around(begin, "forward"), around(ends["f"][number], "backward")
        assert backward["args"]["id"].startswith(forward["args"]["id"])
