"""Context mapping."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda.testing import loopback as lb
from amanda.tools.mapping import MappingTool


def reading(seen: list[Any], mapping: MappingTool, **kind: bool) -> amanda.Tool:
    """A tool that depends on a mapping and notes a key that its rules set."""
    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(lambda context: seen.append(context["kind"]), **kind)
    return tool


def set_kind(context: amanda.OpContext) -> None:
    """A rule."""
    context["kind"] = "sum"


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [("loopback", "sum"), ("loopback/1.0", "sum"), ("", "sum"), ("pytorch", None), ("loop", None)],
)
def test_rules_by_namespace(namespace: str, expected: str | None) -> None:
    """A rule runs where its namespace is a prefix of the context's."""
    seen: list[Any] = []
    with amanda.apply(reading(seen, MappingTool(rules=[[namespace, set_kind]]))):
        lb.add(lb.tensor(1.0), 2.0)
    assert seen == [expected]


def test_rules_run_at_each_point() -> None:
    """Rules run before the analyses of each point, in backward contexts too."""
    points: list[Any] = []

    def rule(context: amanda.OpContext) -> None:
        points.append(context.is_backward())

    mapping = MappingTool(rules=[["loopback", rule]])
    tool = reading([], mapping)
    tool.add_inst_for_op(lambda context: None, backward=True)
    x = lb.tensor(1.0, requires_grad=True)
    with amanda.apply(tool):
        lb.relu(x).backward()
    assert points == [False, True, True]


def test_pairs_of_functions() -> None:
    """Of a pair, the first function runs before the analyses and the second after them."""
    order: list[str] = []
    pair = lambda c: order.append("before"), lambda c: order.append("after")
    mapping = MappingTool(rules=[["loopback", pair]])
    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(lambda context: order.append("analysis"))
    with amanda.apply(tool):
        lb.add(lb.tensor(1.0), 2.0)
    assert order == ["before", "analysis", "after"]


@pytest.mark.parametrize("pair", [(None, set_kind), (set_kind, None)])
def test_half_a_pair(pair: Any) -> None:
    """Either function of a pair may be None."""
    with amanda.apply(reading([], MappingTool(rules=[["loopback", pair]]))):
        lb.add(lb.tensor(1.0), 2.0)


@pytest.mark.parametrize(
    "rule", [["loopback"], ["loopback", 3], [3, set_kind], ["a", print, print, print]]
)
def test_wrong_rules(rule: Any) -> None:
    """A rule of another form is a TypeError that shows the form."""
    with pytest.raises(
        TypeError, match=r"\[namespace, function\] or \[namespace, \(before, after\)\]"
    ):
        MappingTool(rules=[rule])


def test_rules_run_again_with_reanalyse() -> None:
    """When a tool analyses again, the rules run again before it."""
    seen: list[Any] = []
    tool = reading(seen, MappingTool(rules=[["loopback", set_kind]]))
    with amanda.apply(tool):
        for _ in range(2):
            amanda.new_iteration()
            lb.add(lb.tensor(1.0), 2.0)
            tool.reanalyse()
    assert seen == ["sum", "sum"]
