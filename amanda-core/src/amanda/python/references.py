"""Weak references of Amanda to objects of the program, distinguishable from the program's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

nothing: Callable[[Any], Any] = callable
"""The callback, in C, of a reference that has nothing to do at the end of its object."""


class Reference(weakref.ref[Any]):
    """A weak reference by which Amanda recognizes an object.

    Its class is its own, so that the program never gets this reference from ``weakref.ref``, and a
    framework that refuses to change an object with weak references can ignore ours.

    References are not shared: ``weakref.getweakrefs()``, which would find one, also returns
    references that are being freed with other objects, and then frees them twice (CPython 3.11 and
    3.12).

    Each has a callback, :data:`nothing` at least. Deep in the end of other objects CPython puts off
    the end of a reference, too, if it is of a class of its own. Where its object ends before it and
    has other references, CPython releases the callback of such a reference, whether it has one or
    not: without one the process crashes (3.11 and 3.12, not 3.13).
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __new__(cls, referent: Any, callback: Callable[[Any], Any], /) -> Self: ...


def is_own(reference: Any) -> bool:
    """True if a weak reference is Amanda's: it is of a class of Amanda's, or of its packages."""
    return type(reference).__module__.startswith(("amanda.", "amanda_"))
