"""The interceptor of the current thread, and a statement that mutes it."""

from __future__ import annotations

import threading
from typing import Any


class Local(threading.local):
    """State of the current thread.

    Attributes:
        interceptor: intercepts the thread's operators; None outside of scopes.
    """

    interceptor: Any = None


LOCAL = Local()


class muted:  # noqa: N801 - reads as a statement
    """Run the current thread vanilla within it; a class, since gradient hooks use it."""

    __slots__ = ("_interceptor",)

    def __enter__(self) -> None:
        self._interceptor = LOCAL.interceptor
        if self._interceptor is not None:
            self._interceptor.mute()

    def __exit__(self, *_: object) -> None:
        if self._interceptor is not None:
            self._interceptor.unmute()
