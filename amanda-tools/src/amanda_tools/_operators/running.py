"""Functions by which a user of a tool's method runs the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WANTED = "a function without arguments that runs the model, such as lambda: model(x)"


def run_model(run: Callable[[], Any]) -> Any:
    """Call such a function and return its result.

    Raises:
        TypeError: `run` cannot be called. One that is raised by the call has a note: `run` may be
            the model itself.
    """
    if not callable(run):
        raise TypeError(f"run={run!r:.60} must be {_WANTED}")
    try:
        return run()
    except TypeError as error:
        error.add_note(f"amanda: run must be {_WANTED}")
        raise
