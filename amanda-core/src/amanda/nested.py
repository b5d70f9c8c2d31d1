"""Containers in one another, as arguments and results of operators are: leaves, and plain data.

A container may be held twice, and may hold itself::

    both = [1, (2, {"a": 3})]
    both.append(both)
    list(leaves(both))  # [1, 2, 3]
    plain(both)  # [1, [2, {"a": 3}], "..."]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

SCALARS = (bool, int, float, complex, str, bytes, type(None))
"""Types of plain data that are no containers."""


def items_of(value: Any) -> Iterable[Any] | None:
    """The items of a list, tuple or mapping; None for anything else."""
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if isinstance(value, Mapping) else None


def leaves(value: Any, items: Callable[[Any], Iterable[Any] | None] = items_of) -> Iterator[Any]:
    """The leaves of nested containers, in order; of a container that is held twice, once.

    Args:
        value: a container, or a leaf.
        items: gives the items of a container, and None for a leaf.
    """
    waiting = [value]
    # With the containers: the identity of one that is made for the question is soon another's.
    seen: dict[int, Any] = {}
    while waiting:
        item = waiting.pop()
        held = items(item)
        if held is None:
            yield item
        elif id(item) not in seen:
            seen[id(item)] = item
            waiting.extend(reversed([*held]))


def plain(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """Convert an argument to plain data, which keeps no object of the program alive.

    Args:
        value: the argument, or what is in it.
        around: the containers that it is in. For one that holds itself there is an ellipsis.
    """
    if isinstance(value, SCALARS) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, (list, tuple, Mapping)):
        if any(one is value for one in around):
            return "..."
        around = (*around, value)
        if isinstance(value, Mapping):
            return {str(key): plain(item, around) for key, item in value.items()}
        return [plain(item, around) for item in value]
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else short_text(value)


def short_text(value: Any) -> str:
    """The beginning of an object's text, of any object of the program."""
    if dataclasses.is_dataclass(value) and not set(SCALARS).issuperset(
        map(type, getattr(value, "__dict__", {}).values())
    ):
        # Its text has those of all that it leads to: of a graph's node, each way through the graph.
        return f"<{type(value).__name__}>"
    try:
        text = str(value)
    except Exception:
        # __str__ of the program's classes may fail; tracing must not.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
