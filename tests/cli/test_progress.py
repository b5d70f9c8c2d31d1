"""How far a long run is: on a terminal, and where there is none."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command

Script = Callable[..., Path]

QUICK = """
import os
# minigrad needs NumPy, whose import takes longer than the first line waits; its threads would
# be counted below.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy
# Registered first it runs last.
os.register_at_fork(before=lambda: print(len(os.listdir("/proc/self/task")), "thread"))
from amanda.cli import progress
for cls in (progress.Progress, progress.TerminalProgress):
    cls.first, cls.every = 0.6, 0.1
"""
"""What makes progress quick, as a ``sitecustomize``: seconds are long for a test."""

MINIGRAD = "import time, minigrad as mg\na = mg.MiniTensor(2)\n_ = mg.mul(mg.add(a, a), a)\n"
LINE = "amanda: 0:00, 2 ops seen (2 forward, 0 backward), tools take 0%"
ERASE = "\r\x1b[K"


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """A folder for ``PYTHONPATH``."""
    folder = tmp_path / "quick"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(QUICK)
    return str(folder)


@pytest.fixture
def on_terminal(
    environment: dict[str, str], quick: str, tmp_path: Path
) -> Callable[..., tuple[str, int]]:
    """Runs ``amanda run`` on a terminal; gives what it shows, and its exit status."""

    def run(*words: str, **variables: str) -> tuple[str, int]:
        path = os.pathsep.join([quick, environment["PYTHONPATH"]])
        given = {**environment, "TERM": "xterm", "PYTHONPATH": path, **variables}
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "amanda", "run", *words],
            cwd=tmp_path,
            env=given,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        shown = _read(master).replace("\r\n", "\n")
        return timeless(shown), process.wait(60)

    return run


def timeless(text: str) -> str:
    """A slow machine may take seconds where the programs here sleep for parts of one."""
    return re.sub(r"amanda: 0:\d\d,", "amanda: 0:00,", text)


def _read(descriptor: int) -> str:
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:
        # The last process has closed the terminal.
        pass
    os.close(descriptor)
    return b"".join(parts).decode()


def seen(shown: str) -> str:
    """What is on the terminal at the end: of each line what follows its last erasure."""
    return "\n".join(line.rpartition(ERASE)[2] for line in shown.split("\n"))


Run = Callable[..., "tuple[str, int]"]


def test_a_line_comes_and_goes_without_a_trace(on_terminal: Run, script: Script) -> None:
    """It is updated, taken away before the program prints, and gone at the end."""
    path = script(MINIGRAD + "print('one')\ntime.sleep(1)\nprint('two')\ntime.sleep(0.6)\n")
    shown, status = on_terminal("-t", "log", str(path))
    assert status == 0
    assert shown.count(ERASE + LINE) >= 4
    assert f"{LINE}{ERASE}two\n" in shown
    assert seen(shown).startswith("one\ntwo\nlog: add\nlog: mul\namanda: 2 ops seen")


def test_the_line_has_the_steps_and_their_rate(on_terminal: Run, script: Script) -> None:
    """From the first iteration that has ended, they stand in place of operators."""
    loop = (
        "for _ in range(12):\n    mg.add(a, a)\n    amanda.new_iteration()\n    time.sleep(0.1)\n"
    )
    shown, status = on_terminal(
        "-t", "count", "--", str(script(f"import amanda\n{MINIGRAD}{loop}"))
    )
    assert status == 0
    lines = re.findall(
        r"amanda: 0:00, (\d+) steps, [\d.]+ (?:steps/s|s/step), tools take \d+%", shown
    )
    assert lines
    assert [int(steps) for steps in lines] == sorted(int(steps) for steps in lines)


def test_a_terminal_that_the_program_uses_is_left_to_it(on_terminal: Run, script: Script) -> None:
    """No line while the program has begun one: a progress bar, a prompt."""
    path = script(MINIGRAD + "print('50%', end='', flush=True)\ntime.sleep(1)\nprint('\\rdone')\n")
    shown, _ = on_terminal(str(path))
    assert shown.startswith("50%\rdone\n")


def test_streams_threads_and_signals_are_as_without_it(on_terminal: Run, script: Script) -> None:
    """No thread to wait for, no handler, the same random numbers; streams are put back."""
    path = script(
        MINIGRAD + "import atexit, random, signal, sys, threading\n"
        "time.sleep(0.8)\n"
        "print(threading.enumerate() == [threading.main_thread()], threading.active_count())\n"
        "print(signal.getsignal(signal.SIGALRM) is signal.SIG_DFL, signal.getitimer(0))\n"
        "print(type(sys.stdout).__name__, sys.stdout.isatty())\n"
        "random.seed(1)\ntime.sleep(0.3)\nprint(random.random())\n"
    )
    shown, _ = on_terminal(str(path))
    lines = seen(shown).split("\n")
    assert lines[:4] == [
        "True 1", "True (0.0, 0.0)", "TextIOWrapper True", "0.13436424411240122",
    ]  # fmt: skip


def test_forked_children_are_quiet(on_terminal: Run, script: Script) -> None:
    """The line is the parent's; no thread of ours is there when it forks."""
    path = script(
        MINIGRAD + "import os, sys\n"
        "time.sleep(0.9)\n"
        "if not os.fork():\n"
        "    print('child', 'write' in vars(sys.stdout))\n"
        "    time.sleep(0.5)\n"
        "    os._exit(0)\n"
        "os.wait()\ntime.sleep(0.4)\nprint('end')\n"
    )
    shown, _ = on_terminal(str(path))
    assert seen(shown).startswith("1 thread\nchild False\nend\n")
    # It goes on in the parent, but where Python would warn of a thread that has begun by then.
    assert (LINE in shown.partition("child")[2]) == (sys.version_info < (3, 12))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 15)", -15),
        ("threading.Timer(0.2, os.kill, (os.getpid(), 2)).start()\ntime.sleep(50)", -2),
    ],
)
def test_the_exit_status_is_the_programs(
    ending: str, status: int, on_terminal: Run, script: Script
) -> None:
    """The line is gone however the program ends."""
    path = script(MINIGRAD + f"import os, threading\ntime.sleep(0.8)\n{ending}\n")
    shown, found = on_terminal(str(path))
    assert found == status
    assert LINE in shown
    assert "tools take" not in seen(shown)


@pytest.mark.parametrize(
    ("words", "variables"),
    [(["--no-progress"], {}), ([], {"TERM": "dumb"}), ([], {"RANK": "1", "WORLD_SIZE": "2"})],
)
def test_there_is_none(
    words: list[str], variables: dict[str, str], on_terminal: Run, script: Script
) -> None:
    """Not if it is not wanted, on a terminal that cannot erase, and of the first rank only."""
    path = script(MINIGRAD + "time.sleep(0.9)\nprint('end')\n")
    shown, _ = on_terminal(*words, str(path), **variables)
    assert shown.startswith("end\n")


def test_where_stderr_is_no_terminal_lines_come_if_asked_for(
    amanda: Command, quick: str, script: Script
) -> None:
    """They are whole lines on stderr; without ``--progress`` there are none."""
    path = str(script(MINIGRAD + "time.sleep(0.9)\n"))
    asked = amanda("run", "--progress", path, PYTHONPATH=quick)
    assert set(timeless(asked.stderr).splitlines()) == {LINE}
    assert len(asked.stderr.splitlines()) >= 2
    assert amanda("run", path, PYTHONPATH=quick).stderr == ""
