"""Which line of the user's program runs an operator."""

from __future__ import annotations

import os
import sys

_OURS = frozenset({"amanda", "amanda_torch", "amanda_tensorflow", "amanda_tools"})
_FRAMEWORKS = frozenset({"torch", "tensorflow", "keras", "tf_keras"})
_PYTHON = frozenset({"contextlib", "functools", "runpy", "threading", "importlib", "_bootstrap"})
_NOT_THE_USER = _OURS | _FRAMEWORKS | _PYTHON


def source_line() -> str:
    """``file:line`` of the innermost frame that is neither ours, nor a framework's, nor Python's.

    A file below the current folder is given relative to it. "" if there is no such frame, as
    in a thread of a framework.
    """
    frame = sys._getframe(1)
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        if root not in _NOT_THE_USER and not file.startswith("<frozen"):
            return f"{_short(file)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def _short(file: str) -> str:
    try:
        folder = os.getcwd() + os.sep
    except OSError:
        # The folder has been removed.
        return file
    return file.removeprefix(folder)
