"""Names of arrays."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from amanda_jax._internals import lowered


class Marks:
    """Names of arrays, which are held weakly: they have no hash."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def mark(self, value: Any, name: str = "") -> None:
        """Name an array, if it has no name yet."""
        value, known = lowered(value), self._known
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            number = id(value)
            if not known.get(number, (None, ""))[1]:
                known[number] = weakref.ref(value, lambda _: known.pop(number, None)), name

    def name(self, value: Any) -> str | None:
        """The name of an array, "" for a marked one without; None for others."""
        found = self._known.get(id(lowered(value)))
        return None if found is None else found[1]
