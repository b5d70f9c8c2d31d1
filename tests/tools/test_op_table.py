"""The table of operators: its rows, and those that a package adds."""

from __future__ import annotations

import pytest

import amanda
from amanda.testing import loopback as lb
from amanda.tools.description import OpDescription
from amanda_tools import operators
from amanda_tools._operators import op_table
from amanda_tools.flops import FlopsTool
from amanda_tools.path.rules import relu, rule_of

pytestmark = pytest.mark.usefixtures("restored_table")


def described(kind: str, forward: str = "") -> OpDescription:
    return OpDescription("op:0", kind, kind, "", "toy/1/eager", forward)


def test_a_type_without_a_row_is_unknown() -> None:
    """Its FLOPs are, and it may make a NaN."""
    assert operators.find("my_op") == operators.OperatorRow()
    assert not op_table.is_free("my_op")
    assert op_table.can_produce(described("my_op"))
    assert op_table.has_activation("my_op")


def test_a_row_like_another_one_has_all_of_its_columns() -> None:
    """Of every tool; columns that are given take the place of those."""
    operators.register("my_gate", like="relu", bounds=(0.0, 1.0))
    row = operators.find("my_gate")
    assert (row.group, row.bounds) == ("elementwise", (0.0, 1.0))
    assert op_table.is_free("my_gate")
    assert not op_table.can_produce(described("my_gate"))
    assert rule_of("my_gate") is relu
    operators.register("my_linear", like="linear")
    for tool in ("quantize", "inject", "prune:tile"):
        assert op_table.default_types(tool)[-1] == "my_linear"


def test_columns_of_a_row_are_set_one_by_one() -> None:
    """A second call keeps the others; a function is a formula of FLOPs."""
    operators.register("my_op", traits=["passes_values"])
    operators.register("my_op", flops=lambda call: 12)
    assert operators.find("my_op").traits == {"passes_values"}
    tool = FlopsTool()
    operators.register("relu", flops=lambda call: 12)
    with amanda.apply(tool):
        lb.relu(lb.tensor([1.0]))
    assert tool.summary()["flops"] == 12


def test_backward_operators_have_rows_of_their_own() -> None:
    """A gradient that moves elements makes no NaN."""
    operators.register("my_op_backward", backward=True, traits=("passes_values",))
    assert not op_table.can_produce(described("my_op_backward", "my_op:0"))
    assert operators.find("my_op_backward") == operators.OperatorRow()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"like": "rellu"}, r"no type 'rellu'.*relu"),
        ({"group": "views"}, r"no group 'views'.*view"),
        ({"traits": ("passes",)}, r"no trait 'passes'"),
    ],
)
def test_what_the_table_does_not_have_is_refused(columns: dict[str, str], message: str) -> None:
    """The message names what is like it."""
    with pytest.raises(ValueError, match=message):
        operators.register("my_op", **columns)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colour"):
        operators.register("my_op", colour="red")
    with pytest.raises(TypeError, match="text"):
        operators.register(lb.relu, group="view")  # type: ignore[arg-type]


def test_each_type_is_in_one_group() -> None:
    """No text of the table names a type twice."""
    kinds = [kind for group in operators.GROUPS.values() for kind in group.split()]
    assert len(kinds) == len(set(kinds))
