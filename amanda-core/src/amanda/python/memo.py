"""Values that are computed once for equal keys and kept, within a bound."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dictionary of values that could be computed again, with an upper bound on its size.

    Setting a further key empties a full one: a program with ever new keys needs no more memory, and
    its later keys are remembered like its first ones::

        sizes: Memo[str, int] = Memo(2)
        sizes["a"], sizes["b"], sizes["c"] = 1, 2, 3
        sizes  # {"c": 3}

    Args:
        most: the number of entries that it holds at most.
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
