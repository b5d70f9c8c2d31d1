"""Weak references of Amanda's to objects of the program, told from the program's own."""

from __future__ import annotations

import weakref
from typing import Any


class Reference(weakref.ref[Any]):
    """A weak reference by which Amanda recognizes an object.

    It is of a class of its own, and so never the one that the program has made: a framework that
    refuses to change an object to which there are references can leave ours out.
    """

    __slots__ = ()


def reference_to(value: Any) -> Reference:
    """The one reference of this class to an object: there may be very many objects.

    Raises:
        TypeError: the object takes no weak references.
    """
    for one in weakref.getweakrefs(value):
        if type(one) is Reference:
            return one
    return Reference(value)


def is_own(reference: Any) -> bool:
    """Whether a weak reference is Amanda's: it is of a class of Amanda's, or of its packages."""
    return type(reference).__module__.startswith(("amanda.", "amanda_"))
