"""Canonical attributes: rules of users, their errors, and the arithmetic of rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import amanda
from amanda.errors import MappingError
from amanda.testing import loopback as lb
from amanda.testing.loopback.driver import LoopbackDriver
from amanda.tools import canonical
from amanda.tools.mapping import MappingTool
from tests.core.conftest import FakeEntryPoint, plugin


def described(mapping: MappingTool) -> list[tuple[dict[str, Any], bool]]:
    """The attributes of one split, and whether a rule gives them."""
    seen: list[tuple[dict[str, Any], bool]] = []

    def look(context: amanda.OpContext) -> None:
        seen.append((canonical.attributes(context), context[canonical.RULE] is not None))

    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(look)
    with amanda.apply(tool, drivers=[LoopbackDriver]):
        lb.split(lb.tensor([[1.0], [2.0]]), 2)
    return seen


def read_split(context: amanda.OpContext) -> Mapping[str, Any]:
    """A rule of a user."""
    return {"sizes": context.get_attrs()["sections"]}


def test_users_register_rules_of_their_own() -> None:
    """A mapping rule made from functions, or from attributes that are always the same."""
    rules = canonical.attribute_rules({"split": read_split})
    assert described(MappingTool([["loopback", rules]])) == [({"sizes": 2}, True)]
    fixed = canonical.attribute_rules({"split": {"axis": 0}})
    assert described(MappingTool([["loopback", fixed]])) == [({"axis": 0}, True)]
    assert described(MappingTool([["pytorch", fixed]])) == [({}, False)]


def test_packages_register_rules_of_their_own(install: Any) -> None:
    """A plugin's attribute rules are among the standard ones."""
    rules = {"loopback": [canonical.attribute_rules({"split": read_split})]}
    install(FakeEntryPoint("mine", plugin(rules=rules)))
    assert described(MappingTool.standard()) == [({"sizes": 2}, True)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["stride"], "must return a mapping of attribute names to values, got a list of 1 (str)"),
        ({1: 2}, "must return a mapping of attribute names to values, got dict {1: 2}"),
    ],
)
def test_a_rule_that_returns_anything_else_is_named(answer: Any, message: str) -> None:
    """The error names the rule, the operator and what came."""
    rules = canonical.attribute_rules({"split": lambda context: answer})
    with pytest.raises(MappingError) as caught:
        described(MappingTool([["loopback", rules]]))
    assert message in str(caught.value)
    assert "for op /split:0" in str(caught.value)


def test_a_rule_that_fails_is_named() -> None:
    """The error names the rule and the operator, and shows the attributes that there are."""
    rules = canonical.attribute_rules(
        {"split": lambda context: {"axis": context.get_attrs()["dim"]}}
    )
    with pytest.raises(MappingError, match=r"for op /split:0 .*KeyError: 'dim'; .*'sections': 2"):
        described(MappingTool([["loopback", rules]]))


def test_what_is_no_rule_is_refused() -> None:
    """Where it is registered, by the type that it stands for."""
    with pytest.raises(TypeError, match="got str 'axis' for 'split'"):
        canonical.attribute_rules({"split": "axis"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "expected"),
    [
        (8, 3, 1, 1, (1, 1)),
        (8, 3, 2, 1, (0, 1)),
        (7, 3, 2, 1, (1, 1)),
        (8, 2, 1, 1, (0, 1)),
        (8, 3, 1, 2, (2, 2)),
        (8, 1, 3, 1, (0, 0)),
        (None, 5, 1, 1, (2, 2)),
    ],
)
def test_padding_by_name_is_resolved_to_numbers(
    size: int | None, kernel: int, stride: int, dilation: int, expected: tuple[int, int]
) -> None:
    """With the size of the input, which a stride of 1 does not need."""
    assert canonical.same_padding([size], [kernel], [stride], [dilation]) == (expected,)
    assert canonical.same_padding([None], [kernel], [2], [dilation]) is None


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([slice(None), slice(1, 3)], ((0, 4, 1), (1, 3, 1))),
        ([..., -1], ((0, 4, 1), (0, 5, 1), 5)),
        ([None, 0], (None, 0)),
        ([slice(None)], ()),
        ([0, ..., "tensor"], (0, (0, 5, 1), "tensor")),
        ([slice(None, None, -1)], ((3, -1, -1),)),
    ],
)
def test_an_index_has_numbers_for_each_axis(items: list[Any], expected: tuple[Any, ...]) -> None:
    """Begin, end and step of slices; what takes everything at the end is left out."""
    assert canonical.index_items(items, (4, 5, 6)) == expected


def test_an_index_after_an_unknown_number_of_axes_is_unknown() -> None:
    """Without the rank of the tensor an ellipsis in front of other items tells nothing."""
    assert canonical.index_items([..., 0], None) is None
    assert canonical.index_items([0, ...], None) == (0,)
