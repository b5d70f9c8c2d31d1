"""Python frames that have the file and line of others, and calls after an operator.

Warnings are shown at, and filtered by, the file and line of a frame. A call that Amanda makes for
the program is made by code of a few lines whose file name and first line are those of the code for
which it stands (``CodeType.replace``)::

    call_in_place(torch.tensor, (x,), {})   # warns at the line of the program that led here
"""

from __future__ import annotations

import ast
import ctypes
import dis
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import amanda
from amanda.engine.frames import calling_frame, warn_at
from amanda.python.memo import Memo

_EVENTS = 1000
"""Calls and returns of functions until an operator has ended for certain."""


def call_soon(function: Callable[[], bool]) -> None:
    """Call a function at the thread's next calls and returns of functions, until it returns True.

    A scope that ends within an operator leaves its mode: PyTorch has popped it, and pushes it again
    when the operator ends, in C++. Python's profiler is the only documented hook that runs after
    that. In a thread that is profiled already this function does nothing.
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
    """Call a function in the main thread before that runs more Python code.

    It uses ``Py_AddPendingCall``, CPython's documented function for other threads.
    """
    _PENDING.append(function)
    ctypes.pythonapi.Py_AddPendingCall(_call_pending, None)


# -- where warnings are shown ---------------------------------------------------------------------

_OURS = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (amanda.__file__, os.path.dirname(os.path.abspath(__file__)))
)
"""The folders of amanda-core and of this package."""

_CODES: Memo[tuple[str, int], types.CodeType] = Memo(4096)
"""By file name and line of the program, the copy of `_CALL` with these."""


_CALL = (lambda func, args, kwargs: func(*args, **kwargs)).__code__
"""Code of one line."""

_OF_PYTHON = frozenset({types.FunctionType, functools.partial, type})
"""Types of functions that warn in frames of their own."""


def _named(code: types.CodeType, other: types.CodeType, first_line: int) -> types.CodeType:
    return code.replace(
        co_filename=other.co_filename,
        co_name=other.co_name,
        co_qualname=other.co_qualname,
        co_firstlineno=first_line,
    )


def call_in_place(func: Any, args: Any, kwargs: Any, frame: Any = None) -> Any:
    """Call `func` from a frame with the file, line and globals of the program's innermost one.

    Warnings of C++ are shown at the line of the innermost Python frame, filtered by its module, and
    once for each such line.

    Args:
        frame: the frame whose line is taken; None: the innermost one that is not Amanda's.
    """
    if type(func) in _OF_PYTHON:
        return func(*args, **kwargs)
    if frame is None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
            frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    code = _CODES.get(place)
    if code is None:
        # The line of a frame may be None.
        line = frame.f_lineno or frame.f_code.co_firstlineno
        code = _CODES[place] = _named(_CALL, frame.f_code, line)
    called = types.FunctionType(code, frame.f_globals)
    # An error's traceback would keep the frame.
    del frame
    return called(func, args, kwargs)


def compile_in_place(source: str, vanilla: Any, calls: str) -> Any:
    """Return the function that `source` defines, with the file, lines and globals of `vanilla`.

    A traceback through its frame, and a warning counted from it (``stacklevel=5``, as of
    ``nn.Softmax()`` without a dimension), show the call that `vanilla` makes of `calls`.

    Args:
        source: the definition of one function. Its only global names are builtins.
        vanilla: the function whose frame it saves.
        calls: the name of the method that `vanilla` calls.
    """
    place = _position_of_call(vanilla, calls)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.lineno = node.end_lineno = vanilla.__code__.co_firstlineno
        elif hasattr(node, "lineno"):
            vars(node).update(place)
    defined: dict[str, Any] = {}
    exec(compile(tree, vanilla.__code__.co_filename, "exec"), vanilla.__globals__, defined)
    (function,) = defined.values()
    return function


def _position_of_call(function: Any, name: str) -> dict[str, int]:
    """Return where a function calls its method `name`, as attributes of ``ast.expr``."""
    instructions = dis.get_instructions(function)
    next(found for found in instructions if found.argval == name)
    found = next(found for found in instructions if found.opname.startswith("CALL"))
    positions = found.positions or dis.Positions()
    line = positions.lineno or found.starts_line or 1
    # Without columns under python -X no_debug_ranges.
    names = "lineno", "end_lineno", "col_offset", "end_col_offset"
    found_at = zip(names, positions, strict=True)
    return {name: at or (line if name.endswith("lineno") else 0) for name, at in found_at}


def not_counted_by_warnings(function: Any) -> Any:
    """Return `function`, whose frames a ``stacklevel`` of ``warnings.warn`` does not count.

    For patches that are one frame more between the program and PyTorch, where PyTorch warns of the
    program: "Full backward hook is firing ..." (``stacklevel=5``), ``torch.jit.script(optimize=)``.
    Python leaves out the frames of one kind of file: those named like the import system's.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} (importlib _bootstrap)")
    return function


def warn_program(text: str) -> None:
    """Warn (CoverageWarning) at the program's innermost line."""
    warn_at(calling_frame(("torch",)), text)


def has_jit() -> bool:
    """True if this Python's JIT is enabled; ``sys._jit`` is new in 3.14."""
    jit = getattr(sys, "_jit", None)
    return bool(jit is not None and jit.is_enabled())
