"""``amanda sweep``: a program once for each combination of values of tools' options."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from amanda.cli import main
from amanda.cli.grammar import alternatives
from amanda.files import read_json
from tests.cli.conftest import Command, other_package

PROGRAM = """
import minigrad as mg
mg.mul(mg.MiniTensor([1.26]), mg.MiniTensor([1.0]))
print("computed")
"""

FAILING = """
import os, sys
import minigrad as mg
mg.relu(mg.MiniTensor([1.0]))
with open("runs", "ab+") as file:
    file.write(b"1")
    number = file.tell()
if number == 1:
    sys.exit("out of luck")
if number > 2:
    os.kill(os.getpid(), 9)
"""

CLUSTER = """
import asyncio, os, sys
from amanda import hookimpl
from amanda.errors import AmandaError
from amanda.cli.sweep import run_here
class Cluster:
    def __init__(self):
        self.lost = 0
    async def run(self, words, folder):
        if not self.lost:
            self.lost += 1
            raise AmandaError("WorkerCrashedError: the node is gone")
        print("cluster:", folder.name)
        return await run_here(words, folder)
    def close(self):
        print("closed")
@hookimpl
def amanda_open_cluster(address):
    print("connected to", address)
    return Cluster()
"""


@pytest.mark.parametrize(
    ("value", "values"),
    [
        ("3", ["3"]), ("", [""]), ("3++7", ["3", "7"]), ("-1..1", ["-1", "0", "1"]),
        ("0..1++5", ["0", "1", "5"]), ("a+b++c", ["a+b", "c"]), (r"a\\++b", [r"a\\", "b"]),
        (r"a\+\+b", [r"a\+\+b"]), ("x..y", ["x..y"]), ("3..1", []), ("1++0..1", ["1", "0"]),
    ],
)  # fmt: skip
def test_values_of_an_option(value: str, values: Sequence[str]) -> None:
    """``++`` separates them, and two dots stand between the ends of a range."""
    assert alternatives(value) == values


def test_each_combination_is_a_run(
    amanda: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Its results are in a folder of its own, and all are one table with columns of the options."""
    pytest.importorskip("duckdb")
    program = str(script(PROGRAM))
    text = "largest:digits=0..1,ops=mul++add+mul,log:prefix=a"
    run = amanda("sweep", "-t", text, "--jobs", "2", "--every", "1", "-o", "out", "--", program)
    assert (run.returncode, run.stdout, run.stderr) == (0, "amanda: 4 runs in out\n", "")
    one = tmp_path / "out" / "largest_digits=1" / "largest_ops=add+mul"
    assert read_json(one / "largest.json")["summary"]["largest"] == 1.3
    assert (one / "output.txt").read_text().startswith("computed\n")
    sql = "SELECT largest_digits, largest_ops, sum FROM largest ORDER BY ALL"
    from amanda_tools.tables import query

    table, left_out = query(str(tmp_path / "out"), sql)
    assert not left_out
    assert table.rows == [(n, ops, (1.0, 1.3)[n]) for n in (0, 1) for ops in ("add+mul", "mul")]
    merged = amanda("merge", "out")
    assert merged.stdout == "amanda: wrote largest.parquet in out\n"
    assert query(str(tmp_path / "out" / "largest.parquet"), sql)[0].rows == table.rows
    assert [row[0] for row in query(str(tmp_path / "out"), "")[0].rows] == ["largest"]
    assert query(str(one), "SELECT ranks FROM by_op('largest', 'largest')")[0].rows == [(1,)]
    other = amanda("sweep", "-t", "count,largest:ops=a++b", "-o", "out", program)
    assert "out has runs of another sweep, largest_digits=" in other.stderr
    assert "is of a sweep" in amanda("merge", "--html", "out").stderr
    words = ("-t", "count,largest:digits=0..1", "--format", "parquet", "-o", "tables", program)
    assert amanda("sweep", *words).returncode == 0
    rows = query(str(tmp_path / "tables"), "SELECT largest_digits, sum FROM count ORDER BY ALL")
    assert rows[0].rows == [(0, 1.0), (1, 1.0)]
    damaged = tmp_path / "tables" / "largest_digits=1" / "count" / "rank=0" / "header.json"
    damaged.unlink()
    assert query(str(tmp_path / "tables"), "")[1] == ["largest_digits=1/count: no header of rank 0"]


def test_a_failed_run_is_told_and_run_again(
    amanda: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Up to a limit; the others run, and the status is 1."""
    run = amanda("sweep", "-t", "largest:digits=0..1", "-o", "out", "--", str(script(FAILING)))
    assert (run.returncode, run.stdout) == (1, "amanda: 2 runs in out, 1 failed\n")
    told = "amanda: warning: largest_digits={} failed ({}); {}".format
    assert run.stderr.splitlines() == [
        told(0, "status 1; out of luck", "it is run again"),
        told(1, "signal 9", "it is run again"),
        told(1, "signal 9", f"see {tmp_path / 'out' / 'largest_digits=1'}"),
    ]


def end_by_signal(
    number: int, environment: dict[str, str], tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Send a signal to a sweep that has two runs; it and they end."""
    program = script(
        "import os, sys, time\nopen(f'{os.getpid()}.pid', 'w').close()\ntime.sleep(60)"
    )
    words = ("-m", "amanda", "sweep", "-t", "largest:digits=0..3", "--jobs", "2", "-o", "ended")
    command = [sys.executable, *words, str(program)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=-1) as sweep:
        while len(pids := list(tmp_path.glob("*.pid"))) < 2:
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.send_signal(number)
        assert sweep.wait(30) == -signal.SIGINT
    time.sleep("RAY_ADDRESS" in environment)
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.stem), 0)
        path.unlink()


def test_an_interrupt_ends_all_runs(
    environment: dict[str, str], tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """SIGTERM does the same; the status is that of the interrupt."""
    for number in (signal.SIGINT, signal.SIGTERM):
        end_by_signal(number, environment, tmp_path, script)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-t", "inject", "p.py"), "these options give 1 runs; seed=0..9 or bit=3++7 gives"),
        (("-t", "inject:seed=3..1", "p.py"), "these options give 0 runs"),
        (("-t", "inject:seed=0..99999999", "p.py"), "has 100000000 values; 100000 at most are"),
        (("-t", "inject:seed=0++x", "p.py"), "option seed=x of tool inject is not of the"),
        (("-t", "inject:nothing=0..1", "p.py"), "tool inject has no option 'nothing'"),
        (("-t", "inject:seed=0..1", "--evry", "2", "p.py"), "--evry"),
        (("-t", "inject:seed=0..1", "--steps", "3", "p.py"), "--steps is for --trigger"),
        (("-t", "inject:seed=0..1", "--driver", "x", "p.py"), "no driver named 'x'"),
        (("-t", "inject:seed=0..1", "q.py"), "can't open file 'q.py'"),
        (("-t", "inject:seed=0..1", "-"), "standard input can be read once only"),
        (("-t", "inject:seed=0..1"), "no program is given"),
        (("-t", "inject:seed=0..1,,", "p.py"), "did you mean -t inject:seed=0..1?"),
    ],
)
def test_mistakes_are_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, words: Sequence[str], said: str
) -> None:
    """In one line; the status is 2."""
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    assert main(["sweep", "-o", "out", *words]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("earlier", "options"),
    [
        ("inject_seed=0/inject_bit=3", "seed=0..9"),
        ("inject_seed=0", "seed=0..1,bit=3++7"),
        ("inject_seed=0/inject_rate=1", "seed=0..1,bit=3++7"),
    ],
)
def test_runs_of_another_sweep_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, earlier: str, options: str
) -> None:
    """Of one that has fewer options, or more, or others: the new one is refused."""
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    Path("out", earlier).mkdir(parents=True)
    Path("out", earlier, "errors.txt").touch()
    assert main(["sweep", "-t", f"inject:{options}", "-o", "out", "p.py"]) == 2
    assert f"out has runs of another sweep, {earlier}; name another" in capfd.readouterr().err
    assert Path("out", earlier, "errors.txt").exists()


def test_the_handler_of_a_signal_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sweep, whatever its status."""
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    earlier = signal.getsignal(signal.SIGTERM)
    assert main(["sweep", "-t", "inject:seed=0..1", "-o", "out", "--retries", "0", "p.py"]) == 1
    assert signal.getsignal(signal.SIGTERM) == earlier


def test_runs_are_tasks_of_a_cluster(
    amanda: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Where ``RAY_ADDRESS`` names one that a plugin connects to; a lost task is run again."""
    site = str(other_package(tmp_path, "", CLUSTER))
    words = ("sweep", "-t", "largest:digits=0..1", "-o", "out", str(script(PROGRAM)))
    run = amanda(*words, PYTHONPATH=site, RAY_ADDRESS="h:1")
    assert run.returncode == 0, run.stderr
    told = "largest_digits=0 failed (WorkerCrashedError: the node is gone); it is run again"
    assert told in run.stderr
    lines = run.stdout.splitlines()
    assert sorted(lines[:2]) == [f"cluster: largest_digits={n}" for n in (0, 1)]
    assert lines[2:] == ["closed", "amanda: 2 runs in out"]
    if importlib.util.find_spec("ray") is None:
        refused = amanda(*words, RAY_ADDRESS="h:1")
        assert refused.returncode == 2
        assert refused.stderr.endswith("pip install 'amanda-tools[ray]'\n")


@pytest.mark.slow
def test_runs_are_tasks_of_ray(
    amanda: Command, environment: dict[str, str], tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Of a cluster on this machine; an interrupt ends them."""
    pytest.importorskip("ray")
    words = ("sweep", "-t", "largest:digits=0..1", "-o", "out")
    run = amanda(*words, str(script(PROGRAM)), RAY_ADDRESS="local")
    assert (run.returncode, run.stdout) == (0, "amanda: 2 runs in out\n"), run.stderr
    failing = amanda(*words, "--jobs", "1", str(script(FAILING)), RAY_ADDRESS="local")
    assert failing.returncode == 1
    assert "failed (signal 9)" in failing.stderr
    end_by_signal(signal.SIGINT, {**environment, "RAY_ADDRESS": "local"}, tmp_path, script)
