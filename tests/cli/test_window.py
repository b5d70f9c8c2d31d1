"""``--trigger`` and ``--ranks one-per-stage``: tools run in a part of the run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from amanda.cli.rank import Rank
from amanda.cli.run import ReportedScope, UsageError, create_parser
from amanda.cli.window import Trigger, is_first_of_stage
from amanda.errors import AmandaError
from amanda.files import read_json
from amanda.testing import loopback as lb
from tests.cli.conftest import Command

Train = Callable[..., ReportedScope]


@pytest.fixture(autouse=True)
def usr1() -> Iterator[None]:
    earlier = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, earlier)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains so many steps under ``count``; before each the file has a text, and is looked at."""
    now = 1.0
    monkeypatch.setattr("amanda.cli.window.time.monotonic", lambda: now)

    def run(
        steps: int, texts: Mapping[int, str], *options: str, rank: Any = None, trains: bool = True
    ) -> ReportedScope:
        words = ("-t", "count", "-o", str(tmp_path / "out"), "--driver", "loopback", *options)
        scope = ReportedScope(create_parser().parse_args(words), rank or Rank())
        net = lb.Sequential(lb.Linear([[1.0]]))
        nonlocal now
        scope.begin()
        try:
            for step in range(steps):
                now += 1
                if step in texts:
                    (tmp_path / "go").write_text(texts[step])
                output = lb.relu(net(lb.tensor([[2.0]])))
                if trains:
                    output.backward()
                    lb.sgd_step(net.parameters(), 0.1)
                print("step", step)
        finally:
            scope.end()
        return scope

    return run


def test_tools_run_some_steps(train: Train, tmp_path: Path, capsys: Any) -> None:
    """They see these whole; the results are there before the program ends, and once more after a
    second time."""
    text = str(tmp_path / "go")
    train(9, {1: "3", 4: "6"}, "--trigger", text, "--steps", "2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("st", "am"))]
    wrote, ended = "amanda: wrote count", "ops in 2 steps"
    told = [ended if ended in line else line[: len(wrote)] for line in lines]
    assert told == [
        *(f"step {n}" for n in range(4)), wrote, ended,
        *(f"step {n}" for n in range(4, 7)), wrote, ended, "step 7", "step 8",
    ]  # fmt: skip
    summary = read_json(tmp_path / "out" / "count.json")["summary"]
    assert (summary["steps"], summary["forward"]) == (4, 12)


def test_tables_count_the_steps_of_the_tools(train: Train, tmp_path: Path) -> None:
    """And not those before them, in a second time too."""
    pytest.importorskip("duckdb")
    from amanda_tools.tables import query

    words = ("--trigger", str(tmp_path / "go"), "--steps", "3", "--format", "parquet")
    train(14, {1: "3", 8: "10"}, *words, "--flush", "2")
    sql = "SELECT step, count, sum FROM count WHERE type = 'relu' AND direction = 'forward'"
    table, _ = query(str(tmp_path / "out"), f"{sql} ORDER BY step")
    assert table.rows == [(5, 2, 2.0), (6, 1, 1.0), (12, 2, 2.0), (13, 1, 1.0)]


def test_a_step_of_inference_ends_with_the_next_pass(train: Train, tmp_path: Path) -> None:
    """Which the tools see from its begin on, and at the end not at all."""
    train(9, {1: "3"}, "--trigger", str(tmp_path / "go"), "--steps", "4", trains=False)
    summary = read_json(tmp_path / "out" / "count.json")["summary"]
    assert (summary["steps"], summary["forward"]) == (4, 8)


def test_ranks_agree_on_a_step(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """One that sees the empty file, or gets the signal, names one some seconds ahead; all begin
    after that, and the file is removed."""
    now = 100.0
    monkeypatch.setattr("amanda.cli.window.time.monotonic", lambda: now)
    path = tmp_path / "out" / "trigger"
    path.parent.mkdir()
    path.write_text("7")
    ranks = [Trigger(path, is_signalled=n == 0) for n in range(2)]
    assert not path.exists()

    def steps(ended: int, seconds: float) -> list[bool]:
        nonlocal now
        now += seconds
        return [rank.begins(ended) for rank in ranks]

    assert steps(1, 1.0) == [False, False]
    path.touch()
    # Of 20 s: few steps, at each of which there is a look.
    assert steps(2, 20.0) == [False, False]
    assert path.read_text() == "5\n"
    assert steps(4, 20.0) == [False, False]
    assert steps(5, 0.1) == [True, True]
    assert steps(6, 0.1) == [False, False]
    steps(7, 2.0)
    assert not path.exists()
    signal.raise_signal(signal.SIGUSR1)
    assert steps(107, 1.0) == [False, False]
    signal.raise_signal(signal.SIGUSR1)
    steps(200, 1.0)
    assert path.read_text() == "1109\n"
    assert steps(1120, 10.0) == [True, True]
    assert capfd.readouterr().err.count("begin after step 1120, not 1109\n") == 2
    path.write_text("now")
    steps(1130, 1.0)
    steps(1140, 1.0)
    assert capfd.readouterr().err.count("does not have the number of a step: now") == 2
    path.write_text("9" * 5000)
    steps(1150, 1.0)
    assert capfd.readouterr().err.count("does not have the number of a step: 999") == 2
    path.unlink()
    path.parent.rmdir()
    signal.raise_signal(signal.SIGUSR1)
    steps(1160, 1.0)
    assert "warning: [Errno 2] No such file or directory" in capfd.readouterr().err
    ranks[0].close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ranks[0].close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert "the program handles SIGUSR1 itself" in capfd.readouterr().err


def test_what_does_not_fit_is_said(train: Train, tmp_path: Path, capfd: Any) -> None:
    """The tools have not begun, or this rank has read too late when; options that miss."""
    file = ("--trigger", str(tmp_path / "go"))
    train(4, {2: "70"}, *file)
    assert "warning: the program ended before the tools began\n" in capfd.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    train(6, {4: "1"}, *file)
    assert "warning: the tools begin after step 5, not 1\n" in capfd.readouterr().err
    assert read_json(tmp_path / "out" / "count.json")["summary"]["steps"] == 1
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with pytest.raises(AmandaError, match="SIGUSR1: the signal is not free; name a file"):
        train(3, {}, "--trigger", "SIGUSR1")
    for words, said in [
        (("--trigger", "SIGUSR1"), "give a folder, -o DIR"),
        (("--steps", "3"), "--steps is for --trigger"),
    ]:
        with pytest.raises(UsageError, match=said):
            ReportedScope(create_parser().parse_args(words), Rank())


@pytest.mark.parametrize(
    ("mesh", "is_chosen"),
    [({"pp": 3, "dp": 0, "tp": 0}, True), ({"pp": 0, "dp": 1, "tp": 0}, False), ({"pp": 2}, True)],
)
def test_one_rank_of_each_stage_runs_under_tools(
    train: Train, tmp_path: Path, monkeypatch: Any, mesh: Mapping[str, int], is_chosen: bool
) -> None:
    """The first one, from the second step on; the others write nothing."""
    assert is_first_of_stage(mesh) == is_chosen
    monkeypatch.setattr(lb.LoopbackDriver, "mesh", mesh, raising=False)
    train(3, {}, "--ranks", "one-per-stage", rank=Rank(1, 8))
    written = list((tmp_path / "out").iterdir())
    assert [path.name for path in written] == ["count-rank1.json"] * is_chosen
    if is_chosen:
        assert read_json(written[0])["summary"]["steps"] == 2


def test_without_stages_the_program_ends(amanda: Command, script: Callable[[str], Path]) -> None:
    """At the end of its first step, with the status of wrong usage."""
    text = "import minigrad as mg\nw = mg.MiniParameter([2.0])\nmg.backward(mg.mul(w, w))\nprint(1)"
    words = ("-t", "count", "--ranks", "one-per-stage", str(script(text)))
    run = amanda("run", *words, RANK="0", WORLD_SIZE="2")
    assert (run.returncode, run.stdout.partition("amanda")[0]) == (2, "")
    assert run.stderr.startswith("amanda: error: --ranks one-per-stage: no DeviceMesh of the")
    assert run.stderr.count("\n") == 1
