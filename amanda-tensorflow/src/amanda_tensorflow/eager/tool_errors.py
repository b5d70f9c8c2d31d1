"""Exceptions of tools on their way through TensorFlow's Python and its runtime.

Two places would not let them pass as they are. Python's binary operators, which
TensorFlow tries in their reflected form after a TypeError or a ValueError: the
operator would run again, and what it raised first be lost. And ``tf.py_function``,
whose function the runtime calls: what that raises becomes an error of the runtime.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from amanda_tensorflow.eager.thread import Tracker

PYTHON_FUNCTIONS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
"""Operators that call Python functions."""

_REFLECTED = "r_binary_op_wrapper"
_NEAR = 24


def is_of_a_tool(error: BaseException | None) -> bool:
    """Whether an exception was raised by a tool."""
    return any(note.startswith("amanda: ") for note in getattr(error, "__notes__", ()))


def retried() -> BaseException | None:
    """A tool's exception after which TensorFlow tries the operator again, reflected."""
    error = sys.exception()
    if error is None or not is_of_a_tool(error):
        return None
    frame: Any = inspect.currentframe()
    for _ in range(_NEAR):
        if frame is None or frame.f_code.co_name == _REFLECTED:
            break
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_name != _REFLECTED else error


def call_python(tracker: Tracker, call: Callable[[], Any]) -> Any:
    """Run an operator that calls a Python function; a tool's exception in it comes out of it."""
    tracker.failures.append(None)
    try:
        return call()
    except Exception:
        original = tracker.failures[-1]
        if original is not None:
            raise original from None
        raise
    finally:
        tracker.failures.pop()
