"""Messages of the command on stderr, one line each, and a parser that reports errors so.

::

    parser = CommandParser(prog="amanda merge", description="Merge the files of the ranks.")
    parser.parse_args([])  # amanda: error: merge: the following arguments are required: DIR; ...
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn

from amanda.errors import AmandaWarning
from amanda.python.text import printable

WRONG_USAGE = 2
"""The exit status of a command line that is wrong."""

_OPTION = re.compile(r"argument (?P<option>-[^/:]+)[^:]*: (?P<said>.*)", re.DOTALL)
"""The message of argparse about an option; it names all forms of the option."""

_LINES = "\n\t"
"""Control characters that stay in messages: those of others may have several lines."""


def complain(message: str) -> None:
    """Print a message to stderr, if it is still open."""
    try:
        text = printable(f"amanda: {message}", keep=_LINES)
        print(text, file=sys.__stderr__ or sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return


def print_message(message: str) -> None:
    """Print a message to ``sys.stderr``: a notebook does not show ``sys.__stderr__``."""
    print(printable(f"amanda: {message}", keep=_LINES), file=sys.stderr)


def described_error(error: BaseException) -> str:
    """An exception in one line, with what Amanda has noted about it."""
    parts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return "; ".join(part.removeprefix("amanda: ") for part in parts)


_UNSHOWN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def described_warning(warning: warnings.WarningMessage) -> str:
    """A warning in one line; "" for one that is for the authors of a package, as in Python.

    One that is not Amanda's comes from a plugin or a tool: the line says where from.
    """
    if issubclass(warning.category, AmandaWarning):
        return str(warning.message)
    if issubclass(warning.category, _UNSHOWN):
        return ""
    kind = warning.category.__name__
    return f"{warning.message} ({kind} of {warning.filename}:{warning.lineno})"


@contextlib.contextmanager
def loading_plugins() -> Iterator[None]:
    """Within it, what plugins print goes to stderr; warnings are printed as messages at its end."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for warning in caught:
                if line := described_warning(warning):
                    complain(f"warning: {line}")


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line; the usage is left to ``--help``."""

    def error(self, message: str) -> NoReturn:
        """Print the message and where help is, and end with status 2."""
        command = self.prog.removeprefix("amanda ")
        complain(f"error: {command}: {plain(message)}; see: {self.prog} --help")
        raise SystemExit(WRONG_USAGE)


def plain(message: str) -> str:
    """A message of argparse about an option, without its other names."""
    if not (named := _OPTION.fullmatch(message)):
        return message
    is_missing = named["said"] == "expected one argument"
    return f"{named['option']} {'needs a value' if is_missing else named['said']}"
