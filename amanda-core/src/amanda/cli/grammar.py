r"""The grammar of ``-t``: ``TOOL[:key=value,...][,TOOL...]``.

``parse(["stats:tensors=weights+gradients,trace"])`` gives a :class:`ToolSpec` for each tool.

``tools.py:Class`` and ``package.module:Class`` stand for a tool that no package registers. After a
comma, ``key=value`` is a further option of the current tool, and anything else starts a new tool.
The values of a list are joined with ``+``. A backslash escapes a separator: ``\,`` and ``\+``.
``amanda sweep`` takes several values of an option: ``bit=3++7``, ``seed=0..9``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

MOST_RUNS = 100_000
"""Of a sweep, and values of one option."""

_NAME = re.compile(r"([A-Za-z_][\w.-]*/)?[A-Za-z_][\w.-]*")


class GrammarError(ValueError):
    """A ``-t`` argument that does not follow the grammar."""


@attrs.frozen
class ToolSpec:
    """One tool with its options, as written on the command line.

    Attributes:
        name: the short name, ``<distribution>/<name>``, ``tools.py:Class`` or
            ``package.module:Class``.
        options: the text of each option by name, not yet converted.
        follows: the option, as written, that stands right before it; "" if none does.
    """

    name: str
    options: dict[str, str] = attrs.field(factory=dict)
    follows: str = attrs.field(default="", eq=False)


def parse(texts: Iterable[str]) -> list[ToolSpec]:
    """Parse the ``-t`` arguments; the tools are in the order in which they are named.

    Raises:
        GrammarError: an argument does not follow the grammar.
    """
    specs: list[ToolSpec] = []
    for text in texts:
        try:
            specs += _parse_one(text)
        except GrammarError as error:
            if corrected := _corrected(text):
                raise GrammarError(f"{error}; did you mean -t {corrected}?") from None
            raise
    return specs


def _corrected(text: str) -> str:
    """An argument as it is probably meant: other brackets and separators; "" if none parses."""
    made = re.sub(r"\s*([=:,;+])\s*", r"\1", text.strip()).replace(";", ",")
    made = re.sub(r",(?=,)|^,+|[,:]+$", "", made).replace("::", ":")
    made = re.sub(r":(\w+)[:=]", r":\1=", made)
    made = re.sub(r"(=[^:,]*):(?=\w+=)", r"\1,", made)
    if "=" not in made and ":" not in made:
        made = made.replace("+", ",")
    made = re.sub(r"^([\w./-]+)\((.*)\)$", r"\1:\2", made)
    made = re.sub(r"=[\[({]([^\[\](){}=]*)[\])}]", lambda m: f"={m[1].replace(',', '+')}", made)
    made = re.sub(r"^([\w./-]+)\s+(?=\w+=)", r"\1:", made)
    made = re.sub(r"\s+", ",", made)
    try:
        return made if made != text and _parse_one(made) else ""
    except GrammarError:
        return ""


def split_names(value: str) -> list[str]:
    """Split names that hold no commas, which separate them as ``+`` does."""
    return [name for part in split_list(value) for name in part.split(",") if name]


def split_list(value: str) -> list[str]:
    """Split a list value, ``conv2d+linear``, into its items; an empty value has none."""
    return [unescape(item) for item in _split(value, "+")] if value else []


def alternatives(value: str) -> list[str]:
    """The values that a sweep gives an option, still escaped: of ``3++7``, and of ``0..9``.

    Raises:
        GrammarError: there are too many.
    """
    found: list[str] = []
    for part in _split(value, "++"):
        if ends := re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})", part):
            numbers = range(int(ends[1]), int(ends[2]) + 1)
            if len(numbers) > MOST_RUNS:
                raise GrammarError(f"{part} has {len(numbers)} values; {MOST_RUNS} at most are run")
            found += map(str, numbers)
        else:
            found.append(part)
    return list(dict.fromkeys(found))


def unescape(value: str) -> str:
    """Remove the backslashes that escape separators in a value."""
    return re.sub(r"\\([,+\\])", r"\1", value)


def _parse_one(text: str) -> list[ToolSpec]:
    specs: list[ToolSpec] = []
    option = ""
    for item in _split(text, ","):
        head, equals, _ = item.partition("=")
        tool, colon, first = _split_tool(item)
        if equals and ":" not in head:
            if not specs:
                raise GrammarError(f"-t {text}: {item!r} is an option, but no tool comes before it")
            _add(specs[-1], item, text)
            option = item
            continue
        if not text.strip(" ,:"):
            raise GrammarError(f"-t {text!r} names no tool")
        if tool.endswith(".py"):
            raise GrammarError(f"-t {text}: name the class in the file: -t {tool}:CLASS")
        if ":" not in tool and not _NAME.fullmatch(tool):
            raise GrammarError(f"-t {text}: {tool!r} is not a valid tool name")
        specs.append(ToolSpec(tool, follows=option))
        option = first
        if colon:
            _add(specs[-1], first, text)
    return specs


def _split_tool(item: str) -> tuple[str, str, str]:
    """Split an item into the tool, which may be a class of a file or module, ":" and an option."""
    tool, colon, first = item.partition(":")
    name, more, option = first.partition(":")
    if name.isidentifier() and (tool.endswith(".py") or "." in tool or name[0].isupper()):
        return f"{tool}:{name}", more, option
    return tool, colon, first


def _add(spec: ToolSpec, item: str, text: str) -> None:
    key, equals, value = item.partition("=")
    if not equals or not key.isidentifier():
        raise GrammarError(
            f"-t {text}: {item!r} is not an option of {spec.name}; options are written key=value"
        )
    if key in spec.options:
        raise GrammarError(
            f"-t {text}: option {key!r} of {spec.name} is given twice; "
            f"the values of a list are joined with '+': {key}=a+b"
        )
    spec.options[key] = value


def _split(text: str, separator: str) -> list[str]:
    """Split at each separator that is not escaped."""
    parts = [""]
    for piece in re.split(rf"((?:\\.)|{re.escape(separator)})", text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts
