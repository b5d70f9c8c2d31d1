"""Programs that end in unusual ways, or whose world is unusual, keep their results."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Command

Script = Callable[..., Path]

OPERATORS = (
    "import minigrad as mg\na = mg.MiniTensor(2)\nmg.add(a, a)\nprint('program', flush=True)\n"
)

ASYNC = """
import asyncio, os, signal

async def main():
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(9)

asyncio.run(main())
"""

ENDINGS = {
    "exit without exit functions": ("import os\nos._exit(4)", 4),
    "another program in its place": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'exit(5)'])",
        5,
    ),
    "another program by its name": (
        (
            "import os, sys\nos.environ['PATH'] = os.path.dirname(sys.executable)\n"
            "os.execlp('python', 'python', '-c', 'exit(6)')"
        ),
        6,
    ),
    "exit functions that are dropped": ("import atexit\natexit._clear()\nexit(3)", 3),
    "exit functions that have run": ("import atexit\natexit._run_exitfuncs()", 0),
    **{
        name: (f"import os, signal\nos.kill(os.getpid(), signal.{name})", -getattr(signal, name))
        for name in ("SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    },
    "interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "interrupting signal": ("import os\nos.kill(os.getpid(), 2)", -signal.SIGINT),
    "terminating signal": ("import os\nos.kill(os.getpid(), 15)", -signal.SIGTERM),
    "error": ("raise ValueError('x')", 1),
    "no standard output": ("import sys\nsys.stdout.close()", 0),
    "child that is terminated": (
        "import os\nos.fork() or os.kill(os.getpid(), 15) or exit()\nos.wait()",
        0,
    ),
    "child that exits": ("import os\nos.fork() or exit()\nos.wait()", 0),
    "interrupt of a coroutine": (ASYNC, -signal.SIGINT),
    "pool whose worker exits": (
        (
            "import os\nfrom concurrent.futures import ProcessPoolExecutor as Pool\n"
            "from concurrent.futures.process import BrokenProcessPool\n"
            "try:\n    Pool(1).submit(os._exit, 3).result()\nexcept BrokenProcessPool:\n    exit(7)"
        ),
        7,
    ),
}


@pytest.fixture
def _hangups_end() -> Iterator[None]:
    """Programs get SIGHUP as Python leaves it, also where nohup has started these tests."""
    outer = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, outer)


@pytest.mark.usefixtures("_hangups_end")
@pytest.mark.parametrize("ending", ENDINGS)
def test_results_are_kept_and_the_status_is_the_program_s(
    ending: str, python: Command, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """However the program ends, with operators and with tables that are printed; no temporary file
    is left."""
    text, status = ENDINGS[ending]
    path = str(script(OPERATORS + text))
    assert python(path).returncode == status
    (tmp_path / "tmp").mkdir()
    run = amanda("run", "-t", "count,dump", "-o", "out", path, TMPDIR=str(tmp_path / "tmp"))
    assert run.returncode == status
    assert (tmp_path / "out" / "count.json").exists()
    assert not list((tmp_path / "tmp").iterdir())
    if ending != "no standard output":
        assert run.stdout.startswith("program\ncount: 1 forward execution")
        assert run.stdout.splitlines()[-1].startswith(("amanda: 1 op,", "amanda: 1 op;"))
        assert run.stdout.count("amanda: 1 op") == 1
    says_exec = "replaces itself by another one (os.execv" in run.stderr
    assert says_exec == ("another program" in ending)


STOPS = """
import amanda

def stop(*tensors):
    raise amanda.StopRun("it is enough")

class StopTool(amanda.Tool):
    def __init__(self, at: str):
        self.add_inst_for_op(stop if at == "analysis" else lambda c: c.insert_after_op(stop))
"""


@pytest.mark.parametrize("at", ["analysis", "routine"])
def test_a_tool_may_end_the_program(
    at: str, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """With status 0, the reason in the last line and on the page, and all results; the program
    cleans up, and does not catch it as an error."""
    script(STOPS, "stops.py")
    caught = "try:\n    mg.add(a, a)\nexcept Exception:\n    pass\nfinally:\n    print('cleaned')\n"
    path = str(script(OPERATORS.replace("mg.add(a, a)\n", caught)))
    run = amanda("run", "-t", f"count,stops.py:StopTool:at={at}", "-o", "out", "--html", path)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[0] == "cleaned"
    assert lines[-1].startswith("amanda: stopped: it is enough; ")
    assert '"/add:0"' in (tmp_path / "out/count.json").read_text()
    assert "<dd>stopped: it is enough</dd>" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize("at", ["analysis", "routine"])
def test_a_tool_may_end_the_program_in_a_thread(
    at: str, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """The thread ends at once, the other threads at their next operator."""
    only = "if threading.current_thread() is not threading.main_thread():\n        raise"
    script("import threading\n" + STOPS.replace("raise", only), "stops.py")
    program = (
        "import threading\nimport minigrad as mg\na = mg.MiniTensor(2)\n"
        "thread = threading.Thread(target=mg.mul, args=(a, a))\nthread.start()\nthread.join()\n"
        "print('goes on')\ntry:\n    mg.mul(a, a)\nfinally:\n    print('cleaned')\nprint('lost')\n"
    )
    run = amanda("run", "-t", f"count,stops.py:StopTool:at={at}", str(script(program)))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("goes on\ncleaned\ncount: ")
    assert run.stdout.splitlines()[-1].startswith("amanda: stopped: it is enough; ")


def test_a_program_goes_on_where_no_other_one_takes_its_place(
    amanda: Command, script: Script
) -> None:
    """A call that fails ends nothing: what runs after it is seen."""
    text = "import os\ntry:\n    os.execv('/no/such', ['x'])\nexcept OSError:\n    mg.add(a, a)\n"
    run = amanda("run", "-t", "count", str(script(OPERATORS + text)))
    assert (run.returncode, run.stderr) == (0, "")
    assert "count: 2 forward executions" in run.stdout


def test_a_signal_after_the_results_ends_the_process(python: Command, script: Script) -> None:
    """It is handled until the results are written, and no longer."""
    run = python(
        "-c",
        "import atexit, os\n"
        "atexit.register(os.kill, os.getpid(), 15)\n"
        "from amanda.cli import run\n"
        f"run.main(['-t', 'count', {str(script(OPERATORS))!r}])",
    )
    assert run.returncode == -signal.SIGTERM
    assert "amanda: 1 op" in run.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Python does not know of handlers in C")
def test_a_signal_that_c_code_handles_ends_nothing(python: Command, script: Script) -> None:
    """As that of ``faulthandler``, which was registered before the command began."""
    path = script("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n" + OPERATORS)
    run = python(
        "-c",
        "import faulthandler, signal\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "from amanda.cli import run\n"
        f"run.main(['-t', 'count', {str(path)!r}])",
    )
    assert (run.returncode, run.stderr.count("most recent call first")) == (0, 1)
    assert "amanda: 1 op" in run.stdout


def test_a_thread_that_ends_the_process_waits_for_nothing(amanda: Command, script: Script) -> None:
    """It may do so because the others hang: one line says that results are lost."""
    text = "import os, threading\nthreading.Thread(target=os._exit, args=(4,)).start()\n"
    run = amanda("run", "-t", "count", str(script(f"{OPERATORS}{text}import time\ntime.sleep(9)")))
    assert (run.returncode, run.stdout) == (4, "program\n")
    assert run.stderr == (
        "amanda: the results are lost: a thread has ended the program by os._exit()\n"
    )


def test_files_of_the_program_are_no_modules_of_ours(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """A file beside the program may have the name of a package that tools use."""
    for name in ("jinja2", "safetensors"):
        script(f"print('mine: {name}')", f"{name}.py")
    path = str(script(OPERATORS + "import atexit, sys\natexit.register(print, len)\n"))
    run = amanda("run", "-t", "count,dump", "-o", "out", "--html", path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "mine" not in run.stdout
    assert "\n  add " in run.stdout
    names = {"count.json", "dump.json", "report.html", "dump-00000.safetensors", "dump.index.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names


def test_a_program_may_empty_the_path_of_its_imports(amanda: Command, script: Script) -> None:
    """The results are given as the command found its modules."""
    run = amanda("run", "-t", "count", str(script(OPERATORS + "import sys\nsys.path.clear()\n")))
    assert (run.returncode, run.stderr) == (0, "")
    assert "\n  add " in run.stdout


def test_a_program_may_leave_a_low_recursion_limit(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """Results need more of Python's stack than the program has left."""
    text = OPERATORS + "import sys\nsys.setrecursionlimit(50)\n"
    run = amanda("run", "-t", "count", "-o", "out", str(script(text)))
    assert (run.returncode, run.stderr) == (0, "")
    assert "\n  add " in run.stdout
    assert (tmp_path / "out" / "count.json").exists()


# -- commands without a program ----------------------------------------------------


@pytest.mark.parametrize("command", ["tools", "drivers", "doctor"])
def test_an_output_that_cannot_be_written_is_one_line(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """No traceback where it is full, and none where there is no standard output."""
    words = f"{sys.executable} -m amanda {command}"
    few = {**environment, "AMANDA_DISABLE_PLUGINS": "amanda-torch,amanda-tensorflow"}
    for redirection, status, said in (
        (">&-", 0, ""),
        ("> /dev/full", 1, "amanda: error: [Errno 28] No space left on device\n"),
    ):
        done = subprocess.run(
            f"{words} {redirection}",
            shell=True,
            cwd=tmp_path,
            env=few,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (status, said)


def test_a_folder_that_the_program_removes_is_made_again(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """A program may clear its own output, and that of the tools with it."""
    text = "import shutil\nshutil.rmtree('runs')\n"
    path = str(script(OPERATORS + text))
    run = amanda("run", "-t", "count,dump", "-o", "runs/out", "--html", path)
    assert (run.returncode, run.stderr) == (0, "")
    names = {file.name for file in (tmp_path / "runs" / "out").iterdir()}
    assert {"count.json", "dump.json", "report.html"} <= names
