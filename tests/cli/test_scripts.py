"""Programs as people have them, under ``amanda run`` and untouched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command

Script = Callable[..., Path]

SCRIPTS = Path(__file__).parent / "scripts"
NO_TORCHVISION = Path(__file__).parents[1] / "no_torchvision"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(NO_TORCHVISION),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def complete(path: Path) -> list[dict[str, Any]]:
    """The complete events of a timeline that are of operators."""
    events = read(path)["traceEvents"]
    return [e for e in events if e["ph"] == "X" and e["cat"] not in ("module", "python")]


# -- files that tools keep while a program runs -------------------------------


def test_what_a_tool_has_streamed_to_disk_is_there_at_the_end(
    amanda: Command, script: Script, tmp_path: Path
) -> None:
    """Python's exit removes temporary files after the results, and a forked child never."""
    path = script(
        "import amanda, os, sys, torch\n"
        "for i in range(4200):\n"
        "    if i == 4150:\n"
        "        os.fork() or sys.exit()\n"
        "        os.wait()\n"
        "    torch.relu(torch.ones(2))\n"
        "    amanda.new_iteration()\n"
    )
    run = amanda(
        "run", "-t", "trace", "-t", "dump:shard=1000", "--ops", "relu", "-o", "out", str(path)
    )
    assert (run.returncode, run.stderr) == (0, "")
    events = complete(tmp_path / "out/trace.timeline.json")
    assert {event["name"] for event in events} == {"relu"}
    assert len(events) == 4200
    shards = list((tmp_path / "out").glob("dump-*.safetensors"))
    assert sum(path.stat().st_size for path in shards) > 4200 * 8


# -- training loops -----------------------------------------------------------

TOOLS = ("-t", "flops,trace,nan", "-t", "profile,stats:every=2", "-t", "count", "-o", "out")


@pytest.fixture
def settings(tmp_path: Path) -> None:
    """The file that digits.py reads from the folder in which it is started."""
    (tmp_path / "settings.json").write_text('{"seed": 3}')


def program_only(text: str) -> str:
    """What a program has printed before the summaries."""
    return text.partition("flops: 2 per multiply-accumulate")[0]


def result(folder: Path, tool: str) -> Any:
    """What a tool has written."""
    return read(folder / "out" / f"{tool}.json")["summary"]


@pytest.mark.usefixtures("settings")
def test_a_loop_of_plain_pytorch(python: Command, amanda: Command, tmp_path: Path) -> None:
    """scikit-learn's digits: losses, random numbers and pickles are those of the program alone.

    Its options look like ours, it reads a file beside itself and changes the folder. At last it
    fails: its traceback has no frame of ours, and the results are written.
    """
    words = [str(SCRIPTS / "digits.py"), "-t", "nothing", "-o", "model", "--epochs", "2"]
    alone = python(*words, **ENVIRONMENT)
    under = amanda("run", *TOOLS, "--", *words, **ENVIRONMENT)
    assert "nothing History ['0x1." in alone.stdout
    assert program_only(under.stdout) == alone.stdout
    assert alone.stderr.endswith("IndexError: index out of range in self\n")
    assert (under.stderr, under.returncode) == (alone.stderr, alone.returncode)
    assert under.returncode == 1
    # Two epochs; 64, 32 and 10 units.
    rows = 2 * 1347
    flops = result(tmp_path, "flops")
    assert flops["flops"] == 2 * rows * (64 * 32 + 32 * 10)
    assert flops["flops_backward"] == 2 * rows * (64 * 32 + 2 * 32 * 10)
    assert flops["params"] == 64 * 32 + 32 + 32 * 10 + 10 + 2 * 4
    assert result(tmp_path, "nan")["first"] is None
    counts = result(tmp_path, "count")["by_type"]["forward"]
    assert counts["relu"]["executions"] == 2 * 5
    timeline = complete(tmp_path / "out/trace.timeline.json")
    assert sum(event["name"] == "relu" for event in timeline) == 2 * 5


def test_long_loops_are_those_of_the_program_alone(python: Command, amanda: Command) -> None:
    """A loop of thousands of calls computes what it computes without a tool, whatever the forward
    passes do beside, and never comes to a compiler that the program does not use."""
    alone = python(str(SCRIPTS / "long_runs.py"), **ENVIRONMENT)
    under = amanda("run", "-t", "count", str(SCRIPTS / "long_runs.py"), **ENVIRONMENT)
    assert alone.stdout.endswith("imported: False\n")
    assert under.stdout.startswith(alone.stdout)
    assert (under.stderr, under.returncode) == (alone.stderr, 0)
    last = under.stdout.splitlines()[-1]
    assert ", all seen as far as is known; " in last
    assert "compiled" not in last


@pytest.mark.usefixtures("settings")
def test_a_loop_that_is_interrupted(environment: dict[str, str], tmp_path: Path) -> None:
    """The results are given, and the exit status is that of the signal."""
    path = os.pathsep.join([environment["PYTHONPATH"], ENVIRONMENT["PYTHONPATH"]])
    words = ["-m", "amanda", "run", *TOOLS, str(SCRIPTS / "digits.py"), "--epochs", "1000000"]
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**environment, **ENVIRONMENT, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert re.search(r"^amanda: \d+ ops", out, re.MULTILINE)
    assert result(tmp_path, "count")["by_type"]["forward"]["relu"]["executions"] >= 5
    assert complete(tmp_path / "out/trace.timeline.json")


def test_the_trainer_of_transformers(amanda: Command, tmp_path: Path) -> None:
    """Three steps of a GPT-2 of one layer; each matrix product counts."""
    run = amanda("run", *TOOLS, str(SCRIPTS / "trainer.py"), **ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    width, length, tokens = 16, 16, 3 * 4 * 16
    layer = 12 * width * width + 2 * length * width
    flops = result(tmp_path, "flops")
    assert flops["flops"] == 2 * tokens * (layer + 50 * width)
    assert flops["flops_backward"] == 2 * flops["flops"]
    assert result(tmp_path, "nan")["first"] is None
    modules = {row["module"] for row in read(tmp_path / "out/trace.json")["ops"]}
    assert {"transformer.h.0.attn.c_attn", "lm_head"} <= modules


def test_keras_fit(amanda: Command, tmp_path: Path) -> None:
    """The compiled training and test steps: eight batches of 16, two of 32."""
    run = amanda("run", *TOOLS, str(SCRIPTS / "keras_fit.py"), **ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("{'accuracy': [")
    flops = result(tmp_path, "flops")
    assert flops["flops"] == 2 * (128 + 64) * (8 * 16 + 16 * 2)
    assert flops["flops_backward"] == 2 * 128 * (8 * 16 + 2 * 16 * 2)
    assert result(tmp_path, "nan")["first"] is None
    counts = result(tmp_path, "count")["by_type"]["forward"]
    assert counts["linear"]["executions"] == 2 * (8 + 2)


# -- several processes --------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context: str, amanda: Command, tmp_path: Path) -> None:
    """They run vanilla, find the program's classes, and leave the results to their parent."""
    run = amanda("run", *TOOLS, str(SCRIPTS / "workers.py"), context, **ENVIRONMENT)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("140.0\n")
    assert run.stdout.count("; tools took ") == 1
    types = result(tmp_path, "count")["by_type"]["forward"]
    assert types["mul"]["executions"] == 2
    assert "relu" not in types


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "lightning_fit"])
def test_trainers_under_torchrun(name: str, python: Command, tmp_path: Path) -> None:
    """On two ranks losses and weights are those without tools."""
    environment = ENVIRONMENT
    if name == "lightning_fit":
        pytest.importorskip("lightning")
        # It needs torchvision.
        environment = {"OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(SCRIPTS / f"{name}.py")
    plain = python(*words, script, **environment)
    watched = python(*words, "-m", "amanda", "run", *TOOLS, script, **environment)
    assert (plain.returncode, watched.returncode) == (0, 0), watched.stderr
    printed = re.compile(r"\[[\d., ]+\]|-?0x[\da-fp.+-]+")
    found = [sorted(printed.findall(run.stdout)) for run in (plain, watched)]
    assert found[0] == found[1]
    assert len(found[0]) >= 2


@pytest.mark.slow
def test_workers_of_ray_train(python: Command) -> None:
    """They know their ranks, and have the weights that they have without a tool."""
    pytest.importorskip("ray.train")
    script = str(SCRIPTS / "ray_train.py")
    found = []
    for tools in ((), ("flops",)):
        run = python(script, *tools, **ENVIRONMENT)
        assert run.returncode == 0, run.stderr[-3000:]
        found.append(
            set(re.findall(r"(rank \d of 2): (-?0x[\da-f.]+p[+-]\d+)", run.stdout + run.stderr))
        )
    assert found[0] == found[1]
    assert {rank for rank, _ in found[0]} == {"rank 0 of 2", "rank 1 of 2"}


def test_torchrun_and_merge(amanda: Command, python: Command, tmp_path: Path) -> None:
    """Each rank writes its own files, the first one prints, and ``amanda merge`` joins them."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "amanda"]
    run = python(*words, "run", *TOOLS, str(SCRIPTS / "ranks.py"), **ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("; tools took ") == 1
    gradients = [line.split()[1] for line in run.stdout.splitlines() if re.match("[01] 0x", line)]
    assert len(gradients) == 2, (run.stdout, run.stderr)
    assert len(set(gradients)) == 1
    merged = amanda("merge", "out")
    assert (merged.returncode, merged.stderr) == (0, "")
    flops = result(tmp_path, "flops")["flops"]
    assert flops["by_rank"] == {"0": 2 * 2 * 3 * 4 * 2, "1": 2 * 2 * 3 * 4 * 2}
    assert {row["rank"] for row in read(tmp_path / "out/count.json")["ops"]} == {0, 1}
    assert {event["pid"] for event in complete(tmp_path / "out/trace.timeline.json")} == {0, 1}
