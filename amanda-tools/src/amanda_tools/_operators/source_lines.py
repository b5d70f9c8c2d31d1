"""The line of the user's program that runs an operator, or that has added it to a graph.

``source_of(context)``, in an analysis, is ``train.py:12``; "" where no frame is the user's.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator

from amanda import OpContext
from amanda.tools import packages_of_drivers
from amanda.tools.description import SOURCE_LINES

_OURS = frozenset(
    {
        *("amanda", "amanda_tools"),
        *("contextlib", "functools", "runpy", "threading", "importlib", "_bootstrap"),
    }
)
"""Amanda's packages and Python's launchers."""


def source_line() -> str:
    """Return ``file:line`` of the innermost stack frame in the user's code.

    Frames of Amanda, of the installed drivers, their frameworks and Python's own launchers are
    skipped. A file below the working directory is given relative to it. "" without such a frame,
    as in a framework's thread.
    """
    drivers = packages_of_drivers()
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        # By module name, not by file: the user's program may lie below a package's folder.
        if SOURCE_LINES in frame.f_globals:
            made_at = frame.f_globals[SOURCE_LINES].get(frame.f_lineno, ())
            if found := _users_line(made_at):
                return found
        elif not (
            _is_skipped(str(frame.f_globals.get("__name__", "")), drivers)
            or file.startswith("<frozen")
        ):
            return f"{_short(file)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def line_made_at(context: OpContext) -> str:
    """Return ``file:line`` of the user's call that added an operator to its graph.

    "" in eager modes, and for operators that a framework added on its own.
    """
    made_at = getattr(context.get_op(), "made_at", None)
    return "" if made_at is None else _users_line(made_at())


def _users_line(made_at: Iterable[tuple[str, int]]) -> str:
    places = tuple(_places())
    for file, line in made_at:
        if _is_users(file, places):
            return f"{_short(file)}:{line}"
    return ""


def source_of(context: OpContext) -> str:
    """Return the user's line of an operator, in its analysis: where it was made, else where it
    runs."""
    return line_made_at(context) or source_line()


@functools.lru_cache(maxsize=4096)
def _is_skipped(module: str, drivers: frozenset[str]) -> bool:
    """True if the frames of a module are no user's.

    Args:
        drivers: the packages of drivers and of their frameworks.
    """
    package = module.partition(".")[0]
    return package in _OURS or package in drivers


@functools.lru_cache(maxsize=4096)
def _is_users(file: str, places: tuple[str, ...]) -> bool:
    """True if a file is in none of the folders and files `places`."""
    # TensorFlow's autograph writes generated files, whose lines are not the user's.
    name = os.path.basename(file)
    if file.startswith("<") or name.startswith("__autograph_generated_file"):
        return False
    return not any(file == place or file.startswith(place + os.sep) for place in places)


def _places() -> Iterator[str]:
    """Yield the folders and files of the packages that are not the user's."""
    for name in _OURS | packages_of_drivers():
        module = sys.modules.get(name)
        yield from (str(path) for path in getattr(module, "__path__", ()))
        if file := getattr(module, "__file__", None):
            yield str(file)


def _short(file: str) -> str:
    try:
        folder = os.getcwd() + os.sep
    except OSError:
        # The working directory has been removed.
        return file
    return file.removeprefix(folder)
