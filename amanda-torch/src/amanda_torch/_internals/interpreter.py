"""Calls at the next event of Python's interpreter."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_EVENTS = 1000
"""Calls and returns of functions until an operator has ended for certain."""


def call_soon(function: Callable[[], bool]) -> None:
    """Call a function in the current thread at the next calls and returns, until it gives True.

    For what PyTorch does not allow within an operator. Nothing where the thread is profiled.
    """
    if sys.getprofile() is not None:
        return
    left = iter(range(_EVENTS))

    def profile(*_: Any) -> None:
        if function() or next(left, None) is None:
            sys.setprofile(None)

    sys.setprofile(profile)


_PENDING: list[Callable[[], Any]] = []


def _call_all(_: Any) -> int:
    while _PENDING:
        _PENDING.pop()()
    return 0


_call_pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_call_all)


def call_in_main_thread(function: Callable[[], Any]) -> None:
    """Call a function in the main thread, before that runs more Python code."""
    _PENDING.append(function)
    ctypes.pythonapi.Py_AddPendingCall(_call_pending, None)
