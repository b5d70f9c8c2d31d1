"""A ledger of replaced attributes that is undone exactly, in reverse order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class PatchSet:
    """Replaces attributes of modules, classes and objects and puts them back.

    Class attributes are read from ``__dict__``, so that descriptors
    (static and class methods) come back as they were, and an attribute that
    a class only inherited is removed again.
    """

    def __init__(self) -> None:
        self._ledger: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._ledger)

    def set(self, target: Any, name: str, value: Any, *, create: bool = False) -> None:
        """Set ``target.name`` to `value`.

        Args:
            create: allow an attribute that `target` does not have yet.

        Raises:
            AttributeError: there is no such attribute and `create` is not given.
        """
        if not create and not hasattr(target, name):
            raise AttributeError(f"{target!r} has no attribute {name!r} to patch")
        old = vars(target).get(name, _ABSENT) if inspect.isclass(target) else None
        if not inspect.isclass(target):
            own = getattr(target, "__dict__", None)
            old = own.get(name, _ABSENT) if own is not None else getattr(target, name, _ABSENT)
        self._ledger.append((target, name, old))
        setattr(target, name, value)

    def wrap(self, target: Any, name: str, wrapper: Callable[[Any], Any]) -> Any:
        """Replace ``target.name`` by ``wrapper(vanilla)``; returns the vanilla one."""
        vanilla = inspect.getattr_static(target, name)
        self.set(target, name, wrapper(vanilla))
        return vanilla

    def undo(self) -> None:
        """Put every attribute back; harmless when called twice."""
        while self._ledger:
            target, name, old = self._ledger.pop()
            if old is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, old)
