"""What is meant by a command line that is wrong: natural mistakes, and the right form of each.

``explain_target(Program("flops", (), False), [])`` tells that ``flops`` is a tool.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from amanda.cli import grammar, tool_options
from amanda.cli.program import Program
from amanda.errors import AmandaError, close_matches
from amanda.tools import available, load

_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun"})
"""Commands that start a program several times, or in other places."""


def explain_target(target: Program, tools: Sequence[str]) -> str:
    """What is meant by a word that is no program: a tool, an option, a script; "" if unknown.

    Args:
        target: what stands in the place of the program.
        tools: the ``-t`` arguments before it.
    """
    name = target.target
    words = [word for word in target.arguments if word != "--"]
    rest = shlex.join(words) or "script.py"
    if name in available():
        return f"{name} is a tool: amanda run -t {','.join([*tools, name])} -- {rest}"
    if "=" in name and tools:
        return f"options of a tool follow its name: -t {_with_option(tools[-1], name)}"
    if Path(f"{name}.py").is_file():
        return f"did you mean {name}.py?"
    if "--" in target.arguments:
        return f"what stands before -- is of amanda run: leave {name} out"
    return _explain_command(name, rest)


def _explain_command(name: str, rest: str) -> str:
    """How a command of the shell is run; "" if it is none, or no Python program."""
    if name in _LAUNCHERS:
        return f"{name} starts amanda: {name} ... -m amanda run ... -- {rest}"
    # This interpreter's scripts come first: PATH may name another's, or a shim of a shell.
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    return f"did you mean {found}?" if found and "python" in first_line(Path(found)) else ""


def first_line(path: Path) -> str:
    """The first line of a file if it names an interpreter, as ``#!/bin/sh``; else ""."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        line = file.readline(200)
        return line.decode(errors="replace").strip() if line.startswith(b"#!") else ""
    return ""


def explain_option(word: str, tools: Sequence[str], known: Sequence[str]) -> str:
    """What is meant by an option that the command does not have: one of a tool, or another one.

    Args:
        word: the option, as written.
        tools: the ``-t`` arguments before it.
        known: the options that the command has.
    """
    name, _, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    with contextlib.suppress(AmandaError, grammar.GrammarError):
        for text in tools:
            if any(name in tool_options.options_of(load(s.name))[0] for s in grammar.parse([text])):
                option = f"{name}={value or '...'}"
                return f"{word} is an option of a tool: -t {_with_option(text, option)}"
    meant = close_matches(f"--{name}", known)
    return f"there is no option {word}{meant or ';'} see: amanda run --help"


def _with_option(tool: str, option: str) -> str:
    return f"{tool}{',' if ':' in tool else ':'}{option}"
