"""The grammar of ``-t``."""

import pytest

from amanda.cli.grammar import ToolSpec, parse, split_list, split_names


@pytest.mark.parametrize(
    ("texts", "specs"),
    [
        (["count"], [ToolSpec("count")]),
        (["count,trace"], [ToolSpec("count"), ToolSpec("trace")]),
        (["count", "trace"], [ToolSpec("count"), ToolSpec("trace")]),
        (["count:ops=conv2d+linear"], [ToolSpec("count", {"ops": "conv2d+linear"})]),
        (["t:a=1,b=2,u"], [ToolSpec("t", {"a": "1", "b": "2"}), ToolSpec("u")]),
        (["t,u:a=1"], [ToolSpec("t"), ToolSpec("u", {"a": "1"})]),
        (["t:a=1,u:b=2"], [ToolSpec("t", {"a": "1"}), ToolSpec("u", {"b": "2"})]),
        (["t,a=1"], [ToolSpec("t", {"a": "1"})]),
        (["t:a=x:y=z"], [ToolSpec("t", {"a": "x:y=z"})]),
        (["t:a="], [ToolSpec("t", {"a": ""})]),
        (["t,t"], [ToolSpec("t"), ToolSpec("t")]),
        (["../m.py:t,u"], [ToolSpec("../m.py:t"), ToolSpec("u")]),
        (["a.b:t:x=1,y=2,m:U"], [ToolSpec("a.b:t", {"x": "1", "y": "2"}), ToolSpec("m:U")]),
    ],
)
def test_commas_start_tools_or_continue_options(texts: list[str], specs: list[ToolSpec]) -> None:
    """After a comma an item with ``=`` continues the options, one without starts a tool."""
    assert parse(texts) == specs


def test_a_tool_knows_the_option_before_it() -> None:
    """What looks like a tool may be the next value of a list."""
    specs = parse(["count:ops=conv2d,linear,trace"])
    assert [spec.follows for spec in specs] == ["", "ops=conv2d", ""]


def test_names_are_separated_by_commas_too() -> None:
    """No type of operator and no pattern of modules holds a comma."""
    assert split_names("a+b,c") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("a+b", ["a", "b"]),
        ("a", ["a"]),
        ("", []),
        (r"a\+b+c", ["a+b", "c"]),
        (r"a\,b", ["a,b"]),
        (r"C:\dir", [r"C:\dir"]),
    ],
)
def test_lists_are_joined_with_plus(value: str, items: list[str]) -> None:
    """``+`` separates the items of a list; a backslash keeps it in an item."""
    assert split_list(value) == items


def test_a_backslash_keeps_a_comma_in_a_value() -> None:
    """An escaped comma starts nothing new."""
    assert parse([r"t:a=x\,y"]) == [ToolSpec("t", {"a": r"x\,y"})]
