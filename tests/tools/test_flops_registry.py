"""``amanda_tools.flops.register``, and the formulas of PyTorch's counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import register_flop_formula

import amanda
from amanda.testing import loopback as lb
from amanda.tools.description import OpDescription
from amanda_tools import flops
from amanda_tools._operators import flop_registry
from amanda_tools._operators.signature import OpSignature
from tests.running import applied

pytestmark = pytest.mark.usefixtures("restored_table")


@torch.library.custom_op("amanda_test::scaled", mutates_args=())
def scaled(
    x: torch.Tensor, others: list[torch.Tensor], times: int, by: float = 1.0
) -> torch.Tensor:
    return x * by + sum(others)


@register_flop_formula(torch.ops.amanda_test.scaled)
def scaled_flops(x: Any, others: Any, times: int, by: float = 1.0, *, out_shape: Any = None) -> int:
    assert tuple(out_shape) == tuple(x)
    return math.prod(x) * times + len(others)


@torch.library.custom_op("amanda_test::raw", mutates_args=())
def raw(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@register_flop_formula(torch.ops.amanda_test.raw, get_raw=True)
def raw_flops(x: torch.Tensor, *, out_val: Any = None) -> int:
    return x.numel()


@torch.library.custom_op("amanda_test::own", mutates_args=())
def own(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times


def rows_of(run: Any) -> dict[str, dict[str, Any]]:
    tool = applied(flops.FlopsTool(), run)
    return {row["type"]: row for row in tool.op_rows()}


def test_a_registered_formula_counts() -> None:
    """From the shapes of the inputs and outputs, and the attributes; odd numbers, too."""

    def formula(call: flops.CallShapes) -> int:
        [shape], [result] = call.inputs, call.outputs
        assert shape == result
        return int(call.attributes["times"]) * math.prod(shape or ())

    assert rows_of(lambda: own(torch.ones(2, 3), 5))["own"]["counted"] == "unknown"
    flops.register("own", formula)
    row = rows_of(lambda: [own(torch.ones(1, 3), 5), own(torch.ones(3), 5)])["own"]
    assert (row["flops"], row["macs"], row["counted"]) == (15, 7, "formula")


@pytest.mark.parametrize("error", [None, LookupError, TypeError, ValueError])
def test_what_a_formula_does_not_know_is_unknown(error: type[Exception] | None) -> None:
    """It returns None, or raises an error of shapes; no figure is made up."""

    def formula(call: flops.CallShapes) -> int | None:
        if error is not None:
            raise error
        return None

    flops.register("own", formula)
    row = rows_of(lambda: own(torch.ones(2), 5))["own"]
    assert (row["executions"], row["flops"], row["counted"]) == (1, 0, "unknown")


def test_a_registered_formula_takes_the_place_of_ours() -> None:
    """The last one counts, in ``summary`` as well."""
    flops.register("linear", lambda call: 1000)
    layer = torch.nn.Linear(4, 5)
    assert rows_of(lambda: layer(torch.ones(2, 4)))["linear"]["flops"] == 1000
    found = amanda.summary(layer, torch.ones(2, 4))  # type: ignore[attr-defined]
    assert found.modules[0]["flops"] == 1000


def test_a_framework_without_canonical_types_has_formulas_by_its_names() -> None:
    """Forward and backward; a backward formula gets the call of the forward operator."""

    def thrice(call: flops.CallShapes) -> int | None:
        assert call.forward is not None
        assert call.inputs == call.outputs == call.forward.inputs
        return call.forward_flops and 3 * call.forward_flops

    flops.register("relu", lambda call: 7)
    flops.register("ReluBackward", thrice, backward=True)
    net = lb.Sequential(lb.Linear([[1.0], [2.0]]))
    rows = rows_of(lambda: lb.sum(lb.relu(net(lb.tensor([[2.0]])))).backward())
    assert rows["relu"]["flops"] == 7
    assert rows["ReluBackward"]["flops"] == 21


@pytest.mark.parametrize(
    ("kind", "name", "forward", "expected"),
    [
        # A mapping rule gives the backward operator a canonical type, or none does.
        ("matmul_backward", "vjp", "dot", 2 * 24),
        ("dot_backward", "dot_backward", "dot", 2 * 24),
        # Further operators of the gradient, where a framework has several.
        ("AddGrads", "AddGrads", "dot", None),
    ],
)
def test_one_backward_operator_of_a_product_has_a_formula_by_canonical_type(
    kind: str, name: str, forward: str, expected: int | None
) -> None:
    """A gradient for each factor, in a framework of which we know no names."""
    product = OpDescription(forward, "matmul", forward, "", "jax/1/eager")
    formula = flop_registry.backward_formula_of(
        OpDescription("b", kind, name, "", "jax/1/eager", forward), product
    )
    signature, factors = OpSignature("matmul"), [(2, 3), (3, 2)]
    call = flops.CallShapes(signature, [(2, 2)], factors, flops.CallShapes(signature, factors), 24)
    assert (formula and formula.flops(call)) == expected


def test_registering_what_is_no_formula_is_refused() -> None:
    """A name and a function are asked for."""
    with pytest.raises(TypeError, match="a name and a function"):
        flops.register("mm", 12)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a name and a function"):
        flops.register(torch.mm, lambda call: 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["function", "packet", "overload"])
def test_formulas_of_the_counter_of_pytorch_count(form: str) -> None:
    """Of operators that a program has registered there; rows say whose formula it is."""
    op: Any = {
        "function": scaled,
        "packet": torch.ops.amanda_test.scaled,
        "overload": torch.ops.amanda_test.scaled.default,
    }[form]
    x = torch.ones(2, 3)
    row = rows_of(lambda: op(x, [x, x], 5, by=2.0))["scaled"]
    assert (row["flops"], row["counted"]) == (6 * 5 + 2, "torch.utils.flop_counter")


def test_our_formula_counts_before_that_of_pytorch() -> None:
    """A registered formula is asked first."""
    flops.register("scaled", lambda call: 2)
    x = torch.ones(2, 3)
    row = rows_of(lambda: scaled(x, [x], 5))["scaled"]
    assert (row["flops"], row["counted"]) == (2, "formula")


def test_a_formula_of_pytorch_that_needs_tensors_is_unknown() -> None:
    """Only shapes are kept."""
    row = rows_of(lambda: raw(torch.ones(2, 3)))["raw"]
    assert (row["flops"], row["counted"]) == (0, "unknown")
