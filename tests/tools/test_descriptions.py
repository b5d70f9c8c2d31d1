"""The descriptions of the tools, which ``amanda tools NAME`` prints."""

from __future__ import annotations

import inspect
import re

import pytest

from amanda import tools
from amanda.cli import grammar, list_installed, tool_options

OURS = sorted(name for name, e in tools.available().items() if e.target.startswith("amanda_tools."))


@pytest.mark.parametrize("name", OURS)
def test_the_example_of_a_tool_is_right(name: str) -> None:
    """Each tool shows a command of itself, with options that it has, of the right types."""
    cls = tools.load(name)
    [example] = re.findall(r"Example: ``amanda run -t (\S+) -o out", inspect.getdoc(cls) or "")
    [spec] = grammar.parse([example])
    assert spec.name == name
    assert tool_options.convert(cls, spec).keys() == spec.options.keys()


@pytest.mark.parametrize("name", OURS)
def test_a_description_is_complete(name: str) -> None:
    """Each option has a text and the result a file; no markup of docstrings is left."""
    lines = list_installed.describe(name)
    assert f"  {name}.json, the result" in lines
    options = [i for i, line in enumerate(lines) if re.match(r"  \w+=", line)]
    assert options
    assert all(lines[i + 1].startswith("      ") for i in options)
    assert not any("``" in line or ":meth:" in line or "<stem>" in line for line in lines)
