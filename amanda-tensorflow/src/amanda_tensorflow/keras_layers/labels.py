"""Names of outermost Keras layers in ids: the layer's name, numbered from the second layer on.

Shared by the drivers of all modes and by all threads, so that a model has one name wherever it
runs::

    LABELS.label(model)             # "net"; "net@1" for a second model of that name
"""

from __future__ import annotations

import weakref
from typing import Any

from amanda.state import Lock


class Labels:
    """The names of the outermost layers that ran while a driver was attached."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users: set[int] = set()
        self._counts: dict[str, int] = {}
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def label(self, layer: Any) -> str:
        """The layer's name, ``net``; of the second layer of that name ``net@1``."""
        return self._lock.hold(self._label, layer)

    def _label(self, layer: Any) -> str:
        known = self._known.get(id(layer))
        if known is not None and known[0]() is layer:
            return known[1]
        name = str(layer.name)
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        label = f"{name}@{number}" if number else name
        self._known[id(layer)] = (weakref.ref(layer), label)
        return label

    def hold(self, user: object) -> None:
        """A driver is attached: names stay until it is detached."""
        self._lock.hold(self._users.add, id(user))

    def release(self, user: object) -> None:
        """A driver is detached; with the last one all names are forgotten."""
        self._lock.hold(self._release, id(user))

    def _release(self, user: int) -> None:
        self._users.discard(user)
        if not self._users:
            self._counts.clear()
            self._known.clear()


LABELS = Labels()
