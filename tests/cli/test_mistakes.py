"""Mistyped command lines: each is answered in one line, before anything of the program runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = (Path(__file__).parent / "mistakes.txt").read_text().splitlines()
ROWS = [re.split("  +", line) for line in TABLE if line and not line.startswith("#")]
"""A command line without ``amanda``, and words of the answer."""

TOOLS = """
import amanda, decimal, enum, typing

class Colour(enum.Enum):
    RED, BLUE = "r", "b"

class Mine(amanda.Tool):
    def __init__(self, level: int = 1, deep: bool = False, mode: typing.Literal["a", "b"] = "a",
                 colour: Colour = Colour.RED, numbers: list[int] | None = None,
                 size: decimal.Decimal = 1, error: str = ""):
        super().__init__()
        if error:
            raise __builtins__[error]("no")
        if level < 1:
            raise ValueError("level must be at least 1")

class Needy(amanda.Tool):
    def __init__(self, threshold: float):
        super().__init__()

class Empty(amanda.Tool): pass

class Other: pass
"""

FILES = {
    "program.py": "print('ran')",
    "my program.py": "print('ran')",
    "folder/train.py": "print('ran')",
    "mine.py": TOOLS,
    "broken.py": "1 / 0",
    "config.yaml": "a: 1",
    "run.sh": "#!/bin/bash\npython train.py --its | tee log\n",
    "picture.png": "\x89PNG\r\n\x1a\n\0\0",
    "cells.ipynb": '{"cells": [], "nbformat": 4}',
}

RUN = """
import contextlib, io, json, os, sys
from amanda.cli import main

def answer(words):
    vanilla, sys.stdout, sys.stderr = dict(os.environ), io.StringIO(), io.StringIO()
    sys.__stderr__ = sys.stderr
    while "=" in words[0]:
        name, _, os.environ[name] = words.pop(0).partition("=")
    try:
        status = main(words)
    except SystemExit as error:
        status = error.code
    os.environ.clear()
    os.environ.update(vanilla)
    return status, sys.stdout.getvalue(), sys.stderr.getvalue()

out = sys.stdout
answers = [answer(words) for words in json.loads(sys.argv[1])]
print(json.dumps(answers), file=out)
"""


@pytest.fixture(scope="module")
def answers(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, str]]:
    """Status, stdout and stderr by the command line; all are given in one process."""
    here = tmp_path_factory.mktemp("here")
    (here / "folder").mkdir()
    for name, text in FILES.items():
        (here / name).write_text(text, encoding="latin-1")
    lines = [line for line, _ in ROWS]
    words = [sys.executable, "-c", RUN, json.dumps(list(map(shlex.split, lines)))]
    done = subprocess.run(words, cwd=here, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("line", "said"), ROWS)
def test_a_mistake_is_answered_in_one_line(
    line: str, said: str, answers: dict[str, tuple[int, str, str]]
) -> None:
    """The line says what is wrong and names what is near; nothing of the program runs."""
    status, out, error = answers[line]
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("amanda: error: ")
    assert said in error
