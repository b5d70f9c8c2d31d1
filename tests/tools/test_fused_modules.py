"""Our tools on a module with a native fast path: which see it, and which look inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda import tools
from amanda_tools.count import CountTool
from amanda_tools.flops import FlopsTool
from tests.torch.support import On, after, applied

ACTING: dict[str, dict[str, Any]] = {
    "inject": {"target": "outputs", "ops": ["linear"]},
    "prune": {"sparsity": 0.5},
    "quantize": {},
    # Without gradients it has nothing to do, but it is asked.
    "remat": {},
    "steer": {"at": "*linear:0"},
}
OURS = sorted(name for name, e in tools.available().items() if e.target.startswith("amanda_tools."))
X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
FUSED = "TransformerEncoderLayer/_transformer_encoder_layer_fwd:0"


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def run(layer: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        layer(X)
        result: torch.Tensor = layer(X)
    return result


def met_by(tool: amanda.Tool) -> list[str]:
    """The operators whose analyses run for the tool, from now on."""
    met: list[str] = []
    vars(tool)["before_analyses"] = lambda context: met.append(context.get_op_id())
    return met


def linear(met: Iterable[str]) -> int:
    return sum("/linear:" in op_id for op_id in met)


@pytest.mark.parametrize("name", OURS)
def test_tools_that_watch_see_the_fused_operator_and_tools_that_act_those_inside(
    name: str, layer: nn.Module
) -> None:
    """Of a fused module a tool that only watches is asked about the fused operator alone, and the
    result is that of a vanilla run; a tool that acts is asked about the operators inside."""
    expected = run(layer)
    tool = tools.load(name)(**ACTING.get(name, {}))
    met = met_by(tool)
    with applied(tool):
        result = run(layer)
    assert tool.only_watches is (name not in ACTING)
    if name in ACTING:
        assert linear(set(met)) == 4
        assert torch.equal(result, expected) is (name == "remat")
    else:
        assert set(met) == {FUSED}
        assert torch.equal(result, expected)


def test_a_watching_tool_beside_one_that_acts_elsewhere_sees_the_fused_operator(
    layer: nn.Module,
) -> None:
    """What is asked for another tool's sake is not asked of a tool that only watches."""
    expected, tool = run(layer), FlopsTool()
    with applied(tool, On(conv2d=after(lambda y: y * 2))):
        result = run(layer)
    assert torch.equal(result, expected)
    assert [row["id"] for row in tool.op_rows()] == [FUSED]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_watching_tool_beside_one_that_acts_inside_sees_what_runs(
    is_first: bool, layer: nn.Module
) -> None:
    """Where another tool has the unfused path run, a watching tool counts its operators."""
    tool, acting = CountTool(), On(linear=after(lambda y: y * 2))
    with applied(*((tool, acting) if is_first else (acting, tool))):
        run(layer)
    counts = {row["id"]: row["executions"] for row in tool.op_rows()}
    assert linear(counts) == 4
    assert set(counts.values()) == {2}


class Doubles(CountTool):
    """Inherits the declaration, and acts."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.double)

    def double(self, context: amanda.OpContext) -> None:
        if context["op_type"] == "linear":
            context.insert_after_op(lambda y: y * 2)


class Mixes(CountTool, On):
    """Inherits the declaration of one class, and the actions of another."""

    def __init__(self) -> None:
        CountTool.__init__(self)
        On.__init__(self, linear=after(lambda y: y * 2))


@pytest.mark.parametrize("make", [Doubles, Mixes])
def test_a_declaration_holds_for_its_class_alone(make: Any, layer: nn.Module) -> None:
    """A subclass of a watching tool may act."""
    expected = run(layer)
    with applied(make()):
        assert not torch.equal(run(layer), expected)
