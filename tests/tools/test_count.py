"""The tool ``count``."""

from __future__ import annotations

import io
from typing import Any

import pytest

import amanda
from amanda.testing import loopback as lb
from amanda_tools.count import CountTool
from tests.running import applied


def model() -> lb.Sequential:
    return lb.Sequential(lb.Linear([[1.0]]), lb.Linear([[2.0]], [0.5]))


def step(net: Any) -> None:
    lb.sum(lb.relu(net(lb.tensor([[2.0]])))).backward()


def test_executions_are_counted_and_not_analyses() -> None:
    """Each execution of each iteration counts, forward and backward."""
    net = model()
    result = applied(CountTool(), lambda: [step(net) for _ in range(3)]).result()
    summary = result["summary"]
    assert summary["by_type"]["forward"]["linear"] == {"ops": 2, "executions": 6}
    assert summary["by_type"]["backward"]["MatmulBackward"] == {"ops": 2, "executions": 6}
    assert summary["by_type"]["backward"]["AccumulateGrad"] == {"ops": 3, "executions": 9}
    assert summary["forward"] == 12
    assert summary["backward"] == sum(
        row["executions"] for row in result["ops"] if row["direction"] == "backward"
    )


def test_an_operator_that_raised_is_not_counted() -> None:
    """The program may have caught the exception, and has gone on."""

    def run() -> None:
        lb.linear(lb.tensor([[1.0]]), lb.tensor([[1.0]]))
        amanda.new_iteration()
        with pytest.raises(ValueError, match="do not fit"):
            lb.linear(lb.tensor([[1.0, 2.0]]), lb.tensor([[1.0]]))

    assert applied(CountTool(), run).result()["summary"]["by_type"]["forward"] == {
        "linear": {"ops": 1, "executions": 1}
    }


def test_executions_are_counted_by_module() -> None:
    """The module path of the forward operator counts for its backward operators too."""
    net = model()
    by_module = applied(CountTool(), lambda: step(net)).result()["summary"]["by_module"]
    assert by_module["forward"] == {
        "": {"ops": 2, "executions": 2},
        "0": {"ops": 1, "executions": 1},
        "1": {"ops": 1, "executions": 1},
    }
    assert set(by_module["backward"]) == {"", "0", "1"}


def test_the_result_has_the_common_form() -> None:
    """One row per operator, with the keys of all tools and ``executions``."""
    result = applied(CountTool(), lambda: lb.relu(lb.parameter([1.0])).backward()).result()
    assert (result["tool"], result["schema"]) == ("count", 1)
    assert result["namespaces"] == ["loopback/1.0/eager"]
    tensor = {"shape": [1], "dtype": "", "device": ""}
    assert result["ops"][0] == {
        "id": "/relu:0", "type": "relu", "name": "relu", "direction": "forward", "module": "",
        "namespace": "loopback/1.0/eager", "phase": "forward", "inputs": [tensor],
        "outputs": [tensor], "attributes": {}, "executions": 1,
    }  # fmt: skip
    assert result["ops"][1] == {
        "id": "/relu:0/grad/ReluBackward:0", "type": "ReluBackward", "name": "ReluBackward",
        "direction": "backward", "module": "", "namespace": "loopback/1.0/eager",
        "forward": "/relu:0", "phase": "backward", "inputs": [tensor], "outputs": [tensor],
        "attributes": {}, "executions": 1,
    }  # fmt: skip


def test_the_summary_shows_types_and_modules() -> None:
    """The tables have the figures of a step and of the run, forward and backward."""
    net, tool, out = model(), CountTool(), io.StringIO()
    with amanda.apply(tool):
        step(net)
        step(net)
    tool.prints_all = True
    tool.print_summary(out)
    text = out.getvalue()
    assert "count: 4 forward executions in a step (8 in the run)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["linear", "2", "2", "4"] in rows
    assert ["TransposeBackward", "2", "2", "4"] in rows
    assert ["1", "1", "5", "12"] in rows


def test_counts_go_on_in_a_second_scope() -> None:
    """A tool that is applied again adds to what it has."""
    tool, x = CountTool(), lb.tensor([1.0])
    for _ in range(2):
        with amanda.apply(tool):
            lb.relu(x)
    assert tool.result()["summary"]["forward"] == 2
