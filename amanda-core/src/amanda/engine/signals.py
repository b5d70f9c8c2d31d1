"""Handlers of signals, which run as code of the program also where a tool's code is interrupted.

Where a tool's code, or what surrounds it, has changed the state of the main thread, a handler of
the program's waits until that is restored (:func:`amanda.state.deliver`). While scopes are live,
the code of the handlers is wrapped. What is installed stays, with its flags and with what C code
has installed over it::

    cover_handlers()      # a scope has begun or ended

The handler of ``KeyboardInterrupt`` and those of Amanda do not wait: they end what runs.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

from amanda.engine.op_ids import calling_frame
from amanda.python.patching import PatchSet
from amanda.state import LIVE_SCOPES, STATE, locked, unwind

_WRAPPED: dict[FunctionType, PatchSet] = {}


def cover_handlers() -> None:
    """Let handlers wait where tools' code runs, while scopes are live; in any thread."""
    if bool(_WRAPPED) != bool(LIVE_SCOPES):
        _wrap_handlers()


def _wrap_handlers() -> None:
    """Wrap the handlers that are installed, and no others; none without live scopes."""
    wrappers: dict[FunctionType | None, Callable[..., Any]] = {}
    if LIVE_SCOPES:
        handlers = map(signal.getsignal, range(1, signal.NSIG))
        wrappers = dict.fromkeys(map(_function_of, handlers), _deferring)
        wrappers[_function_of(signal.signal)] = _wrapping
    for function in _WRAPPED.keys() - wrappers.keys():
        _WRAPPED[function].undo()
        del _WRAPPED[function]
    for added in filter(None, wrappers.keys() - _WRAPPED.keys()):
        patches = _WRAPPED[added] = PatchSet()
        patches.wrap_code(added, wrappers[added])


def _function_of(handler: Any) -> FunctionType | None:
    """The function in Python that a handler of the program's runs; None for other handlers."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if callable(function) and not isinstance(function, FunctionType):
        function = type(function).__call__
    if not isinstance(function, FunctionType) or str(function.__module__).startswith("amanda."):
        return None
    return function


def _wrapping(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    def set_handler(*args: Any, **kwargs: Any) -> Any:
        outer = vanilla(*args, **kwargs)
        if any(map(_function_of, (*args, *kwargs.values()))):
            locked(_wrap_handlers)
        return outer

    return set_handler


def _deferring(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    def handle(*args: Any, **kwargs: Any) -> Any:
        *_, number, frame = None, None, *args
        # Others may call the function with arguments of their own.
        if not isinstance(number, int) or not isinstance(frame, FrameType):
            return vanilla(*args, **kwargs)
        # The second signal does not wait: a watchdog has to end a tool that hangs.
        if not (STATE.undo or STATE.paused) or STATE.waiting.pop(number, None):
            return vanilla(*args, **kwargs)
        STATE.waiting[number] = lambda: vanilla(
            *args[:-1], calling_frame(("contextlib",)), **kwargs
        )
        return None

    return handle


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
