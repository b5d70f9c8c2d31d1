"""Programs under tools, in other threads and in other processes of Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import amanda

T = TypeVar("T", bound=amanda.Tool)


def applied(tool: T, run: Callable[..., object], *inputs: Any) -> T:
    """Run a program under a tool, which is what is returned."""
    with amanda.apply(tool):
        run(*inputs)
    return tool


def line_of(file: str, text: str) -> int:
    """The number of the line of a file that ends with a text."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(text)]
    return number


def in_threads(*functions: Callable[[], Any]) -> None:
    """Call each function in a thread of its own, all at once, and wait for them."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_python(
    *words: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    seconds: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own.

    Args:
        words: its arguments.
        cwd: its folder; that of this process if None.
        env: variables beside those of this process, and a folder for temporary files, which is
            removed afterwards: a process that is killed removes none.
        check: raise an error where it ends with another status than 0.
        seconds: it is ended after them, with an error.
    """
    with tempfile.TemporaryDirectory() as temporary:
        return subprocess.run(
            [sys.executable, *words],
            cwd=cwd,
            env={**os.environ, "TMPDIR": temporary, **(env or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=check,
        )
