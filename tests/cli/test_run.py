"""Results, summaries and messages of ``amanda run``."""

from __future__ import annotations

import io
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amanda import Tool, tools
from amanda.cli.rank import _LAUNCHERS, Rank
from amanda.cli.results import NamedTool, Report
from amanda.scope.scope import Statistics
from amanda.testing.loopback import LoopbackDriver
from tests.cli.conftest import Command, driver_package, install, other_package

Script = Callable[..., Path]

MINIGRAD = "import minigrad as mg\na = mg.MiniTensor(2)\nb = mg.mul(mg.add(a, a), a)\n"

LAST_LINE = re.compile(
    r"amanda: 2 ops, all seen as far as is known; "
    r"tools took \d+\.\d\d s of \d+\.\d\d s \(\d+%\)"
)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture
def program(script: Script) -> str:
    """A program with two operators of minigrad."""
    return str(script(MINIGRAD + "print('program')\n"))


def test_the_program_prints_first_then_the_tools_then_the_last_line(
    amanda: Command, program: str
) -> None:
    """The summary comes on stdout when the program has ended; the last line is one line."""
    run = amanda("run", "-t", "largest:digits=0,log:prefix=seen", program)
    lines = run.stdout.splitlines()
    assert lines[0] == "program"
    assert lines[1] == "largest outputs"
    assert lines[-3:-1] == ["seen: add", "seen: mul"]
    assert LAST_LINE.fullmatch(lines[-1])
    assert (run.stderr, run.returncode) == ("", 0)


def test_results_are_written_as_the_same_dict(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """``-o DIR`` writes DIR/<tool>.json in the common form, and says so."""
    run = amanda("run", "-t", "largest:ops=mul", "-o", "new/out", program)
    result = read(tmp_path / "new/out/largest.json")
    [row] = result.pop("ops")
    phases = ("setup", "forward", "backward", "optimizer", "other")
    assert result == {
        "tool": "largest",
        "schema": 1,
        "namespaces": ["minigrad/0.1/eager"],
        "summary": {
            "largest": 8,
            "steps": 0,
            "phases": {phase: {"ops": int(phase == "forward")} for phase in phases},
            "per_step": {},
            "not_seen": {},
        },
    }
    own = {
        "id": "/mul:0",
        "type": "mul",
        "name": "mul",
        "direction": "forward",
        "module": "",
        "namespace": "minigrad/0.1/eager",
        "largest": 8,
    }
    assert row | own == row
    assert {"phase", "inputs", "outputs", "attributes"} <= row.keys()
    assert f"amanda: wrote largest.json in {tmp_path / 'new/out'}\n" in run.stdout


def test_nothing_is_written_without_being_asked(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """Without ``-o`` no file appears."""
    amanda("run", "-t", "largest", program)
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["program.py"]


def test_one_tool_can_be_used_twice(amanda: Command, program: str, tmp_path: Path) -> None:
    """The second one of a name has a number."""
    amanda("run", "-t", "largest:ops=mul", "-t", "largest:ops=add", "-o", "out", program)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "largest-2.json",
        "largest.json",
    ]
    assert read(tmp_path / "out/largest-2.json")["summary"]["largest"] == 4


def test_the_folder_is_where_the_command_was_given(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """A program that changes the current folder does not move the results."""
    path = script(MINIGRAD + "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n")
    amanda("run", "-t", "largest", "-o", "out", str(path))
    assert (tmp_path / "out/largest.json").exists()


def test_operators_of_threads_and_exit_functions_count(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """The run is over when the program's threads and exit functions are."""
    path = script(
        MINIGRAD + "import atexit, threading, time\n"
        "atexit.register(mg.add, a, a)\n"
        "threading.Thread(target=lambda: time.sleep(0.1) or mg.mul(a, b)).start()\n"
    )
    amanda("run", "-t", "largest", "-o", "out", str(path))
    assert read(tmp_path / "out/largest.json")["summary"]["largest"] == 16


CLUSTER = {"chief": ["a"], "worker": ["b", "c"]}
WITHOUT_A_CHIEF = {"evaluator": ["d"], "ps": ["a", "b"], "worker": ["c"]}


def in_cluster(kind: str, index: int, cluster: Any = CLUSTER) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


@pytest.mark.parametrize(
    ("variables", "number", "count"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2),
        ({"PMIX_RANK": "1"}, 1, None),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 0, 1),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 3, 4),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 3, 4),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 0, 1),
        (in_cluster("worker", 1), 2, 3),
        (in_cluster("evaluator", 0), 3, None),
        # The first rank prints: it is one that computes.
        (in_cluster("worker", 0, WITHOUT_A_CHIEF), 0, 4),
        (in_cluster("ps", 1, WITHOUT_A_CHIEF), 2, 4),
        (in_cluster("evaluator", 0, WITHOUT_A_CHIEF), 3, 4),
        ({"TF_CONFIG": "{}"}, 0, 1),
    ],
)
def test_the_processes_of_a_launcher_write_files_of_their_own(
    variables: dict[str, str], number: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one ``-o`` no two write one file, whichever launcher has started them."""
    for name in [*itertools.chain(*_LAUNCHERS), "TF_CONFIG", "PMIX_RANK"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = Rank.of_environment()
    assert (found.number, found.count) == (number, count)
    assert found.suffix == ("" if count == 1 else f"-rank{number}")


@pytest.mark.parametrize("variables", _LAUNCHERS)
def test_a_rank_knows_its_place(
    variables: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its results tell its number on its machine, which one that is, and its coordinates in the
    program's meshes, as far as a driver has seen them."""
    for name in [*itertools.chain(*_LAUNCHERS), "TF_CONFIG", "PMIX_RANK"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(variables, "574", strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(LoopbackDriver, "mesh", {"dp": 2, "tp": 1}, raising=False)
    rank = Rank.of_environment()
    tool = NamedTool("count", tools.load("count")())
    Report([tool], tmp_path, rank, io.StringIO()).deliver(Statistics(), 1)
    written = json.loads((tmp_path / "count-rank5.json").read_text())["rank"]
    place = {"local": 4, "host": socket.gethostname(), "mesh": {"dp": 2, "tp": 1}}
    assert written == {"number": 5, "count": 7, **place}
    assert str(rank.located()) == "5 of 7, dp 2, tp 1"


def test_a_run_without_tools_tells_what_it_saw(amanda: Command, program: str) -> None:
    """No tool is needed for the last line."""
    assert "amanda: 2 ops, all seen" in amanda("run", program).stdout


_CHILDREN = {
    "os.fork": "os.wait() if os.fork() else os._exit(0)",
    **{
        name: f"child = multiprocessing.get_context('{name}').Process(target=print); "
        "child.start(), child.join()"
        for name in ("fork", "spawn")
    },
}


@pytest.mark.parametrize("method", _CHILDREN)
def test_child_processes_are_counted_as_not_seen(
    amanda: Command, script: Script, method: str
) -> None:
    """What a child process runs is not seen, however it is started; the last line says so. Only
    where the program itself computes nothing, it asks for a run of each."""
    text = (
        "import multiprocessing, os, minigrad as mg\n"
        "if __name__ == '__main__':\n"
        f"    {_CHILDREN[method]}\n"
    )
    loading = script(text + "    mg.add(mg.MiniTensor(2), mg.MiniTensor(2))\n")
    said = "not seen: what child processes run, such as workers that load data (1);"
    assert said in amanda("run", str(loading)).stdout
    said = "what child processes run, each of which needs an amanda run of its own (1);"
    assert said in amanda("run", str(script(text))).stdout


def test_an_interrupted_summary_leaves_the_stream_as_it_was() -> None:
    """Only the summaries write out characters that the encoding lacks."""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    told: list[str | None] = []

    class Interrupted(Tool):
        def print_summary(self, out: Any) -> None:
            told.append(out.errors)
            raise KeyboardInterrupt

    report = Report([NamedTool("interrupted", Interrupted())], None, Rank(), out)
    with pytest.raises(KeyboardInterrupt):
        report.deliver(Statistics(), 1.0)
    assert (told, out.errors) == (["backslashreplace"], "strict")


def test_a_program_without_a_framework_is_reported(amanda: Command, script: Script) -> None:
    """The last line says why nothing was seen."""
    run = amanda("run", str(script("pass")))
    assert "amanda: 0 ops; not seen: no framework was imported;" in run.stdout


def test_tools_without_a_driver_are_an_error(amanda: Command, script: Script) -> None:
    """A program that ends well under tools that nothing was there for ends with status 2: one line
    says why, and no summary shows zeros. Another exit status stays."""
    run = amanda("run", "-t", "largest", str(script("print('program')")))
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "amanda: error: nothing was instrumented: the program has not imported" in run.stderr
    first, last = run.stdout.splitlines()
    assert first == "program"
    assert last.startswith("amanda: 0 ops")
    for text, status in (
        ("raise SystemExit(7)", 7),
        ("#!/usr/bin/env python\n1 +", 1),
        ("raise KeyboardInterrupt", -2),
    ):
        run = amanda("run", "-t", "largest", str(script(text)))
        assert run.returncode == status
        assert run.stdout.startswith("amanda: 0 ops")
        assert "amanda: error" not in run.stderr


def test_a_program_that_fails_before_its_first_operator_has_no_tables(
    amanda: Command, script: Script
) -> None:
    """Its traceback and the last line say what there is to say; one that ends well has tables."""
    run = amanda("run", "-t", "count", str(script("import minigrad\n1 / 0\n")))
    assert run.returncode == 1
    assert "ZeroDivisionError" in run.stderr
    assert run.stdout.startswith("amanda: 0 ops")
    run = amanda("run", "-t", "count", str(script("import minigrad\n")))
    assert (run.returncode, run.stdout.startswith("count: 0 forward executions")) == (0, True)


def test_a_driver_of_another_framework_than_the_program_s_is_named(
    amanda: Command, program: str
) -> None:
    """A program that imports another framework than that of the driver asked for is told so."""
    said = "has not imported tensorflow (asked for: tensorflow-eager)"
    for words, variables in (
        (["--driver", "tensorflow-eager"], {}),
        ([], {"AMANDA_DRIVERS": "tensorflow-eager"}),
    ):
        run = amanda("run", "-t", "largest", *words, program, **variables)
        assert run.returncode == 2
        assert f"amanda: error: nothing was instrumented: the program {said}\n" in run.stderr


def test_keras_on_a_backend_that_no_driver_sees_is_an_error(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """One line says what computes, and how to choose another one; JAX alone is named, too."""
    (tmp_path / "jax.py").touch()
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("from keras import config")
    (tmp_path / "keras" / "config.py").write_text("import jax\ndef backend(): return 'jax'")
    wanted = "no driver sees JAX; set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"
    beside = f"import sys; sys.path.append({str(tmp_path)!r}); "
    run = amanda("run", "-t", "largest", str(script(f"{beside}import keras")))
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "amanda: error: nothing was instrumented: not seen: all of Keras," in run.stderr
    assert wanted in run.stderr
    assert wanted in run.stdout.splitlines()[-1]
    run = amanda("run", "-t", "largest", str(script(f"{beside}import jax")))
    assert run.returncode == 2
    assert "not seen: all of JAX: no driver sees JAX;" in run.stdout.splitlines()[-1]
    # Beside what was seen, a backend is named, and another framework that is imported is not.
    both = f"{beside}import minigrad as m; m.add(m.MiniTensor(2), m.MiniTensor(2)); import "
    for module, is_named in (("keras", True), ("jax", False)):
        run = amanda("run", "-t", "largest", str(script(f"{both}{module}")))
        assert run.returncode == 0
        assert ("JAX" in run.stdout.splitlines()[-1]) is is_named


# -- bad input ----------------------------------------------------------------


def test_tools_after_the_program_are_named(amanda: Command, script: Script) -> None:
    """They are arguments of the program; one that has its own -t hears nothing of it."""
    script("pass")
    said = "no tool was given: options come before the program: amanda run -t largest -- program.py"
    for value, is_ours in (("largest", True), ("nothing", False), ("largest,,", False)):
        run = amanda("run", "program.py", "-t", value)
        assert run.returncode == 0
        assert (said in run.stderr) is is_ours


def test_wrong_ranks_are_a_warning(amanda: Command, program: str, tmp_path: Path) -> None:
    """Results of processes that have no number would replace each other unnoticed."""
    for rank, count in (("x", "2"), ("5", "2"), ("1", "9" * 30)):
        run = amanda("run", "-t", "largest", "-o", "out", program, RANK=rank, WORLD_SIZE=count)
        assert run.returncode == 0
        said = f"amanda: warning: RANK={rank} and WORLD_SIZE={count} do not name a process"
        assert run.stderr.startswith(said)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["largest.json"]


def test_results_that_cannot_be_written_at_the_end_are_named(
    amanda: Command, script: Script
) -> None:
    """The program goes on, the loss is reported, and the exit status is the program's."""
    path = script(MINIGRAD + "import os\nos.rmdir('out')\nopen('out', 'w').close()\n")
    run = amanda("run", "-t", "largest,log", "-o", "out", str(path))
    assert run.returncode == 0
    assert "amanda: a result of largest is lost: NotADirectoryError" in run.stderr
    assert "log: mul" in run.stdout


@pytest.mark.parametrize("tool", ["log", "count"])
def test_a_reader_that_goes_away_is_no_error(
    tool: str, environment: dict[str, str], script: Script, tmp_path: Path
) -> None:
    """``amanda run ... | head`` ends quietly with the program's exit status."""
    path = script(MINIGRAD)
    command = f"{sys.executable} -m amanda run -t {tool} {path} | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, b"")


TOOLS = '''
import amanda

class Plain(amanda.Tool):
    """Has a result, and nothing else of the common form."""

    def result(self):
        return {"summary": {"answer": 42, "limit": float("inf")}}


class Broken(amanda.Tool):
    """Cannot say what it found."""

    def result(self):
        raise RuntimeError("nothing to say")
'''

PLUGIN = """
from amanda import hookimpl

@hookimpl
def amanda_register_tools():
    return {name: f"other_tools:{name.title()}" for name in ("plain", "broken", "gone")}
"""


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A folder with another package's tools, to put on ``PYTHONPATH``."""
    folder = other_package(tmp_path, TOOLS, PLUGIN)
    install(folder, "amanda-bad", "bad = no_such_module")
    return str(folder)


def test_a_tool_needs_no_base_class(
    other: str, amanda: Command, program: str, tmp_path: Path
) -> None:
    """A tool that only has ``result()`` is written, and its summary printed."""
    run = amanda("run", "-t", "plain", "-o", "out", program, PYTHONPATH=other)
    assert read(tmp_path / "out/plain.json") == {"summary": {"answer": 42, "limit": "inf"}}
    assert re.search(r"^plain$[\s\S]*^  answer\s+42$", run.stdout, re.MULTILINE)


def test_drivers_that_cannot_be_used_are_named_with_their_reasons(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """Where no installed driver can be used the program does not start."""
    folder = tmp_path / "site"
    folder.mkdir()
    reason = "@classmethod\ndef reason_unusable(cls):\n    return 'the moon is full'\n"
    driver_package(folder, "sad", reason)
    others = "amanda-minigrad,amanda-torch,amanda-tensorflow"
    run = amanda("run", program, PYTHONPATH=str(folder), AMANDA_DISABLE_PLUGINS=others)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "amanda: error: no installed driver can be used (sad: the moon is full; "
        "amanda-torch: disabled by AMANDA_DISABLE_PLUGINS; "
        "amanda-tensorflow: disabled by AMANDA_DISABLE_PLUGINS)\n"
    )


REFUSING_TOOL = """
import amanda
from amanda.errors import CapabilityError, ContextExpiredError

class Refusing(amanda.Tool):
    "Cannot run on anything."

    def __init__(self, badly: bool = False):
        super().__init__()
        self.badly = badly
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        if self.badly:
            raise ContextExpiredError("a mistake of the tool")
        raise CapabilityError("refusing: not in this mode; choose another")
"""


def test_a_tool_that_refuses_the_program_says_so_in_one_line(
    amanda: Command, program: str, script: Script, tmp_path: Path
) -> None:
    """Status 2 and no traceback; mistakes in a tool, and errors of the program, have one."""
    plugin = INTERRUPTING_PLUGIN.replace("slow", "refusing").replace("Slow", "Refusing")
    site = str(other_package(tmp_path, REFUSING_TOOL, plugin))
    run = amanda("run", "-t", "refusing,log", program, PYTHONPATH=site)
    assert run.returncode == 2
    said = "amanda: error: refusing: not in this mode; choose another (AMANDA_TRACEBACK=full"
    assert run.stderr == f"{said} shows where)\n"
    run = amanda("run", "-t", "refusing", program, PYTHONPATH=site, AMANDA_TRACEBACK="full")
    assert (run.returncode, run.stderr.startswith("Traceback")) == (1, True)
    run = amanda("run", "-t", "refusing:badly=true", program, PYTHONPATH=site)
    assert (run.returncode, run.stderr.startswith("Traceback")) == (1, True)
    path = str(script("from amanda.errors import CapabilityError\nraise CapabilityError('mine')"))
    run = amanda("run", "-t", "refusing", path, PYTHONPATH=site)
    assert (run.returncode, run.stderr.startswith("Traceback")) == (1, True)


def test_a_compiler_that_a_package_adds_may_be_named(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """In ``AMANDA_TORCH_COMPILER``, as those of Dynamo."""
    install(tmp_path, "other-compiler", "nope = other:compiled")
    (points,) = tmp_path.glob("*/entry_points.txt")
    points.write_text(points.read_text().replace("amanda", "torch_dynamo_backends"))
    named = {"AMANDA_TORCH_COMPILER": "nope", "PYTHONPATH": str(tmp_path)}
    assert amanda("run", "-t", "log", program, **named).returncode == 0


# -- interrupts that are not the program's --------------------------------------

INTERRUPTING_TOOLS = """
import os, signal
import amanda

class Slow(amanda.Tool):
    "Is interrupted while it is made, or while it says what it found."

    def __init__(self, early: bool = False, number: int = signal.SIGINT):
        super().__init__()
        self.number = number
        if early:
            os.kill(os.getpid(), number)

    def result(self):
        os.kill(os.getpid(), self.number)
        return {"summary": {}}
"""

INTERRUPTING_PLUGIN = """
from amanda import hookimpl

@hookimpl
def amanda_register_tools():
    return {"slow": "other_tools:Slow"}
"""


def test_an_interrupt_before_the_program_starts_ends_quietly(
    amanda: Command, program: str, tmp_path: Path
) -> None:
    """The status is that of the signal, and nobody sees a traceback of ours."""
    site = other_package(tmp_path, INTERRUPTING_TOOLS, INTERRUPTING_PLUGIN)
    run = amanda("run", "-t", "slow:early=true", program, PYTHONPATH=str(site))
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("end", ["", "\nraise KeyboardInterrupt", "\nraise SystemExit(3)"])
def test_an_interrupt_while_results_are_written_ends_by_the_signal(
    end: str, amanda: Command, script: Script, tmp_path: Path
) -> None:
    """One line says that results are missing; those before are whole, and no traceback is ours."""
    site = other_package(tmp_path, INTERRUPTING_TOOLS, INTERRUPTING_PLUGIN)
    path = str(script(MINIGRAD + end))
    run = amanda("run", "-t", "largest,slow", "-o", "out", path, PYTHONPATH=str(site))
    assert run.returncode == -signal.SIGINT
    said = "amanda: interrupted while the results were written; those that are missing are lost\n"
    assert run.stderr.endswith(said)
    assert ("Traceback" in run.stderr) == ("KeyboardInterrupt" in end)
    assert "run.py" not in run.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["largest.json"]


def test_a_signal_before_the_first_operator_gives_no_tables(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """A run that SIGTERM ends is one that failed: tables of zeros would say nothing."""
    text = "import minigrad, os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    run = amanda("run", "-t", "largest", "-o", "out", str(script(text)))
    assert (run.returncode, run.stderr) == (-signal.SIGTERM, "")
    assert run.stdout.startswith("amanda: wrote largest.json")


# -- tracebacks ---------------------------------------------------------------


def test_the_traceback_of_a_routine_shows_the_tool_and_nothing_of_amanda(
    amanda: Command, program: str
) -> None:
    """The user's line, the tool's line and the note are there; Amanda's frames are not."""
    run = amanda("run", "-t", "log:fail=mul", program)
    assert run.returncode == 1
    assert re.findall(r'File ".*/(\w+)\.py"', run.stderr) == ["program", "minigrad", "tools"]
    assert run.stderr.endswith(
        "ValueError: cannot log mul\namanda: raised in LogTool.log at op /mul:0\n"
    )


def test_the_traceback_of_a_thread_shows_nothing_of_amanda(
    amanda: Command, python: Command, script: Script
) -> None:
    """What an uncaught exception of a thread shows is what it shows without us."""
    path = str(
        script(
            MINIGRAD + "import threading\n"
            "thread = threading.Thread(target=mg.add, args=(a, None), name='worker')\n"
            "thread.start()\nthread.join()\n"
        )
    )
    alone, under = python(path), amanda("run", "-t", "log", path)
    assert "in _bootstrap_inner" in alone.stderr
    assert under.stderr == alone.stderr
    text = "import minigrad as mg, threading\na = mg.MiniTensor(2)\n"
    path = str(script(f"{text}threading.Thread(target=mg.add, args=(a, a)).start()"))
    run = amanda("run", "-t", "log:fail=add", path)
    files = re.findall(r'File ".*/(\w+)\.py"', run.stderr)
    assert files == ["threading", "threading", "minigrad", "tools"]
    run = amanda("run", "-t", "log:fail=add", path, AMANDA_TRACEBACK="full")
    assert "dispatch.py" in run.stderr


def test_all_frames_are_shown_on_demand(amanda: Command, program: str) -> None:
    """``AMANDA_TRACEBACK=full`` keeps the frames of Amanda."""
    run = amanda("run", "-t", "log:fail=mul", program, AMANDA_TRACEBACK="full")
    assert "dispatch.py" in run.stderr


def test_an_error_of_the_program_inside_of_an_operator_shows_only_the_program(
    amanda: Command, python: Command, script: Script
) -> None:
    """The traceback through an instrumented operator is that of the program alone."""
    path = str(script(MINIGRAD + "mg.add(a, None)\n"))
    alone, under = python(path), amanda("run", "-t", "log", path)
    assert under.stderr == alone.stderr
    assert under.returncode == alone.returncode == 1
