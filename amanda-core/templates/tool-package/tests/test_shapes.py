"""The tool on the loopback framework of amanda-core; no other framework is needed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import amanda
import pytest
from amanda.files import write_json
from amanda.testing import loopback as lb

from amanda_shapes.tool import ShapesTool


def program(*sizes: int) -> None:
    """One iteration for each size, of two operators."""
    for size in sizes:
        lb.add(lb.relu(lb.tensor([1.0] * size)), 2.0)
        amanda.new_iteration()


def found(*sizes: int, **options: Any) -> dict[str, Any]:
    """The result of a run."""
    tool = ShapesTool(**options)
    with amanda.apply(tool):
        program(*sizes)
    return tool.result()


def test_the_tool_is_found_by_its_name() -> None:
    """The entry point of this package is installed."""
    assert amanda.tools.load(ShapesTool.name) is ShapesTool
    assert amanda.tools.available()[ShapesTool.name].distribution == "amanda-shapes"


def test_shapes_are_counted() -> None:
    """Each shape with its executions, the most frequent first."""
    result = found(3, 2, 3)
    summary = result["summary"]
    assert (summary["ops"], summary["varying_ops"]) == (2, 2)
    assert [(row["id"], row["executions"]) for row in result["ops"]] == [
        ("/relu:0", 3),
        ("/add:0", 3),
    ]
    assert result["ops"][0]["shapes"] == [
        {"outputs": ((3,),), "executions": 2},
        {"outputs": ((2,),), "executions": 1},
    ]


def test_operators_can_be_selected() -> None:
    """By type, and by whether their shapes vary."""
    assert [row["type"] for row in found(3, 2, ops=["add"])["ops"]] == ["add"]
    assert found(3, 3, varying=True)["ops"] == []


def test_an_unknown_option_is_an_error() -> None:
    """The message tells what it may have been."""
    with pytest.raises(TypeError, match="no option 'op'; did you mean ops"):
        ShapesTool(op=["add"])


def test_the_tool_changes_nothing() -> None:
    """Outputs are the same under the tool, and nothing stays instrumented."""
    x = lb.tensor([1.0, -2.0])
    with amanda.apply(ShapesTool()):
        assert lb.relu(x).tolist() == [1.0, 0.0]
    assert lb.relu(x).tolist() == [1.0, 0.0]


def test_the_summary_and_the_file(tmp_path: Path) -> None:
    """What ``amanda run`` prints and writes."""
    tool, out = ShapesTool(), io.StringIO()
    with amanda.apply(tool):
        program(3)
        lb.split(lb.tensor([1.0, 2.0]), 2)
    tool.print_summary(out)
    lines = out.getvalue().splitlines()
    assert lines[0] == f"{tool.name}: 0 of 3 operators have varying shapes"
    assert lines[-1].split() == ["/split:0", "split", "1", "1", "+", "1"]
    write_json(tmp_path / "result.json", tool.result())
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["tool"], written["schema"]) == (ShapesTool.name, 1)
    assert written["ops"][2]["shapes"] == [{"outputs": [[1], [1]], "executions": 1}]
