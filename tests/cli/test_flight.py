"""``flight`` and ``amanda flight``: what is left of processes that end badly, or hang."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amanda.errors import FileError
from amanda.inline import Ring
from amanda.tools.rings import read_ring, table_of
from tests.cli.conftest import Command

PROGRAM = """
import os, signal, sys, time
import minigrad as mg

a = mg.MiniTensor(2)
for step in range(3):
    mg.add(mg.mul(a, a), a)
how = sys.argv[1]
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "abort":
    os.abort()
elif how == "hang":
    time.sleep(100)
elif how == "child":
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(100)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
elif how == "own":
    signal.signal(signal.SIGUSR2, lambda *_: print("mine", flush=True))
    os.kill(os.getpid(), signal.SIGUSR2)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The path of a program that ends as its argument says."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return "program.py"


FLIGHT = ("run", "-t", "flight", "-o", "out", "--")


@pytest.mark.parametrize(
    ("how", "number"), [("kill", signal.SIGKILL), ("abort", signal.SIGABRT), ("well", 0)]
)
def test_a_process_that_dies(how: str, number: int, amanda: Command, program: str) -> None:
    """Its last operators are there, whatever has ended it."""
    run = amanda(*FLIGHT, program, how, PYTHONWARNINGS="default")
    assert (run.returncode, "ResourceWarning" in run.stderr) == (-number, False)
    run = amanda("flight", "out")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("flight: 1 rank\n")
    assert "rank 0: the last of 6 operators that began\n" in run.stdout
    ops = re.findall(r"(in|after) +/(add|mul):(\d)", run.stdout)
    assert ops == [("after", *op) for op in (("add", "2"), *_backwards())]


def _backwards() -> list[tuple[str, str]]:
    return [(name, str(i)) for i in (2, 1, 0) for name in ("add", "mul")]


def test_a_process_that_hangs(
    amanda: Command, program: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """After the time of its own accord, and at SIGUSR2, it prints where it is, and goes on."""
    words = [sys.executable, "-m", "amanda", "run", "-t", "flight:timeout=0.2", "-o", "out"]
    process = subprocess.Popen(
        [*words, "--", program, "hang"], cwd=tmp_path, env=environment, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line == (
        "amanda: no operator has begun for 0.2 s: flight: the last of 6 operators that began\n"
    )
    os.kill(process.pid, signal.SIGUSR2)
    while not line.startswith("amanda: SIGUSR2: flight: the last of 6 operators that began"):
        line = process.stderr.readline()
        assert line
    while "program.py" not in line:
        line = process.stderr.readline()
        assert line
    assert "the last of 6 operators" in amanda("flight", "out").stdout
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_the_signal_of_the_program(amanda: Command, program: str) -> None:
    """A program that handles SIGUSR2 gets it, and nothing is printed."""
    run = amanda(*FLIGHT, program, "own")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("mine\n")


def test_the_signal_of_a_child(amanda: Command, program: str) -> None:
    """A forked child ends by the signal, as without the tool."""
    run = amanda(*FLIGHT, program, "child")
    assert run.returncode == 0
    assert run.stdout.startswith(f"{-signal.SIGUSR2}\n")


def test_the_ring_of_the_run_before(amanda: Command, program: str, tmp_path: Path) -> None:
    """A restart in the same folder keeps what the run before has left."""
    for how in ("kill", "well"):
        amanda(*FLIGHT, program, how)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "flight.json", "flight.ring", "flight.ring.old",
    }  # fmt: skip


def test_a_folder_is_needed(amanda: Command, program: str, tmp_path: Path) -> None:
    """Without -o, or where the file cannot be written, the command line is wrong."""
    run = amanda("run", "-t", "flight", "--", program, "well")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    (tmp_path / "out/flight.ring").mkdir(parents=True)
    (tmp_path / "out/flight.ring.old").touch()
    run = amanda(*FLIGHT, program, "well")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "flight.ring cannot be written" in run.stderr


def write_ring(path: Path, step: int, *ops: str, is_in: bool = False, size: int = 4) -> None:
    """Write the ring of a process that has run operators in a step."""
    ring = Ring(size, int, path, {"host": "here"})
    numbers = {name: ring.name({"id": name}) for name in dict.fromkeys(ops)}
    ring.set_step(step)
    for i, name in enumerate(ops, 1):
        ring.begin(numbers[name])
        if i < len(ops) or not is_in:
            ring.end(numbers[name])


def test_the_rank_that_is_elsewhere(amanda: Command, tmp_path: Path) -> None:
    """Of three ranks the one that is not where the others are is named, and one without a ring."""
    for rank in (0, 1, 3):
        ops = ("a", "b", "all_reduce")[: 2 if rank == 1 else 3]
        write_ring(tmp_path / f"flight-rank{rank}.ring", 7, *ops, is_in=True)
    lines = amanda("flight", ".").stdout.splitlines()
    assert lines[0] == "flight: 3 ranks"
    assert lines[-3:] == [
        "no ring of rank 2",
        "most ranks (2) are in all_reduce in step 7; elsewhere:",
        "  rank 1: in b in step 7, 2 begun",
    ]


def test_ranks_that_are_all_elsewhere(amanda: Command, tmp_path: Path) -> None:
    """The one that has come least far is named."""
    write_ring(tmp_path / "flight-rank0.ring", 7, "a", "b")
    write_ring(tmp_path / "flight-rank1.ring", 6, *"abcde", is_in=True)
    lines = amanda("flight", ".").stdout.splitlines()
    assert lines[-2:] == [
        "the ranks are in 2 places; the least far is:",
        "  rank 1: in e in step 6, 5 begun",
    ]


def test_a_ring_that_has_gone_round(amanda: Command, tmp_path: Path) -> None:
    """The last executions are listed, without the oldest, which may be half overwritten."""
    write_ring(tmp_path / "flight.ring", 0, *"abcdefg", is_in=True)
    lines = amanda("flight", "flight.ring", "--full").stdout.splitlines()
    assert "rank 0: the last of 7 operators that began" in lines
    assert [line.split()[1:3] for line in lines[-3:]] == [
        ["in", "g"], ["after", "f"], ["after", "e"],
    ]  # fmt: skip


def test_damaged_rings(amanda: Command, tmp_path: Path) -> None:
    """Each is named in one line, and the others are shown; names that are lost are said to be."""
    for rank in range(6):
        write_ring(tmp_path / f"flight-rank{rank}.ring", 0, "a", is_in=True)
    paths = [tmp_path / f"flight-rank{rank}.ring" for rank in range(6)]
    whole = paths[0].read_bytes()
    paths[1].write_bytes(whole[:100])
    paths[2].write_bytes(b"PK\3\4" + whole[4:])
    paths[3].write_bytes(b"")
    paths[4].write_bytes(whole[:8] + b"\xff" * 8 + whole[16:])
    paths[5].write_bytes(whole[:-3])
    run = amanda("flight", ".")
    assert run.returncode == 0
    names = re.findall(r"flight-rank(\d).ring is", run.stderr)
    assert (names, run.stderr.count("\n")) == (list("1234"), 4)
    assert "in     (name lost)" in run.stdout
    for path in paths:
        path.write_bytes(os.urandom(64))
    run = amanda("flight", ".")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines()[-1] == (
        "amanda: error: . has no ring that can be read (flight-rank<n>.ring)"
    )
    assert amanda("flight", "nowhere").returncode == 2


def write_dump(path: Path, *states: tuple[str, bool], about: str = "undefined") -> None:
    """Write a dump of collectives as PyTorch's Flight Recorder does (version 2.10)."""
    entries = [
        {
            "record_id": i, "process_group": ("0", about), "profiling_name": "nccl:all_reduce",
            "collective_seq_id": i, "p2p_seq_id": 0, "state": state, "retired": is_retired,
            "is_p2p": False,
        }
        for i, (state, is_retired) in enumerate(states, 1)
    ]  # fmt: skip
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}, 2))


def test_dumps_of_collectives(amanda: Command, tmp_path: Path) -> None:
    """Beside the operator of each rank is the collective in which it waits, and the last one that
    has ended; a dump that cannot be read, or would run code, is named in one line."""
    for rank in range(2):
        write_ring(tmp_path / f"flight-rank{rank}.ring", 7, "a", is_in=True)
    ended = ("completed", True)
    write_dump(tmp_path / "dump_0", ended, ("started", False), ("scheduled", False), about="tp")
    write_dump(tmp_path / "dump_1", ended, ("scheduled", True))
    write_dump(tmp_path / "dump_2")
    (tmp_path / "dump_9").mkdir()
    (tmp_path / "log_1").write_text("no dump")
    run = amanda("flight", ".")
    lines = run.stdout.splitlines()
    assert run.stderr == ""
    assert lines[0] == "flight: 2 ranks"
    assert lines[1].endswith("in collective                   last ended")
    assert lines[3].endswith("nccl:all_reduce 2 (tp), 1 more  nccl:all_reduce 1 (tp)")
    assert lines[4].endswith("-                               nccl:all_reduce 2 (0)")
    assert lines[5].split() == ["2", "-", "-"]
    write_dump(tmp_path / "trace_1")
    assert "trace_1 is a second dump of rank 1" in amanda("flight", ".").stderr
    (tmp_path / "trace_1").unlink()
    whole = (tmp_path / "dump_0").read_bytes()
    bad = (b"", b"log", whole[:-40], pickle.dumps(os.getpid), pickle.dumps({"entries": [1]}))
    for i, content in enumerate(bad):
        (tmp_path / f"dump_{i}").write_bytes(content)
    run = amanda("flight", ".")
    named = re.findall(r"(dump_\d) is no dump of collectives, or damaged: ", run.stderr)
    assert (named, run.stderr.count("\n")) == ([f"dump_{i}" for i in range(5)], 5)
    assert "UnpicklingError: it names posix.getpid" in run.stderr
    assert (run.returncode, run.stdout[:15]) == (0, "flight: 2 ranks")


def test_any_bytes(tmp_path: Path) -> None:
    """A ring with damaged numbers is read or refused."""
    path = tmp_path / "flight.ring"
    write_ring(path, 0, *"abcdefg")
    whole = path.read_bytes()
    for at in range(8, len(whole), 3):
        path.write_bytes(whole[:at] + b"\xfe\xff\xff" + whole[at + 3 :])
        with contextlib.suppress(FileError):
            table_of(read_ring(path), "damaged")


RANKS = """
import os, threading, time, torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()

def dump():
    # Process groups of gloo write none.
    while True:
        with open(f"{rank}.new", "wb") as file:
            file.write(torch._C._distributed_c10d._dump_fr_trace())
        os.replace(f"{rank}.new", f"out/dump_{rank}")
        time.sleep(0.2)

class Part(nn.Module):
    def forward(self, x):
        if rank == 1 and step == 2:
            torch.nn.functional.relu(Slow.apply(x))
        return x

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(1000)

threading.Thread(target=dump, daemon=True).start()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), Part(), nn.Linear(4, 2)))
for step in range(4):
    model(torch.rand(2, 4)).sum().backward()
    print("step", step, flush=True)
    amanda_step = step
"""

_NAME = r"gloo:\w+"
DUMPED = re.compile(
    rf"\n  0 .* {_NAME} (?P<waits>\d+) \(default_pg\)  +{_NAME} (?P<ended>\d+) \(default_pg\)"
    rf"\n  1 .* - +{_NAME} (?P<other>\d+) \(default_pg\)"
)
"""The lines of a rank that waits in a collective, and of one that has not entered it."""


@pytest.mark.slow
def test_two_ranks_of_which_one_stops(
    environment: dict[str, str], amanda: Command, tmp_path: Path
) -> None:
    """While both hang, the operator of the one that has stopped is named, and the collective in
    which the other one waits."""
    (tmp_path / "ranks.py").write_text(RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "amanda"]
    process = subprocess.Popen(
        [sys.executable, *words, *FLIGHT, "ranks.py"], cwd=tmp_path,
        env={**environment, "TORCH_FR_BUFFER_SIZE": "100"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while True:
            run = amanda("flight", "out")
            if (at := DUMPED.search(run.stdout)) and "in     Sequential.1/Slow:0" in run.stdout:
                break
            assert time.monotonic() < until, run
            time.sleep(0.5)
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
    lines = amanda("flight", "out").stdout.splitlines()
    assert lines[-2] == "the ranks are in 2 places; the least far is:"
    assert lines[-1].startswith("  rank 1: in Sequential.1/Slow:0 in step ")
    assert at["waits"] == str(int(at["ended"]) + 1) == str(int(at["other"]) + 1)


GRAPHS = """
import tensorflow as tf

@tf.function
def step(x, ends):
    y = tf.tanh(x)
    with tf.control_dependencies([y]):
        last = [tf.raw_ops.Abort(error_msg="no")] if ends else []
    with tf.control_dependencies(last):
        return y * y

for ends in (False, False, True):
    step(tf.ones(3), ends)
"""


@pytest.mark.slow
def test_a_function_of_tensorflow_that_dies(amanda: Command, tmp_path: Path) -> None:
    """Operators of graphs are noted, too: the one that has ended the process has not ended."""
    (tmp_path / "graphs.py").write_text(GRAPHS)
    run = amanda(*FLIGHT, "graphs.py")
    assert run.returncode == -signal.SIGABRT, run
    found = amanda("flight", "out").stdout
    assert re.search(r"in +\S*Abort", found), found
    assert re.search(r"after +\S*Tanh", found), found
