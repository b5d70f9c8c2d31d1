"""Handlers of signals, which run as code of the program also where a tool's code is interrupted.

Where a tool's code, or what surrounds it, has changed the state of the main thread, a handler of
the program's waits until that is restored (:func:`amanda.state.deliver`). While scopes of the main
thread are live, the handlers are installed within deferring ones, which the program does not see::

    defer_handlers(True)     # a scope has begun
    ...
    defer_handlers(False)    # the last one has ended

The handler of ``KeyboardInterrupt`` and those of Amanda do not wait: they end what runs. Nor do
those of asyncio, which do nothing.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from amanda.engine.frames import calling_frame
from amanda.python.patching import PatchSet
from amanda.state import STATE, unwind

_PATCHES = PatchSet()


class _Deferring:
    """Runs a handler, or lets it wait."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # The second signal does not wait: a watchdog has to end a tool that hangs.
        is_second = STATE.waiting.pop(number, None) is not None
        if is_second or not (STATE.undo or STATE.paused):
            self.handler(number, frame)
        else:
            STATE.waiting[number] = lambda: self.handler(number, calling_frame(("contextlib",)))


def defer_handlers(wanted: bool) -> None:
    """Install the program's handlers within deferring ones, or as they were; in the main thread,
    which alone can install handlers."""
    if wanted == bool(_PATCHES):
        return
    if wanted:
        _PATCHES.wrap(signal, "signal", _wrap_signal)
        _PATCHES.wrap(signal, "getsignal", _wrap_getsignal)
    else:
        _PATCHES.undo()
    change = _deferred if wanted else _own
    for number in range(1, signal.NSIG):
        handler = _vanilla_getsignal(number)
        # Installing a handler once more would change its flags.
        if change(handler) is not handler:
            _vanilla_signal(number, change(handler))


_vanilla_signal, _vanilla_getsignal = signal.signal, signal.getsignal


def _deferred(handler: Any) -> Any:
    """The handler to install for one of the program's."""
    module = str(getattr(handler, "__module__", "")).partition(".")[0]
    waits = callable(handler) and handler is not signal.default_int_handler
    return _Deferring(handler) if waits and module not in {"amanda", "asyncio"} else handler


def _own(handler: Any) -> Any:
    """The program's handler in an installed one."""
    return handler.handler if isinstance(handler, _Deferring) else handler


def _wrap_signal(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(vanilla)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        return _own(vanilla(signalnum, _deferred(handler)))

    return set_handler


def _wrap_getsignal(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(vanilla)
    def get_handler(signalnum: Any) -> Any:
        return _own(vanilla(signalnum))

    return get_handler


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Within it, handlers wait: it is code of a framework that calls tools, in a state of its own,
    as a backward pass is."""
    mark = len(STATE.undo)
    STATE.undo.append((bool, ()))
    try:
        yield
    finally:
        unwind(STATE.undo, mark)
