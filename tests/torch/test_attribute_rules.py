"""Canonical attributes of PyTorch's operators in forms that few programs use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amanda
from amanda.tools import canonical
from amanda.tools.canonical import attribute_rules
from amanda.tools.description import OpDescription, describe
from amanda.tools.mapping import MappingTool


def attributes_of(program: Any) -> dict[str, Any]:
    """Those of the only operator."""
    found: list[dict[str, Any]] = []
    tool = amanda.Tool()
    tool.depends_on(MappingTool.standard())
    tool.add_inst_for_op(lambda context: found.append(canonical.attributes(context)))
    with amanda.apply(tool):
        program()
    return found[0]


X, NUMBER = torch.rand(2, 3, 4), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda: NUMBER.squeeze(0), {"axis": ()}),
        (lambda: NUMBER.t(), {"perm": ()}),
        (lambda: X.mT, {"perm": (0, 2, 1)}),
        (lambda: X.chunk(2, -1), {"axis": 2, "sizes": (2, 2)}),
        (lambda: X.split(2, 1), {"axis": 1, "sizes": (2, 1)}),
        (lambda: X.view(6, -1), {"shape": (6, 4)}),
        (lambda: X.flatten(-2), {"shape": (2, 12)}),
        (lambda: X.expand(5, -1, -1, -1), {"shape": (5, 2, 3, 4)}),
        (lambda: X[..., 1:, None], {"index": ((0, 2, 1), (0, 3, 1), (1, 4, 1), None)}),
        (lambda: X.select(-1, 2), {"index": ((0, 2, 1), (0, 3, 1), 2)}),
        (lambda: X.half(), {"dtype": "float16"}),
        (lambda: X.to("cpu"), {}),
        (lambda: X.type("torch.DoubleTensor"), {}),
    ],
)
def test_attributes_are_resolved(program: Any, expected: dict[str, Any]) -> None:
    """Axes are counted from the first one, and sizes are numbers."""
    assert attributes_of(program) == expected


def test_backward_operators_have_the_description_of_their_forward_operator() -> None:
    """Where a tool has described the forward operator, its rule does not run again for each
    backward operator."""
    asked: list[str] = []
    described: list[OpDescription] = []

    def rule(context: amanda.OpContext) -> dict[str, Any]:
        asked.append(context.get_op_id())
        return {"size": 2}

    tool = amanda.Tool()
    tool.depends_on(
        MappingTool.standard(), MappingTool([["pytorch", attribute_rules({"sigmoid": rule})]])
    )
    for backward in (False, True):
        tool.add_inst_for_op(lambda c: described.append(describe(c)), backward=backward)
    x = torch.rand(2, requires_grad=True)
    with amanda.apply(tool):
        x.sigmoid().sum().backward()
    found = {op.name: op.attributes for op in described}
    assert found["sigmoid"] == found["SigmoidBackward0"] == {"size": 2}
    assert found["SigmoidBackward0"] == found["AccumulateGrad"]
    assert asked == ["/sigmoid:0"]


@torch.library.custom_op("amanda_attribute_rules::linear", mutates_args=())
def linear_of_a_library(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * scale


class Gelu(torch.autograd.Function):
    """As a library's faster one; its name is set below to that of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


Gelu.__name__ = "gelu"


def test_an_operator_of_a_library_has_a_type_of_its_own() -> None:
    """An operator of a library, or a Function, whose name PyTorch has as well is no operator of
    PyTorch: it has another type, no weight, and FLOPs that are not known."""
    tool, flops = amanda.Tool(), amanda.tools.load("flops")()
    found: list[tuple[str, Any]] = []
    tool.depends_on(MappingTool.standard())
    tool.add_inst_for_op(lambda c: found.append((c["op_type"], c["weight_index"])))
    with amanda.apply(tool, flops):
        linear_of_a_library(X, 2.0)
        Gelu.apply(X.clone().requires_grad_()).backward(X)  # type: ignore[no-untyped-call]
    library, function = "amanda_attribute_rules::linear", f"{__name__}::gelu"
    assert found == [(library, None), ("clone", None), (function, None)]
    counted = {row["type"]: row["counted"] for row in flops.result()["ops"]}
    assert counted[library] == counted[function] == counted[f"{function}_backward"] == "unknown"
