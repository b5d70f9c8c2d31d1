"""Names of outermost Keras layers in ids, and of parameters, numbered from the second one of a name
on.

Shared by the drivers of all modes and by all threads, so that a model has one name wherever it
runs::

    LABELS.label(model)             # "net"; "net@1" for a second model of that name
"""

from __future__ import annotations

import weakref
from typing import Any

from amanda.state import Lock

LOSS = "compile_loss/"
"""The name scope in which a compiled model of Keras 3 computes its loss; ``loss/`` in ids."""


def in_ids(name: str) -> str:
    """A name or name scope outside of layers as ids begin."""
    return name.removeprefix("compile_") if name.startswith(LOSS) else name


class NumberedNames:
    """The names of objects that were met while a driver was attached."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users: set[int] = set()
        self._counts: dict[str, int] = {}
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def label(self, layer: Any) -> str:
        """The layer's name, ``net``; of the second layer of that name ``net@1``."""
        return self.label_of(weakref.ref(layer), str(layer.name))

    def label_of(self, reference: weakref.ref[Any], name: str) -> str:
        """The label of an object that may be gone, as graphs outlive the layers that made them.

        Args:
            reference: Python has one weak reference to each object, also when that has died.
            name: the object's name.
        """
        return self._lock.hold(self._label, reference, name)

    def _label(self, reference: weakref.ref[Any], name: str) -> str:
        known = self._known.get(id(reference))
        if known is not None:
            return known[1]
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        label = f"{name}@{number}" if number else name
        # Kept with its reference, whose address no other one has meanwhile.
        self._known[id(reference)] = reference, label
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


LABELS, PARAMETERS = NumberedNames(), NumberedNames()
