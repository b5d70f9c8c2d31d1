"""Exceptions of tools that TensorFlow would change or lose on their way to the user.

* After a TypeError or a ValueError in ``x + y``, TensorFlow tries the reflected operator: it would
  run the operator again, under another id, and lose the exception: :func:`raise_if_retried`.
* What a function raises that ``tf.py_function`` calls becomes an error of TensorFlow's runtime
  (UnknownError in 2.16 to 2.21). :func:`call_python` raises the exception itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from amanda_tensorflow.eager.tracker import EagerTracker

_REFLECTED = "r_binary_op_wrapper"
"""The function of ``tensorflow.python.framework.override_binary_operator`` that tries again."""

_NEAR = 24
"""How many frames above an operator to look for it: more than the wrappers of Keras add."""


def is_of_a_tool(error: BaseException | None) -> bool:
    """True if an exception was raised by a tool: core has added a note to it."""
    return any(note.startswith("amanda: ") for note in getattr(error, "__notes__", ()))


def raise_if_retried() -> None:
    """Raise a tool's exception after which TensorFlow tries the current operator reflected."""
    error = sys.exception()
    if error is None or not is_of_a_tool(error):
        return
    frame: Any = inspect.currentframe()
    for _ in range(_NEAR):
        if frame is None:
            return
        if frame.f_code.co_name == _REFLECTED:
            raise error
        frame = frame.f_back


def call_python(tracker: EagerTracker, call: Callable[[], Any]) -> Any:
    """Run an operator that calls a Python function; raises what a tool has raised in it."""
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
