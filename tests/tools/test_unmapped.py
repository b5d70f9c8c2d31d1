"""``unmapped``: operators that no mapping rule describes."""

from __future__ import annotations

import io

import torch

import amanda
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool


def program() -> None:
    """Three operators with a rule, and one without."""
    torch.ones(2, 8).relu().sum(1).roll(1)


def test_operators_without_a_type_are_listed() -> None:
    """By type, with the number of operators, and in rows of their own."""
    tool = amanda.tools.load("unmapped")()
    with amanda.apply(tool):
        program()
    found = tool.result()
    assert (found["summary"]["ops"], found["summary"]["unmapped"]) == (3, 1)
    assert found["summary"]["by_type"] == {"roll": {"name": "roll", "ops": 1, "missing": "type"}}
    assert [(row["id"], row["missing"]) for row in found["ops"]] == [("/roll:0", "type")]
    text = io.StringIO()
    tool.print_summary(text)
    assert "unmapped: 1 of 3 forward operators" in text.getvalue()


def test_a_rule_of_the_user_describes_an_operator() -> None:
    """What a rule gives attributes is described, whatever its type is called."""
    tool = amanda.tools.load("unmapped")()
    tool.depends_on(MappingTool([["pytorch", canonical.attribute_rules({"roll": {"axis": None}})]]))
    with amanda.apply(tool):
        program()
    assert tool.result()["ops"] == []


def test_rows_of_tools_have_canonical_attributes() -> None:
    """In types that JSON has; where no rule is, those of the framework."""
    tool = amanda.tools.load("count")()
    with amanda.apply(tool):
        program()
    found = {row["type"]: row["attributes"] for row in tool.result()["ops"]}
    assert found["sum"] == {"axis": [1], "keepdim": False}
    assert found["roll"]["shifts"] == 1
