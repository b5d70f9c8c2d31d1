"""Defers garbage collections while analyses run: finalizers are code of the program."""

from __future__ import annotations

import gc
import threading

from amanda.state import COUNT_LOCK, STATE

_STOPPED: dict[int, bool] = {}
"""The threads in which an analysis runs; True if the program's collector was on before it."""


def stop_collections() -> None:
    """Stop the collector until the current thread's state is restored (``STATE.undo``)."""
    thread = threading.get_ident()
    STATE.undo.append((COUNT_LOCK.hold, (_restart, thread)))
    COUNT_LOCK.hold(_stop, thread)


def _stop(thread: int) -> None:
    _STOPPED[thread] = gc.isenabled() or any(_STOPPED.values())
    gc.disable()


def _restart(thread: int) -> None:
    """Restart the collector that a thread has stopped; harmless when called twice."""
    if {thread: True} == _STOPPED:
        gc.enable()
    _STOPPED.pop(thread, None)


def forget_threads() -> None:
    """Forget, in a forked child, threads that do not exist there."""
    for thread in _STOPPED.keys() - {threading.get_ident()}:
        _restart(thread)
