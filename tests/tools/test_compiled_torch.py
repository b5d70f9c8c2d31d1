"""Every tool on a compiled model of convolutions, normalisation and attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amanda
from amanda.cli.run import create_tools
from amanda.tools.subgraph_rewriting import Op, SubgraphRewritingTool
from tests.torch.support import fingerprint

TOOLS = (
    *("count", "coverage", "dump", "flight", "flops", "inject", "kernels", "memory", "nan", "path"),
    *("profile", "prune"),
    *("quantize", "quantize:method=qat", "remat", "sparsity", "stats", "stragglers", "trace"),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.norm, self.qkv, self.head = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn(self.conv(x))).flatten(2).transpose(1, 2)
        heads = self.qkv(self.norm(x)).view(x.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        # Not unpacked by Python, for which Dynamo writes one operator for each part.
        q, k, v = heads.unbind()
        x = x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.head(functional.dropout(x, 0.1, self.training).mean(1))


def _trained(tool: str, prepare: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """The results of two training steps and of one inference, and the scope's statistics."""
    torch.manual_seed(0)
    net = Net()
    model, labels, results = prepare(net), torch.tensor([0, 1]), []
    (named,) = create_tools([tool])
    with amanda.apply(named.tool, drivers=["torch-eager"]) as scope:
        for _ in range(2):
            net.zero_grad()
            loss = functional.cross_entropy(model(torch.rand(2, 3, 6, 6)), labels)
            loss.backward()
            results.append(fingerprint([loss, *[p.grad for p in net.parameters()]]))
        with torch.no_grad():
            results.append(fingerprint(model(torch.rand(2, 3, 6, 6))))
    return results, scope.statistics


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning", "ignore::UserWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_works_on_a_compiled_model(tool: str) -> None:
    """A tool does on a compiled model what it does without ``torch.compile``, bit for bit."""
    torch.compiler.reset()
    plain, seen = _trained(tool, lambda net: net)
    compiled, also = _trained(tool, lambda net: torch.compile(net, backend="eager"))
    assert compiled == plain
    assert also.ops_instrumented == seen.ops_instrumented > 0
    assert also.backward_ops_seen == seen.backward_ops_seen
    assert also.compiled


def _steps(tool: amanda.Tool, run: Callable[[nn.Module], Any]) -> Any:
    """The losses and parameters of four steps of SGD, and the outputs after them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = run(net), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    results: list[Any] = []
    with amanda.apply(tool, drivers=["torch-eager"]):
        for _ in range(4):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(torch.rand(3, 4)), torch.tensor([0, 1, 1]))
            loss.backward()
            optimizer.step()
            results.append(fingerprint([loss, *net.parameters()]))
        with torch.no_grad():
            results.append(fingerprint(model.eval()(torch.rand(3, 4))))
    return results


def _rewriting() -> amanda.Tool:
    pattern = Op("relu", Op("layer_norm", "x", "weight", "bias"))
    return SubgraphRewritingTool(pattern, lambda x, weight, bias: torch.tanh(x * weight + bias))


@pytest.mark.filterwarnings("ignore::amanda.errors.CoverageWarning")
@pytest.mark.parametrize(
    "make",
    [_rewriting, lambda: create_tools(["quantize:method=qat"])[0].tool],
    ids=["rewriting", "qat"],
)
def test_tools_that_change_training_train_a_compiled_model_alike(
    make: Callable[[], amanda.Tool],
) -> None:
    """Rewritten subgraphs and rounding in training have on a compiled model the losses, the
    parameters after each step and the outputs that they have without ``torch.compile``."""
    torch.compiler.reset()
    plain = _steps(make(), lambda net: net)
    compiled = _steps(make(), lambda net: torch.compile(net, backend="eager"))
    assert compiled == plain
    assert plain != _steps(amanda.Tool(), lambda net: net)


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).log()  # makes a NaN


def test_lines_of_captured_operators_are_the_programs() -> None:
    """The line of an operator in a compiled function is that of the program, not of code that the
    driver has made."""
    [(number, _)] = [
        (i, line)
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.endswith("# makes a NaN")
    ]
    model = torch.compile(Logarithm(), backend="eager")
    tool = amanda.tools.load("nan")(action="record")
    with amanda.apply(tool, drivers=["torch-graph"]):
        model(-torch.ones(2))
    assert tool.result()["summary"]["first"]["source"].endswith(f"{Path(__file__).name}:{number}")


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, (x - x).log())


def test_the_fate_in_a_compiled_function_is_said_not_to_be_known() -> None:
    """A graph does not tell what a model in it returns: nothing is said to be masked."""
    torch.compiler.reset()
    model = Masked()
    run = torch.compile(lambda x: model(x).sum(), backend="eager")
    tool = amanda.tools.load("nan")(action="record")
    with amanda.apply(tool, drivers=["torch-eager"]), torch.no_grad():
        for _ in range(3):
            run(torch.ones(2))
    assert tool.result()["summary"]["first"]["fate"] == ""
    assert "is not known" in next(iter(tool.tables())).title
