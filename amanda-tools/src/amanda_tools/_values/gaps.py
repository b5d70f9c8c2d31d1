"""Counts the tensors that a tool did not look at, by kind: complex ones, sparse ones.

::

    missed = NotLookedAt()
    missed.note(tensor)
    missed.by_kind()        # {"sparse_coo": 3}
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from amanda.results import Table
from amanda_tools._values.tensors import reader_of


class NotLookedAt:
    """The number of tensors, at all executions, by :meth:`~.tensors.TensorReader.kind`."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def note(self, tensor: Any, otherwise: str = "", *, unless: bool = False) -> None:
        """Count a tensor, unless it is looked at or its kind, `otherwise` if it has none, is ""."""
        if not unless and (kind := reader_of(tensor).kind(tensor) or otherwise):
            self._counts[kind] += 1

    def by_kind(self) -> dict[str, int]:
        """Return the number of tensors by kind."""
        return dict(self._counts)

    def tables(self, tool: str) -> Iterable[Table]:
        """Yield a table of the kinds, if there are any."""
        if counts := self._counts.most_common():
            yield Table(f"{tool}: tensors that were not looked at", ("kind", "tensors"), counts)
