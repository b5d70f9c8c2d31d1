"""Exceptions of routines on their way through TensorFlow's runtime.

An exception that Python code raises in a graph reaches the caller as an error of
the runtime, with the text of the original. Therefore the original is kept here
under a key that travels in the text (design rule 12).
"""

from __future__ import annotations

import collections
import itertools
import re
import threading

_KEY = re.compile(r"amanda-failure-(\d+)")
_KEPT = 16
"""More routines than this may fail in one run; the first of them is what the user sees."""


class RoutineFailure(Exception):
    """What TensorFlow's runtime is told of an exception in a routine."""


class Failures:
    """Exceptions that are on their way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._waiting: collections.OrderedDict[int, BaseException] = collections.OrderedDict()

    def carrier(self, error: BaseException) -> RoutineFailure:
        """What to raise into the runtime instead of `error`."""
        with self._lock:
            key = next(self._keys)
            self._waiting[key] = error
            while len(self._waiting) > _KEPT:
                self._waiting.popitem(last=False)
        return RoutineFailure(f"amanda-failure-{key}: {type(error).__name__}: {error}")

    def original(self, error: BaseException) -> BaseException | None:
        """The exception that `error` carries; None if it carries none."""
        found = _KEY.search(str(error))
        if found is None:
            return None
        with self._lock:
            return self._waiting.pop(int(found[1]), None)


FAILURES = Failures()
