"""The tools on PyTorch: replay of real models, counts, the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
from amanda.tools.graph import Graph
from amanda.tools.graph_tracing import GraphTracingTool
from amanda_tools.count import CountTool
from amanda_tools.trace import TraceTool
from tests import models
from tests.running import run_python

SMALL = list(models.ZOO)


def traced(model: Any, inputs: Any) -> tuple[Graph, Any]:
    """The graph of one forward pass, and what the model returned."""
    tool = GraphTracingTool()
    torch.manual_seed(1)
    with amanda.apply(tool):
        output = model(**inputs)
    return tool.graph, output


def replayed(graph: Graph, inputs: Any, output: Any) -> list[Any]:
    """What the graph makes of the same inputs, with the same random numbers."""
    known = {graph.tensor_of(t): t.clone() for t in models.tensors(inputs) if graph.tensor_of(t)}
    torch.manual_seed(1)
    return graph.replay(known, [graph.tensor_of(t) for t in models.tensors(output)])


@pytest.mark.parametrize("name", SMALL)
def test_a_replay_reproduces_the_model_bit_for_bit(name: str) -> None:
    """The operators alone, run again on the same inputs, give the model's outputs in training."""
    model, inputs = models.build(name)
    graph, output = traced(model, inputs)
    expected = list(models.tensors(output))
    assert expected
    for again, tensor in zip(replayed(graph, inputs, output), expected, strict=True):
        assert again is not tensor
        assert torch.equal(again, tensor)


@pytest.mark.parametrize("name", models.FAST_PATH)
def test_a_replay_reproduces_the_native_fast_path(name: str) -> None:
    """In eval mode without gradients the fused operators are traced and replayed."""
    model, inputs = models.build(name, training=False)
    with torch.no_grad():
        graph, output = traced(model, inputs)
        expected = list(models.tensors(output))
        for again, tensor in zip(replayed(graph, inputs, output), expected, strict=True):
            assert torch.equal(again, tensor)


def test_a_replay_has_gradients() -> None:
    """The replay takes part in AD as the model does."""
    model, inputs = models.build("resnet18")
    graph, output = traced(model, inputs)
    models.loss(output).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    models.loss(replayed(graph, inputs, output)).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_edges_follow_in_place_operators_and_views() -> None:
    """A tensor that was changed in place is read from the operator that changed it."""

    def run(x: Any) -> Any:
        y = x * 2
        y += 1
        y.view(-1).mul_(0.5)
        return torch.cat([y, torch.relu_(y)])

    tool, x = GraphTracingTool(), torch.rand(2, 3)
    with amanda.apply(tool):
        z = run(x)
    edges = [(edge.producer, edge.consumer, edge.input) for edge in tool.graph.edges]
    assert edges == [
        ("/mul:0", "/add_:0", 0),
        ("/add_:0", "/view:0", 0),
        ("/view:0", "/mul_:0", 0),
        ("/add_:0", "/relu_:0", 0),
        ("/relu_:0", "/cat:0", 0),
        ("/relu_:0", "/cat:0", 1),
    ]
    (again,) = tool.graph.replay([x], [tool.graph.tensor_of(z)])
    assert torch.equal(again, z)


@pytest.mark.parametrize("cls", [CountTool, TraceTool])
def test_tables_tell_a_root_module_from_code_outside_of_modules(cls: type[Any]) -> None:
    """What the outermost module runs itself stands under its name, and is not outside."""
    tool = cls()
    with amanda.apply(tool):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).exp()
        torch.nn.Sequential(torch.nn.ReLU())(torch.ones(1))
    [modules] = [table for table in tool.tables() if table.columns[0] == "module"]
    places = {row[0] for row in modules.rows}
    assert places == {"(outside of modules)", "Linear", "0"}


ERRORS = {
    "operator": "torch.mm(torch.ones(2, 3), torch.ones(2, 3))",
    "module": "torch.nn.Sequential(torch.nn.Linear(3, 4))(torch.ones(2, 5))",
    "Python-level function": "torch.nn.functional.cross_entropy(torch.ones(2), torch.ones(3, 4))",
    "operator sign": "torch.ones(2) @ torch.ones(3)",
    "backward": "y = torch.ones(2, requires_grad=True).exp().sum(); y.backward(); y.backward()",
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_traceback_through_the_framework_is_that_of_the_program(
    error: str, tmp_path: Path
) -> None:
    """An error inside of an instrumented operator is shown as without Amanda."""
    (tmp_path / "program.py").write_text(f"import torch\n{ERRORS[error]}\n")
    alone, under = (
        run_python(*words, "program.py", cwd=tmp_path)
        for words in ([], ["-m", "amanda", "run", "-t", "count"])
    )
    assert (under.returncode, alone.returncode) == (1, 1)
    assert under.stderr == alone.stderr
