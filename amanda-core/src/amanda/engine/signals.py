"""Handlers of signals, which run as code of the program also where a tool's code is interrupted.

Within scopes each handler of the program's in Python has a stand-in. Where a tool's code, or what
surrounds it, has changed the state of the main thread, the handler runs as soon as that is
restored::

    stand_in(True)        # a scope begins
    ...
    stand_in(False)       # the last one has ended

The handler of ``KeyboardInterrupt`` and those of Amanda do not wait: they end what runs. The
program sees its own handlers (``signal.getsignal``).
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from amanda.python.patching import PatchSet
from amanda.state import ATTACHED, STATE, Undo, unwind

_PATCHES = PatchSet()


class _StandIn:
    """Stands in for a handler."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        undo = STATE.undo
        if not (undo or STATE.paused):
            self.handler(number, frame)
            return
        # A second signal of this number that comes meanwhile is the same, as for the kernel.
        STATE.waiting.setdefault(number, self.handler)
        if undo and undo[0][0] is not _restore_and_deliver:
            # It is restored last; who unwinds finds that the entry is another one.
            undo[0] = _restore_and_deliver, (undo[0],)


def _restore_and_deliver(entry: Undo) -> None:
    restore, given = entry
    restore(*given)
    try:
        _deliver()
    except BaseException:
        # The rest of the thread's state is restored: nothing is left to unwind.
        STATE.undo.clear()
        raise


def _deliver() -> None:
    waiting = STATE.waiting
    while waiting:
        number = next(iter(waiting))
        with ExitStack() as stack:
            for driver in tuple(ATTACHED.values()):
                stack.enter_context(driver.resumed())
            waiting.pop(number)(number, inspect.currentframe())


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


def deliver() -> None:
    """Run the handlers that have waited, if the state of the thread is the program's own."""
    if not (STATE.undo or STATE.paused):
        _deliver()


def stand_in(wanted: bool) -> None:
    """Give the handlers stand-ins, or the program its handlers back; in the main thread only,
    which alone runs handlers and sets them."""
    if threading.current_thread() is not threading.main_thread() or wanted == bool(_PATCHES):
        return
    if wanted:
        _PATCHES.wrap(signal, "signal", _unseen)
        _PATCHES.wrap(signal, "getsignal", _unseen)
    else:
        _PATCHES.undo()
    change = _stood_in if wanted else _own
    for number in signal.valid_signals():
        handler = _vanilla_getsignal(number)
        if change(handler) is not handler:
            _vanilla_signal(number, change(handler))


_vanilla_signal, _vanilla_getsignal = signal.signal, signal.getsignal


def _stood_in(handler: Any) -> Any:
    """What is to be set for a handler of the program's."""
    is_ours = str(getattr(handler, "__module__", "")).startswith("amanda.")
    ends = is_ours or handler is signal.default_int_handler
    return _StandIn(handler) if callable(handler) and not ends else handler


def _own(handler: Any) -> Any:
    """The handler of the program's behind what is set."""
    return handler.handler if isinstance(handler, _StandIn) else handler


def _unseen(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    """``signal.signal`` or ``signal.getsignal``, by which the program sees its own handlers."""

    @functools.wraps(vanilla)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _stood_in(value) for name, value in kwargs.items()}
        return _own(vanilla(*map(_stood_in, args), **named))

    return call
