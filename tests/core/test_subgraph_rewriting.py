"""Subgraph rewriting on the loopback framework; on PyTorch and TensorFlow: tests/tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda.testing import loopback as lb
from amanda.tools.subgraph_rewriting import Op, SubgraphRewritingTool


def iterate(tool: SubgraphRewritingTool, run: Callable[[], Any], times: int = 3) -> list[Any]:
    """What some iterations give. The second analyses anew, and hands on what no tool has seen."""
    outputs = []
    with amanda.apply(tool):
        for _ in range(times):
            outputs.append(run().tolist())
            amanda.new_iteration()
    return outputs


def test_a_chain_is_replaced() -> None:
    """Its tensors have no stand-ins: the operators before the root run, and are not read."""
    net = lb.Sequential(lb.Linear([[2.0]], [1.0]), lb.Linear([[3.0]], [0.5]))
    tool = SubgraphRewritingTool(["linear", "relu"], lambda input: lb.mul(input, input))
    outputs = iterate(tool, lambda: lb.relu(net(lb.tensor([[4.0]]))))
    assert (outputs[0], outputs[2]) == ([[27.5]], [[81.0]])
    assert [match.ids for match in tool.matches] == [["Sequential.1/linear:0", "/relu:0"]]


def test_the_replacement_has_gradients() -> None:
    x = lb.parameter([1.0, -2.0])
    tool = SubgraphRewritingTool(Op("relu", Op("mul", "x")), lambda x: lb.mul(x, 5.0))
    with amanda.apply(tool):
        for _ in range(3):
            x.grad = None
            y = lb.relu(lb.mul(x, 3.0))
            lb.sum(y).backward()
            amanda.new_iteration()
    assert y.tolist() == [5.0, -10.0]
    assert x.grad.tolist() == [5.0, 5.0]


def test_the_match_runs_its_operators_with_their_attributes() -> None:
    """And knows them by the names of the pattern; a name that two have is left out."""
    x, y = lb.tensor([[1.0, 2.0]]), lb.tensor([[3.0], [4.0]])
    seen = []

    def replaced(a: Any, b: Any, match: Any) -> Any:
        seen.append((sorted(match.ops), dict(match.attributes("scale"))))
        return match.run("matmul", a, match.run("scale", b))

    pattern = Op("matmul", "a", Op("mul", "b", name="scale"))
    outputs = iterate(
        SubgraphRewritingTool(pattern, replaced), lambda: lb.matmul(x, lb.mul(y, 2.0))
    )
    assert outputs == [[[22.0]]] * 3
    assert seen[-1] == (["matmul", "scale"], {"other": 2.0})
    twice = SubgraphRewritingTool(Op("relu", Op("relu", "x")), lambda x: x)
    iterate(twice, lambda: lb.relu(lb.relu(x)))
    assert twice.matches[0].ops == {}


def test_one_operator_is_removed() -> None:
    x = lb.tensor([-1.0, 2.0])
    outputs = iterate(SubgraphRewritingTool(["relu"]), lambda: lb.relu(x))
    assert outputs == [[0.0, 2.0], [-1.0, 2.0], [-1.0, 2.0]]


def test_an_output_that_others_read_is_a_reason() -> None:
    x = lb.tensor([-1.0, 2.0])

    def run() -> Any:
        y = lb.mul(x, 2.0)
        return lb.add(lb.relu(y), lb.dropout(y, 0.0))

    tool = SubgraphRewritingTool(["mul", "relu"])
    outputs = iterate(tool, run)
    assert outputs == [[-2.0, 8.0]] * 3
    assert tool.matches == []
    assert tool.rejected == [
        (["/mul:0", "/relu:0"], "op /dropout:0 reads the output of op /mul:0, too")
    ]


def test_of_matches_that_overlap_the_first_holds() -> None:
    x = lb.tensor([1.0])
    tool = SubgraphRewritingTool(["relu", "relu"])
    iterate(tool, lambda: lb.relu(lb.relu(lb.relu(x))))
    assert [match.ids for match in tool.matches] == [["/relu:0", "/relu:1"]]
    assert tool.rejected == [(["/relu:1", "/relu:2"], "op /relu:1 is part of another match")]


def test_a_predicate_is_asked_again_when_the_graph_is_known() -> None:
    """The branch that nobody reads goes; the other one stays."""
    x = lb.tensor([1.0])

    def run() -> Any:
        lb.relu(x)
        return lb.add(lb.relu(x), 1.0)

    unread = Op("relu", "x", where=lambda op, graph: not graph.consumers(op.id))
    tool = SubgraphRewritingTool(unread)
    iterate(tool, run)
    assert [match.ids for match in tool.matches] == [["/relu:0"]]
    assert tool.rejected == [
        (["/relu:1"], "the predicate of op /relu:1 does not hold in the whole graph")
    ]


@pytest.mark.parametrize("pattern", ["conv2d", [], [1], 3])
def test_a_pattern_of_another_form_is_refused(pattern: Any) -> None:
    with pytest.raises(TypeError):
        SubgraphRewritingTool(pattern)


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(TypeError, match="an input of a pattern is an Op, a name or None, got 3"):
        Op("add", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a replacement is a function or None"):
        SubgraphRewritingTool(["relu"], 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pattern",
    [
        ["mul_backward"],
        ["MulBackward0", "relu"],
        Op("add", Op("ReluGrad", "x")),
        ["accumulate_grad"],
    ],
)
def test_a_pattern_of_backward_operators_is_refused(pattern: Any) -> None:
    """It would match nothing, silently."""
    with pytest.raises(ValueError, match=r"a pattern is of forward operators, and \w+ is"):
        SubgraphRewritingTool(pattern)
