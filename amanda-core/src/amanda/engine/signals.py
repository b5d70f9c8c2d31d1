"""Defers the program's signal handlers while a tool's code runs.

While a tool's code, or code around it, has changed the state of the main thread, a handler of the
program waits until the state is restored (:func:`amanda.state.deliver`). While scopes of the main
thread are live, handlers are wrapped in deferring ones, which the program does not see::

    defer_handlers(True)     # a scope has begun
    ...
    defer_handlers(False)    # the last one has ended

The handlers of ``KeyboardInterrupt`` and of Amanda do not wait: they end the program. Handlers of
asyncio do nothing, and do not wait either.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from amanda.engine.frames import calling_frame
from amanda.python.patching import PatchSet
from amanda.state import STATE, unwind

_PATCHES = PatchSet()


class _Deferring:
    """Calls a handler, or defers the call."""

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
    """Wrap the program's handlers in deferring ones, or restore them; called in the main thread,
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
    """The handler to install for a handler of the program."""
    module = str(getattr(handler, "__module__", "")).partition(".")[0]
    waits = callable(handler) and handler is not signal.default_int_handler
    return _Deferring(handler) if waits and module not in {"amanda", "asyncio"} else handler


def _own(handler: Any) -> Any:
    """The program's handler within an installed one."""
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
    """Within it, handlers wait: for code of a framework that calls tools in a state of its own,
    such as a backward pass."""
    mark = len(STATE.undo)
    STATE.undo.append((bool, ()))
    try:
        yield
    finally:
        unwind(STATE.undo, mark)


def is_unhandled(number: int) -> bool:
    """True if nobody handles or ignores a signal. Of handlers that C code has set, as
    ``faulthandler.register`` does, Python does not know: they are seen on Linux only."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError, LookupError, ValueError):
        status = Path("/proc/self/status").read_text("ascii", "replace")
        caught = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16)
        return not caught >> (number - 1) & 1
    return True
