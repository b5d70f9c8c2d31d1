"""The command ``amanda``: run, sweep, compare, merge, query, flight, tools, drivers, doctor.

The entry point is :func:`main`; ``main(["tools"])`` is ``amanda tools``. Each command has a module,
which is imported when the command is given.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

_HELP = """\
usage: amanda COMMAND ...

Instrument neural networks without changing their source.

commands:
  run      run a program under tools:  amanda run -t count -o out -- train.py
  sweep    run a program once for each combination of values of tools' options
  compare  compare the results of two runs:  amanda compare out-a out-b
  merge    merge the files of the ranks of a distributed run
  query    ask the results of a run in SQL:  amanda query out "SELECT ..."
  flight   show where each rank was when a run died or hangs
  tools    list the installed tools and their options; amanda tools NAME describes one
  drivers  list the drivers, and why each is or is not used
  doctor   check the installation

amanda COMMAND --help describes a command; amanda --version prints the version."""

_COMMANDS = ("run", "sweep", "compare", "merge", "query", "flight", "tools", "drivers", "doctor")


_OTHER_WORDS = {
    **dict.fromkeys(("list", "ls", "show", "plugins"), "tools or drivers"),
    **dict.fromkeys(("check", "diagnose", "info", "status"), "doctor"),
    **dict.fromkeys(("exec", "start", "launch"), "run"),
    **dict.fromkeys(("report", "html", "page"), "run --html"),
}
"""Names that other programs have for a command, and its name here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after ``amanda``; None for those of ``sys.argv``.

    Returns:
        The exit status; 1 if nobody reads the output any more (``amanda tools | head -1``), or if
        it cannot be written.
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("help", "--help", "-h") and rest[:1] and rest[0] in _COMMANDS:
        command, rest = rest[0], ["--help"]
    if command == "run":
        from amanda.cli import run

        return run.main(rest)
    # Names of other packages may have any characters: those that the terminal's encoding lacks are
    # escaped.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")
    try:
        status = _run_command(command, rest)
        # None where the command was started without a standard output.
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        from amanda.cli import endings

        endings.by_signal(signal.SIGINT, error)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"amanda: error: {error}", file=sys.stderr)
        # Otherwise Python reports a second error when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run_command(command: str, rest: Sequence[str]) -> int:
    """Run a command other than ``run``."""
    if command in ("-h", "--help", "help"):
        print(_HELP)
        return 0
    if command in ("-V", "--version", "version"):
        from amanda.registry import distributions

        print(f"amanda-core {distributions.version('amanda-core')}")
        return 0
    if command in ("tools", "drivers"):
        from amanda.cli import list_installed

        return list_installed.main(command, rest)
    if command in ("sweep", "compare", "merge", "query", "flight", "doctor"):
        status: int = importlib.import_module(f"amanda.cli.{command}").main(rest)
        return status
    print(f"amanda: error: there is no command {command!r}{_hint(command)}", file=sys.stderr)
    return 2


def _hint(command: str) -> str:
    """A hint about a word that is not a command: it may be an option, a tool, a program or a
    misspelt command."""
    from amanda.errors import close_matches
    from amanda.tools import available

    if command.startswith("-"):
        return "; options follow a command: amanda run -t count -- script.py"
    if command in available():
        return f"; it is a tool: amanda run -t {command} -- script.py"
    if os.path.exists(command):
        return f"; to run a program: amanda run {command}"
    if command in _OTHER_WORDS:
        return f"; did you mean {_OTHER_WORDS[command]}?"
    if command.startswith("python"):
        return "; to run a program: amanda run script.py"
    meant = close_matches(command, _COMMANDS) or ";"
    return f"{meant} the commands are {', '.join(_COMMANDS)}; see: amanda --help"
