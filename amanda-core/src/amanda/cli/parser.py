"""The parser of a command's options: what is wrong is one line, with what to do.

::

    parser = CommandParser(prog="amanda merge", description="Merge the files of the ranks.")
    parser.parse_args([])  # amanda: error: amanda merge: the following arguments are required: DIR
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from amanda.cli.results import complain

WRONG_USAGE = 2
"""The exit status of a command line that is wrong."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line; the usage is left to ``--help``."""

    def error(self, message: str) -> NoReturn:
        """Print the message and where help is, and end with status 2."""
        command = self.prog.removeprefix("amanda ")
        complain(f"error: {command}: {message}; see: {self.prog} --help")
        raise SystemExit(WRONG_USAGE)
