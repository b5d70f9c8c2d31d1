"""Explanations of wrong command lines: common mistakes, and the correct form of each.

``explain_target(GivenProgram("flops", ()), [])`` returns "flops is a tool: amanda run -t ...".
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from amanda.cli import grammar, tool_options
from amanda.cli.program import GivenProgram
from amanda.errors import AmandaError
from amanda.tools import available, load

_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun"})
"""Commands that start a program several times, or in other places."""


def explain_target(target: GivenProgram, tools: Sequence[str]) -> str:
    """Explain a word in the program's place that is a tool, an option or a script; else "".

    Args:
        target: what stands in place of the program.
        tools: the ``-t`` arguments before it.
    """
    name = target.target
    words = [word for word in target.arguments if word != "--"]
    rest = shlex.join(words) or "script.py"
    if name in available():
        return f"{name} is a tool: amanda run -t {','.join([*tools, name])} -- {rest}"
    if "=" in name and tools:
        return f"options of a tool follow its name: -t {_with_option(tools[-1], name)}"
    if meant := _meant_file(target):
        return f"did you mean {meant}?"
    if "--" in target.arguments:
        return f"only options of amanda run come before --: leave {name} out"
    return _explain_command(name, rest)


def _meant_file(target: GivenProgram) -> str:
    """The script or module that is probably meant by a name that no file has; "" if unknown."""
    name = target.target
    if target.kind != "file":
        return ""
    if Path(f"{name}.py").is_file():
        return f"{name}.py"
    if re.fullmatch(r"\w+(\.\w+)+", name) and Path(*name.split(".")).with_suffix(".py").is_file():
        return f"-m {name}"
    with contextlib.suppress(OSError):
        scripts = [str(path) for path in Path(name).parent.glob("*.py") if path.is_file()]
        return next(iter(difflib.get_close_matches(name, scripts, n=1, cutoff=0.8)), "")
    return ""


def explain_no_program(options: Sequence[str]) -> str:
    """Which program was taken for the value of an option, as in ``-o train.py``; "" if none.

    Args:
        options: the options of the command, as written; nothing follows them.
    """
    if len(options) < 2 or not Path(options[-1]).is_file():
        return ""
    return f"{options[-1]} was taken as the value of {options[-2]}: give that option one of its own"


def explain_no_tool(target: GivenProgram) -> str:
    """Explain names of tools after the program, which takes them as its own; "" without any."""
    for option, value in zip(target.arguments, target.arguments[1:], strict=False):
        if option not in ("-t", "--tool", "--tools"):
            continue
        with contextlib.suppress(grammar.GrammarError):
            if all(spec.name in available() for spec in grammar.parse([value])):
                before = f"amanda run {option} {value} -- {target.target}"
                return f"no tool was given: options come before the program: {before}"
    return ""


def _explain_command(name: str, rest: str) -> str:
    """Explain how to run a command of the shell; "" if it is none, or no Python program."""
    if name in _LAUNCHERS:
        return f"{name} starts amanda: {name} ... -m amanda run ... -- {rest}"
    # This interpreter's scripts come first: PATH may name another's, or a shim of a shell.
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if not found:
        return ""
    if "python" in first_line(Path(found)):
        return f"did you mean {found}?"
    return f"{name} is a command, not a Python program: name the script that it starts"


def first_line(path: Path) -> str:
    """The first line of a file if it names an interpreter, as ``#!/bin/sh``; else ""."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        line = file.readline(200)
        return line.decode(errors="replace").strip() if line.startswith(b"#!") else ""
    return ""


def explain_option(word: str, tools: Sequence[str], known: Sequence[str]) -> str:
    """Explain an unknown option: it is one of a tool, or was probably another one.

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
    if name in available():
        return f"{name} is a tool: -t {name}"
    meant = difflib.get_close_matches(f"--{name}".replace("_", "-"), known, n=1, cutoff=0.75)
    if meant:
        return f"there is no option {word}; did you mean {meant[0]}? see: amanda run --help"
    return (
        f"there is no option {word}; those of the program follow its name: script.py {word}; "
        "see: amanda run --help"
    )


def _with_option(tool: str, option: str) -> str:
    return f"{tool}{',' if ':' in tool else ':'}{option}"
