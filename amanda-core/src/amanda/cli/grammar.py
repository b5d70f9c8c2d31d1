r"""The grammar of ``-t``: ``TOOL[:key=value,...][,TOOL...]``.

After a comma, ``key=value`` continues the options of the current tool, and
anything else starts a new one. The values of a list are joined with ``+``. A
backslash takes the meaning of a separator away: ``\,`` and ``\+``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

_NAME = re.compile(r"([A-Za-z_][\w.-]*/)?[A-Za-z_][\w.-]*")


class GrammarError(ValueError):
    """A ``-t`` argument that does not follow the grammar."""


@attrs.frozen
class ToolSpec:
    """One tool as asked for on the command line.

    Attributes:
        name: its short name, or ``<distribution>/<name>``.
        options: option to value, as written.
    """

    name: str
    options: dict[str, str] = attrs.field(factory=dict)


def parse(texts: Iterable[str]) -> list[ToolSpec]:
    """The tools that the ``-t`` arguments ask for, in order.

    Raises:
        GrammarError: an argument does not follow the grammar.
    """
    specs: list[ToolSpec] = []
    for text in texts:
        specs += _parse_one(text)
    return specs


def split_list(value: str) -> list[str]:
    """The items of a list value, ``conv2d+linear``; of an empty value none."""
    return [unescaped(item) for item in _split(value, "+")] if value else []


def unescaped(value: str) -> str:
    """A value without the backslashes that kept its separators from splitting it."""
    return re.sub(r"\\([,+\\])", r"\1", value)


def _parse_one(text: str) -> list[ToolSpec]:
    specs: list[ToolSpec] = []
    for item in _split(text, ","):
        head, equals, _ = item.partition("=")
        tool, colon, first = item.partition(":")
        if equals and ":" not in head:
            if not specs:
                raise GrammarError(f"-t {text}: {item!r} is an option, but no tool comes before it")
            _add(specs[-1], item, text)
            continue
        if not _NAME.fullmatch(tool):
            raise GrammarError(f"-t {text}: {tool!r} is no name of a tool")
        specs.append(ToolSpec(tool))
        if colon:
            _add(specs[-1], first, text)
    return specs


def _add(spec: ToolSpec, item: str, text: str) -> None:
    key, equals, value = item.partition("=")
    if not equals or not key.isidentifier():
        raise GrammarError(
            f"-t {text}: {item!r} is no option of {spec.name}; options are written key=value"
        )
    if key in spec.options:
        raise GrammarError(
            f"-t {text}: option {key!r} of {spec.name} is given twice; "
            f"the values of a list are joined with '+': {key}=a+b"
        )
    spec.options[key] = value


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator that no backslash precedes."""
    parts = [""]
    for piece in re.split(rf"((?:\\.)|{re.escape(separator)})", text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts
