"""Exceptions of routines on their way through TensorFlow's runtime (contract rule 12).

An exception in a node that calls Python reaches the caller as an error of the runtime (UnknownError
in 2.16 to 2.21), which has its text and not the object. The object is therefore kept here, under a
key that is part of the text::

    raise FAILURES.carrier(error) from None         # in the node
    raise FAILURES.original(runtime_error)          # in the caller
"""

from __future__ import annotations

import collections
import itertools
import re

from amanda.state import Lock

_KEY = re.compile(r"amanda-failure-(\d+)")
_KEPT = 16
"""How many exceptions are kept: several nodes may fail in one run, and the user gets the first."""


class RoutineFailure(Exception):
    """Raised into TensorFlow's runtime in place of an exception of a routine."""


class Failures:
    """Exceptions on their way from a node to the caller, by key."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._keys = itertools.count()
        self._waiting: collections.OrderedDict[int, BaseException] = collections.OrderedDict()

    def carrier(self, error: BaseException) -> RoutineFailure:
        """The exception to raise into the runtime instead of `error`."""
        key = self._lock.hold(self._keep, error)
        return RoutineFailure(f"amanda-failure-{key}: {type(error).__name__}: {error}")

    def _keep(self, error: BaseException) -> int:
        key = next(self._keys)
        self._waiting[key] = error
        while len(self._waiting) > _KEPT:
            self._waiting.popitem(last=False)
        return key

    def original(self, error: BaseException) -> BaseException | None:
        """The exception that `error` carries; None if it carries none."""
        found = _KEY.search(str(error))
        if found is None:
            return None
        return self._lock.hold(self._waiting.pop, int(found[1]), None)


FAILURES = Failures()
