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
"""Types of plain data that are not containers."""


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
    # The containers are kept: the identity of a temporary one would soon be another object's.
    seen: dict[int, Any] = {}
    while waiting:
        item = waiting.pop()
        held = items(item)
        if held is None:
            yield item
        elif id(item) not in seen:
            seen[id(item)] = item
            waiting.extend(reversed([*held]))


def converted(
    value: Any,
    leaf: Callable[[Any], Any],
    containers: tuple[type, ...] = (list, tuple),
    parents: tuple[Any, ...] = (),
) -> Any:
    """Convert nested containers to dictionaries with string keys and lists, and leaves by `leaf`.

    Args:
        value: a container, or a leaf.
        leaf: converts a value that is not a container.
        containers: the types that become lists; mappings are always containers.
        parents: the containers that `value` is in. One that contains itself is ``"..."`` there.
    """
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not isinstance(value, containers):
        return leaf(value)
    if any(parent is value for parent in parents):
        return "..."
    parents = (*parents, value)
    if is_mapping:
        return {str(key): converted(item, leaf, containers, parents) for key, item in value.items()}
    return [converted(item, leaf, containers, parents) for item in value]


def plain(value: Any) -> Any:
    """Convert an argument to plain data, which keeps no object of the program alive."""
    # Most values need no conversion.
    return value if type(value) in _SCALARS else converted(value, _plain_leaf)


_SCALARS = frozenset(SCALARS)


def _plain_leaf(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else short_text(value)


def short_text(value: Any) -> str:
    """The beginning of an object's text, of any object of the program."""
    if dataclasses.is_dataclass(value) and not set(SCALARS).issuperset(
        map(type, getattr(value, "__dict__", {}).values())
    ):
        # Its text contains the texts of all objects that it refers to: for a node of a graph, every
        # path through the graph.
        return f"<{type(value).__name__}>"
    try:
        text = str(value)
    except Exception:
        # __str__ of the program's classes may fail; tracing must not.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
