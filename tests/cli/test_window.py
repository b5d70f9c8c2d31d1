"""``--trigger`` and ``--ranks one-per-stage``: tools run in a part of the run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from amanda.cli.window import Trigger, is_first_of_stage
from amanda.errors import AmandaError
from amanda.files import read_json
from tests.cli.conftest import Command, driver_package

PROGRAM = """
import sys, time
from pathlib import Path
import minigrad as mg
weight = mg.MiniParameter([2.0, 3.0])
for step in range(int(sys.argv[1])):
    mg.backward(mg.add(mg.mul(weight, weight), weight))
    if step == 1:
        Path("go").write_text(sys.argv[2])
        time.sleep(1.5)
    print("step", step)
    if step == 3 and len(sys.argv) > 3:
        Path("again").write_text(Path("go").read_text())
        Path("go").write_text("6")
        time.sleep(1.5)
"""


@pytest.fixture
def program(script: Callable[[str], Path]) -> str:
    return str(script(PROGRAM))


@pytest.fixture
def usr2() -> Iterator[None]:
    earlier = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, earlier)


WAITING = ("run", "-t", "count", "-o", "out", "--trigger", "go", "--steps", "2", "--")


def test_tools_run_some_steps_of_a_file(amanda: Command, tmp_path: Path, program: str) -> None:
    """They see these whole; the results are there before the program ends, and once more after a
    second time."""
    run = amanda(*WAITING, program, "9", "3", "again")
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith(("step", "amanda: "))]
    assert [" ".join(line.split()[3:6]) or line for line in lines] == [
        *("step 0", "step 1", "step 2", "step 3", f"in {tmp_path / 'out'}", "in 2 steps,"),
        *("step 4", "step 5", "step 6", f"in {tmp_path / 'out'}", "in 2 steps,", "step 7", "step 8"),
    ]
    summary = read_json(tmp_path / "out" / "count.json")["summary"]
    assert (summary["steps"], summary["forward"]) == (4, 8)


def test_ranks_agree_on_a_step(
    tmp_path: Path, usr2: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first that sees the empty file, or gets the signal, names one some seconds ahead."""
    path = tmp_path / "go"
    first, second = Trigger(path, is_signalled=True), Trigger(path, is_signalled=False)
    for trigger in (first, second):
        with pytest.raises(AmandaError):
            trigger.look()
        assert trigger.begin is None
    path.touch()
    first.ended, second.ended = 30, 32
    first.look()
    second.look()
    assert first.begin == second.begin == 30 + 2 + 10 * 30
    signal.raise_signal(signal.SIGUSR2)
    first.ended = 400
    first.look()
    second.look()
    assert first.begin == second.begin == 400 + 2 + 10 * 370
    assert path.read_text() == "4102\n"
    path.write_text("now")
    second.look()
    second.look()
    assert capfd.readouterr().err.count("does not have the number of a step: now") == 1


def test_without_a_step_the_tools_do_not_run(amanda: Command, tmp_path: Path, program: str) -> None:
    """A line says so; a rank that sees the number too late begins at once, and says so."""
    never = amanda(*WAITING, program, "4", "70")
    assert (never.returncode, never.stdout.count("\n")) == (0, 4)
    assert never.stderr == "amanda: warning: nothing has triggered the tools\n"
    assert not list((tmp_path / "out").iterdir())
    late = amanda(*WAITING, program, "6", "1")
    assert late.stderr == "amanda: warning: the tools begin after step 3, not 1\n"
    assert read_json(tmp_path / "out" / "count.json")["summary"]["steps"] == 2
    (tmp_path / "out" / "trigger").write_text("1")
    ended = amanda("run", "-t", "count", "-o", "out", "--trigger", "SIGUSR2", program, "3", "")
    assert "2 ops in 1 step" in ended.stdout, ended.stderr
    for words, said in [
        (("--trigger", "SIGUSR2"), "give a folder, -o DIR"),
        (("--steps", "3"), "--steps is for --trigger"),
        (("--ranks", "one-per-stge"), "or one-per-stage, got 'one-per-stge'"),
    ]:
        assert said in amanda("run", *words, program).stderr


@pytest.mark.parametrize(
    ("mesh", "is_chosen"),
    [({"pp": 3, "dp": 0, "tp": 0}, True), ({"pp": 0, "dp": 1, "tp": 0}, False), ({"pp": 2}, True)],
)
def test_one_rank_of_each_stage_runs_under_tools(
    amanda: Command, tmp_path: Path, program: str, mesh: Mapping[str, int], is_chosen: bool
) -> None:
    """The first one, from the second step on; the others write nothing."""
    assert is_first_of_stage(mesh) == is_chosen
    driver_package(tmp_path, "meshed", f"mesh = {mesh}\npriority = 99")
    words = ("run", "-t", "count", "-o", "out", "--ranks", "one-per-stage", program, "3", "")
    run = amanda(*words, RANK="1", WORLD_SIZE="8", PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    written = list((tmp_path / "out").iterdir())
    assert [path.name for path in written] == ["count-rank1.json"] * is_chosen
    if is_chosen:
        assert read_json(written[0])["summary"]["steps"] == 2


def test_without_stages_the_program_ends(amanda: Command, program: str) -> None:
    """At the end of its first step, with the status of wrong usage."""
    run = amanda("run", "-t", "count", "--ranks", "one-per-stage", program, "3", "")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("amanda: error: --ranks one-per-stage: no DeviceMesh of the")
    assert run.stderr.count("\n") == 1
