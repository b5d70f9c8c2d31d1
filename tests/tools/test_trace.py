"""The tool ``trace``."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import amanda
from amanda.testing import loopback as lb
from amanda_tools.trace import TraceTool, dot_lines


def step(net: Any) -> None:
    lb.sum(lb.relu(net(lb.tensor([[2.0]])))).backward()


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
    assert rows["Sequential.0/linear:0"] == {
        "id": "Sequential.0/linear:0",
        "type": "linear",
        "name": "linear",
        "direction": "forward",
        "module": "0",
        "namespace": "loopback/1.0/eager",
        "inputs": [0, 1, 2],
        "input_names": ["input", "weight", "bias"],
        "outputs": [3],
        "attributes": {},
    }
    assert result["tensors"][1]["is_parameter"]
    assert [(edge["producer"], edge["consumer"]) for edge in result["edges"]] == [
        ("Sequential.0/linear:0", "/relu:0"),
        ("/relu:0", "/sum:0"),
    ]
    backward = rows["/sum:0/grad/SumBackward:0"]
    assert (backward["direction"], backward["forward"]) == ("backward", "/sum:0")
    assert (result["tool"], result["schema"]) == ("trace", 1)
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
    without = traced(timeline=False)
    assert (without.timeline.spans, without.timeline.dropped) == ([], 0)
    assert without.result()["ops"] == limited.result()["ops"]


def test_files_are_written_for_perfetto_and_graphviz(tmp_path: Path) -> None:
    """The timeline is in the trace-event format; the graph is a digraph."""
    tool = traced(dot=True)
    paths = tool.write_files(tmp_path, "trace")
    assert [path.name for path in paths] == ["trace.timeline.json", "trace.dot"]
    data = json.loads(paths[0].read_text())
    assert data["displayTimeUnit"] == "ms"
    assert len(data["traceEvents"]) == len(tool.timeline.spans)
    event = data["traceEvents"][0]
    assert {**event, "ts": 0, "dur": 0, "pid": 0, "tid": 0} == {
        "name": "linear",
        "cat": "forward",
        "ph": "X",
        "ts": 0,
        "dur": 0,
        "pid": 0,
        "tid": 0,
        "args": {"id": "Sequential.0/linear:0", "module": "0"},
    }
    assert paths[1].read_text().splitlines()[0] == "digraph amanda {"


def test_the_digraph_quotes_its_names() -> None:
    """Ids and labels are strings of Graphviz's language."""
    assert list(dot_lines(traced().graph))[2:-1] == [
        '  "Sequential.0/linear:0" [label="linear\\n0"];',
        '  "/relu:0" [label="relu"];',
        '  "/sum:0" [label="sum"];',
        '  "Sequential.0/linear:0" -> "/relu:0";',
        '  "/relu:0" -> "/sum:0";',
    ]


def test_nothing_more_is_written_than_asked_for(tmp_path: Path) -> None:
    """Without timeline and digraph the JSON file is all there is."""
    assert list(traced(timeline=False).write_files(tmp_path, "trace")) == []


def test_the_summary_shows_types_and_modules() -> None:
    """The tables count operators by type, forward and backward, and by module."""
    out = io.StringIO()
    traced(timeline=False).print_summary(out)
    text = out.getvalue()
    assert "trace: 3 forward ops, 2 edges" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["relu", "1"] in rows
    assert ["SumBackward", "1"] in rows
    assert ["0", "forward", "1"] in rows


def test_it_is_found_by_its_short_name() -> None:
    """``amanda.tools.load`` gives the class."""
    assert amanda.tools.load("trace") is TraceTool
