"""Properties of functions that follow from their bytecode.

``returns_something(print)`` is True: only the bytecode of a function in Python proves the opposite.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import Any

_DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def returns_something(func: Any) -> bool:
    """True if a call of a function may return something else than None."""
    while not isinstance(func, types.FunctionType):
        if isinstance(func, functools.partial):
            func = func.func
        elif isinstance(func, types.MethodType):
            func = func.__func__
        else:
            return True
    if func.__code__.co_flags & _DEFERRED:
        return True
    previous = None
    for instruction in dis.get_instructions(func):
        if instruction.opname == "RETURN_VALUE" and (
            instruction.is_jump_target
            or previous is None
            or previous.opname != "LOAD_CONST"
            or previous.argval is not None
        ):
            return True
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        previous = instruction
    return False
