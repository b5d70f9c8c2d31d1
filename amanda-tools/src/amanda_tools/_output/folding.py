"""Blocks of a model that are alike, such as the layers of a transformer, under one name.

``folded({"h.0.fc": 8, "h.1.fc": 8})`` is ``{"h.0.fc": "h.0-1.fc", "h.1.fc": "h.0-1.fc"}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import attrs

from amanda.tools.description import OUTSIDE, place

_NUMBERED = re.compile(r"(.*?)(\d+)")


@attrs.define
class _Part:
    """A module and its parts.

    Attributes:
        path: its path; "" until a path ends here.
        fact: what modules that are alike have in common.
        parts: by separator and name.
    """

    path: str = ""
    fact: Hashable = None
    parts: dict[str, _Part] = attrs.field(factory=dict)

    def likeness(self) -> Hashable:
        """Return a key that is equal for modules that are alike: facts of them and their parts."""
        return self.fact, tuple((name, part.likeness()) for name, part in self.parts.items())


def folded(facts: Mapping[str, Hashable]) -> dict[str, str]:
    """Return for each path its name, which the paths of blocks that are alike share.

    Blocks are alike if their numbers are consecutive, and the paths and facts within them equal.

    Args:
        facts: the paths, each module before its parts, and what has to be equal.
    """
    top = _Part()
    for path, fact in facts.items():
        part = top
        for name in re.findall(r"[./]?[^./]*", path)[:-1]:
            part = part.parts.setdefault(name, _Part())
        part.path, part.fact = path, fact
    return dict(_named(top, ""))


def _named(part: _Part, prefix: str) -> Iterable[tuple[str, str]]:
    """Yield the paths below a module with their names."""
    groups: list[tuple[list[str], Hashable]] = []
    for name, child in part.parts.items():
        likeness = child.likeness()
        if groups and groups[-1][1] == likeness and _follows(groups[-1][0][-1], name):
            groups[-1][0].append(name)
        else:
            groups.append(([name], likeness))
    for names, _ in groups:
        last = _NUMBERED.fullmatch(names[-1])
        label = names[0] if last is None or len(names) == 1 else f"{names[0]}-{last[2]}"
        for child in map(part.parts.__getitem__, names):
            if child.path:
                yield child.path, prefix + label
            yield from _named(child, prefix + label)


def _follows(name: str, other: str) -> bool:
    """True if two names have consecutive numbers."""
    first, second = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(other)
    if first is None or second is None or first[1] != second[1]:
        return False
    return int(second[2]) == int(first[2]) + 1


def folded_rows(
    rows: Iterable[Mapping[str, Any]], fact: Callable[[Mapping[str, Any]], Hashable]
) -> list[dict[str, Any]]:
    """Return the rows of operators with ``module`` as tables show it, blocks that are alike under
    one name, and with ``op``, the name of the operator below that.

    Args:
        rows: as results have them.
        fact: what rows of blocks that are alike have in common, beside types and shapes.
    """
    rows = list(rows)
    facts: dict[str, list[Hashable]] = {}
    for row in rows:
        tensors = str(row["inputs"]), str(row["outputs"])
        facts.setdefault(row["module"], []).append((row["type"], *tensors, fact(row)))
    names = folded({path: tuple(found) for path, found in facts.items()})
    made = []
    for row in rows:
        module, op_id = row["module"], row["id"]
        name = place(op_id, names.get(module, module))
        op = op_id if name == OUTSIDE else f"{name}/{_label(row)}"
        made.append({**row, "module": name, "op": op})
    return made


def _label(row: Mapping[str, Any]) -> str:
    """Return the name of an operator in its module: ``linear``, ``linear:1``, ``linear_backward``,
    ``linear accumulate_grad``."""
    ids: tuple[str, str] = row.get("forward", row["id"]), row["id"]
    forward, own = (op_id.rpartition("/")[2].removesuffix(":0") for op_id in ids)
    if "forward" not in row:
        return forward
    _, colon, number = own.partition(":")
    label = f"{row['type']}{colon}{number}"
    return label if label == f"{forward}_backward" else f"{forward} {label}"


def in_model(op_id: str, module: str) -> str:
    """Return an id, or a text that begins with one, without the outermost module."""
    outermost, dot, rest = op_id.partition(f".{module}")
    return f"{module}{rest}" if module and dot and "/" not in outermost else op_id
