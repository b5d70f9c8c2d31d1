"""Calls at the next event of Python's interpreter, and what warnings take for their place."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import amanda
from amanda.memo import Memo

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


# -- where warnings are shown ---------------------------------------------------------------------

_OURS = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (amanda.__file__, os.path.dirname(os.path.abspath(__file__)))
)
"""The folders of amanda-core and of this package."""

_PLACES: Memo[tuple[str, int], types.CodeType] = Memo(4096)
"""By file and line of the program, the code that calls in their place."""


_CALL = (lambda func, args, kwargs: func(*args, **kwargs)).__code__
"""Code of one line, which takes the number of any other one with its first."""

_OF_PYTHON = frozenset({types.FunctionType, functools.partial, type})
"""Types of functions that warn in frames of their own."""


def call_in_place(func: Any, args: Any, kwargs: Any, frame: Any = None) -> Any:
    """``func(*args, **kwargs)`` in place of the program's line that has led here.

    Warnings of C++ are shown at the line of the innermost Python frame, filtered by its module, and
    once for each such line. That is to be the program's line and not one of ours, so the call is
    made by code that has its file, its line and its globals.

    Args:
        frame: where that line is; searched for if None.
    """
    if type(func) in _OF_PYTHON:
        return func(*args, **kwargs)
    if frame is None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
            frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    code = _PLACES.get(place)
    if code is None:
        of = frame.f_code
        # A frame may be at no line.
        code = _CALL.replace(
            co_filename=of.co_filename,
            co_firstlineno=frame.f_lineno or of.co_firstlineno,
            co_name=of.co_name,
            co_qualname=of.co_qualname,
        )
        _PLACES[place] = code
    called = types.FunctionType(code, frame.f_globals)
    # A traceback would lead to it.
    del frame
    return called(func, args, kwargs)


def unseen_by_warnings(function: Any) -> Any:
    """`function`, whose frames ``warnings.warn(..., stacklevel=2)`` does not count.

    For what takes the place of a function that warns of its caller. Python leaves out frames of
    files that are named as those of its import system.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} (importlib _bootstrap)")
    return function
