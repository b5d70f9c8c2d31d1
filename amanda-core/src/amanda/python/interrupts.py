"""Interrupts that wait while a scope begins or ends.

An interrupt (SIGINT, Control-C) may come late, and leaves nothing behind once a scope is left::

    with deferred():
        detach(driver)                      # an interrupt waits here
        interruptible(tool.exit_scope)      # and is raised here
        ...
                                            # or here

Python takes an interrupt where a function begins, a loop goes round, or a call of C returns, in the
main thread only. Changes that an interrupt cuts short outside of ``deferred()`` are undone at the
end of the scope (:func:`amanda.state.unwind`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")

Handler = Callable[[int, FrameType | None], Any]


class _Deferral:
    """The handler of SIGINT within ``deferred()``.

    Attributes:
        outer: the handler that it stands in for.
        is_allowed: True while an interrupt may be raised.
        is_waiting: True if one has come and was not raised.
        is_over: True once the outermost ``deferred()`` has been left. Code that has saved the
            handler meanwhile may set it again later.
    """

    __slots__ = ("is_allowed", "is_over", "is_waiting", "outer")

    def __init__(self, outer: Handler) -> None:
        self.outer = outer
        self.is_allowed = self.is_over = self.is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            self.outer(number, frame)
        elif self.is_allowed:
            # The code that the exception leaves still undoes its changes: further interrupts wait.
            self.is_allowed = False
            self.outer(number, frame)
        else:
            self.is_waiting = True

    def raise_waiting(self) -> None:
        """Raise an interrupt that has waited, where that is allowed."""
        if self.is_waiting and self.is_allowed:
            self.is_waiting = False
            self(signal.SIGINT, None)


class deferred:  # noqa: N801 - reads as a statement
    """Within it, an interrupt waits; it is raised at the end, or in :func:`interruptible`.

    It has no effect without a handler in Python, and in threads other than the main one.
    """

    __slots__ = ("_handler", "_is_outermost", "_was_allowed")

    def __init__(self) -> None:
        self._handler: _Deferral | None = None

    def __enter__(self) -> None:
        outer = _handler()
        if outer is None:
            return
        self._is_outermost = not isinstance(outer, _Deferral)
        self._handler = handler = outer if isinstance(outer, _Deferral) else _Deferral(outer)
        self._was_allowed, handler.is_allowed = handler.is_allowed, False
        if self._is_outermost:
            signal.signal(signal.SIGINT, handler)

    def __exit__(self, *raised: object) -> None:
        handler = self._handler
        if handler is None:
            return
        current: Any = signal.getsignal(signal.SIGINT)
        # The code of a tool may have set another handler.
        if self._is_outermost and current is handler:
            signal.signal(signal.SIGINT, handler.outer)
        handler.is_allowed = self._is_outermost or self._was_allowed
        handler.is_over = self._is_outermost
        handler.raise_waiting()


def interruptible(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function that an interrupt may end, within ``deferred()`` or outside of it."""
    handler = _handler()
    if not isinstance(handler, _Deferral):
        return function(*args)
    try:
        handler.is_allowed = True
        handler.raise_waiting()
        return function(*args)
    finally:
        handler.is_allowed = False


def _handler() -> Handler | None:
    """The handler of interrupts, if it is one in Python and this thread may set another one."""
    if threading.get_ident() != threading.main_thread().ident:
        return None
    handler: Any = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _Deferral) and handler.is_over:
        handler = handler.outer
    return handler if callable(handler) and not isinstance(handler, signal.Handlers) else None
