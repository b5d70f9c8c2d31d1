"""The parts of a docstring in Google's form: its prose, and the entries of its sections."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(
    r"^[ \t]*(Args|Arguments|Attributes|Returns|Raises|Yields):[ \t]*$", re.MULTILINE
)
_WITH_NAMES = frozenset({"Args", "Arguments", "Attributes"})
_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?: \([^)]*\))?:\s*(.*)$")


def prose(docstring: str | None) -> str:
    """The part before the first section: the others concern callers in Python."""
    cleaned = inspect.cleandoc(docstring or "")
    found = _SECTION.search(cleaned)
    return (cleaned if found is None else cleaned[: found.start()]).rstrip()


def entries(docstring: str) -> dict[str, str]:
    """The entries of the sections "Args" and "Attributes", by name."""
    texts: dict[str, str] = {}
    name, indent, inside = "", 0, False
    for line in docstring.splitlines():
        if section := _SECTION.match(line):
            inside = section[1] in _WITH_NAMES
        elif line.strip() and not line.startswith(" "):
            inside = False
        elif inside and (entry := _ENTRY.match(line)) and len(entry[1]) <= (indent or 99):
            name, indent = entry[2], len(entry[1])
            texts[name] = entry[3]
        elif inside and name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts
