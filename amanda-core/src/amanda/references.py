"""Weak references of Amanda to objects of the program, distinguishable from the program's own."""

from __future__ import annotations

import weakref
from typing import Any


class Reference(weakref.ref[Any]):
    """A weak reference by which Amanda recognizes an object.

    It is of a class of its own, and so never the one that the program has made: a framework that
    refuses to change an object to which there are references can leave ours out.

    Each is made anew: ``weakref.getweakrefs()``, by which one could be found, also gives references
    that are about to be freed, deep in the end of other objects, and frees them twice then (CPython
    3.11 and 3.12).
    """

    __slots__ = ()


def is_own(reference: Any) -> bool:
    """Whether a weak reference is Amanda's: it is of a class of Amanda's, or of its packages."""
    return type(reference).__module__.startswith(("amanda.", "amanda_"))
