"""The parser of a command's options: an error is one line, with the remedy.

::

    parser = CommandParser(prog="amanda merge", description="Merge the files of the ranks.")
    parser.parse_args([])  # amanda: error: amanda merge: the following arguments are required: DIR
"""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from amanda.cli.results import complain

WRONG_USAGE = 2
"""The exit status of a command line that is wrong."""

_OPTION = re.compile(r"argument (?P<option>-[^/:]+)[^:]*: (?P<said>.*)", re.DOTALL)
"""The message of argparse about an option; it names all forms of the option."""


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
