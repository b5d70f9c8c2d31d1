"""Options: from text to the arguments of a tool's constructor."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

import amanda
from amanda.cli.grammar import ToolSpec
from amanda.cli.tool_options import OptionError, convert, options_of
from amanda.tools.reporting import ReportingTool


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Plain(amanda.Tool):
    """A tool whose constructor says all.

    Args:
        items: some items,
            on two lines.
        where (Path): a place.
    """

    def __init__(
        self,
        items: Sequence[str] = (),
        numbers: list[int] | None = None,
        count: int = 1,
        share: float = 0.5,
        deep: bool = False,
        where: Path | None = None,
        mode: Literal["fast", "slow"] = "fast",
        colour: Colour = Colour.RED,
        size: int | str = "auto",
    ) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("items", "a+b", ("a", "b")),
        ("items", "a", ("a",)),
        ("items", "", ()),
        ("numbers", "1+2", [1, 2]),
        ("count", "3", 3),
        ("share", "1e-3", 0.001),
        ("deep", "true", True),
        ("deep", "no", False),
        ("where", "a/b", Path("a/b")),
        ("mode", "slow", "slow"),
        ("colour", "BLUE", Colour.BLUE),
        ("colour", "b", Colour.BLUE),
        ("size", "7", 7),
        ("size", "auto", "auto"),
    ],
)
def test_values_get_the_type_of_the_argument(name: str, text: str, value: Any) -> None:
    """A value is converted to what the constructor's annotation says."""
    converted = convert(Plain, ToolSpec("plain", {name: text}))[name]
    assert converted == value
    assert type(converted) is type(value)


def test_types_are_guessed_where_nothing_is_annotated() -> None:
    """Without an annotation the default's type counts, and without that the value's look."""

    class Bare(amanda.Tool):
        def __init__(self, ops=(), level=1, anything=None, **more):  # type: ignore[no-untyped-def]
            super().__init__()

    texts = {"ops": "a+b", "level": "2", "anything": "2.5", "other": "true", "word": "x"}
    assert convert(Bare, ToolSpec("bare", texts)) == {
        "ops": ("a", "b"),
        "level": 2,
        "anything": 2.5,
        "other": True,
        "word": "x",
    }


@pytest.mark.parametrize("text", ["007", "1_000", "7", "1e5", "inf", "true", "none"])
def test_text_that_looks_like_a_number_stays_text_where_text_is_meant(text: str) -> None:
    """A default that is a text, alone or in a list, says so; so does ``diff:reference``."""

    class Texts(amanda.Tool):
        def __init__(
            self,
            path: Any = "",
            items=("a",),  # type: ignore[no-untyped-def]
            name: str | None = None,
            place: Path | None = None,
        ) -> None:
            super().__init__()

    given = dict.fromkeys(("path", "items", "name", "place"), text)
    assert convert(Texts, ToolSpec("texts", given)) == {
        "path": text,
        "items": (text,),
        "name": text,
        "place": Path(text),
    }
    diff = amanda.tools.load("diff")
    assert convert(diff, ToolSpec("diff", {"reference": text})) == {"reference": text}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", "007", "007"),
        ("size", "1_0", "1_0"),
        ("size", "-7", -7),
        ("share", "08.1", "08.1"),
        ("share", "nan", "nan"),
        ("share", ".5", 0.5),
        ("share", "3", 3),
        ("flag", "1", 1),
        ("flag", "on", True),
        ("anything", "007", "007"),
        ("anything", "inf", "inf"),
        ("anything", "-1e-3", -0.001),
    ],
)
def test_a_number_is_written_as_one_where_text_may_be_meant(
    name: str, text: str, value: Any
) -> None:
    """Of several types that which describes the text best counts, in whatever order they stand."""

    class Unions(amanda.Tool):
        def __init__(
            self,
            size: str | int = "auto",
            share: float | str | int = "auto",
            flag: bool | int = False,
            anything=None,  # type: ignore[no-untyped-def]
        ) -> None:
            super().__init__()

    converted = convert(Unions, ToolSpec("unions", {name: text}))[name]
    assert (converted, type(converted)) == (value, type(value))


def test_a_tool_without_a_constructor_has_no_options() -> None:
    """A class that only derives from Tool can be run, and takes no options."""

    class Empty(amanda.Tool):
        pass

    assert options_of(Empty) == ({}, False)
    with pytest.raises(OptionError, match="it has none"):
        convert(Empty, ToolSpec("empty", {"a": "1"}))


@pytest.mark.parametrize("header", ["", "from __future__ import annotations\n"])
def test_an_annotation_that_names_what_is_not_there_is_none(header: str) -> None:
    """The type is the default's then; Python 3.14 takes such a name without quotes, too."""
    if not header and sys.version_info < (3, 14):
        pytest.skip("this Python computes annotations where they are written")
    source = (
        "class Late(Tool):\n"
        "    def __init__(self, a: Missing = 1, b: list[Missing] = (), c: 'Missing | int' = 2.5,\n"
        "                 d: Literal['x', 'y'] = 'x'):\n"
        "        super().__init__()\n"
    )
    names: dict[str, Any] = {"Tool": amanda.Tool, "Literal": Literal}
    exec(compile(header + source, "program", "exec", dont_inherit=True), names)
    options = {"a": "3", "b": "4", "c": "5", "d": "y"}
    found = convert(names["Late"], ToolSpec("late", options))
    assert found["a"] == 3
    assert found["c"] == 5.0
    assert found["d"] == "y"
    assert list(options_of(names["Late"])[0]) == list(options)


def test_an_options_class_drives_the_command_line_and_the_constructor() -> None:
    """The fields of the options class are the options, with their documentation."""

    @attrs.frozen(kw_only=True)
    class CommonOptions:
        """Options.

        Attributes:
            ops: types to look at.
            limit: how many.
        """

        ops: Sequence[str] = ()
        limit: int = 3

    class Common(ReportingTool[CommonOptions]):
        name = "common"
        Options = CommonOptions

    known, takes_any = options_of(Common)
    assert [(option.head(), option.text) for option in known.values()] == [
        ("ops=text+text+... (default: none)", "types to look at."),
        ("limit=integer (default: 3)", "how many."),
    ]
    assert not takes_any
    arguments = convert(Common, ToolSpec("common", {"ops": "a+b", "limit": "5"}))
    assert Common(**arguments).options == CommonOptions(ops=("a", "b"), limit=5)
    with pytest.raises(TypeError, match="tool common has no option 'limt'; did you mean limit"):
        Common(limt=5)


def test_documentation_of_the_arguments_is_found() -> None:
    """What the sections of the docstring say becomes the option's text."""
    known, _ = options_of(Plain)
    assert known["items"].text == "some items, on two lines."
    assert known["where"].text == "a place."
    assert known["count"].text == ""
