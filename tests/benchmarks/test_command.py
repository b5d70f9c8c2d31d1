"""The options, tables and files that benchmarks of time have in common; no framework runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import command, timing
from tests.benchmarks.timing import Comparison, Program, Round, Row

IDLE = Program(lambda: None)
CASES: command.Cases = {
    "small": lambda: [Comparison("one tool", IDLE, IDLE, 1.5), Comparison("a peer", IDLE, IDLE)],
    "large": lambda: [Comparison("one tool", IDLE, IDLE)],
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces measuring: "a peer" is unclear, the rest 1.25 times as slow; notes its arguments."""
    calls: list[Any] = []

    def measure(comparisons: Sequence[Comparison], schedule: timing.Schedule) -> list[Row]:
        calls.append((comparisons, schedule))
        return [
            Row.of(c.name, c.bound, [Round([1.0], [1.0 if "peer" in c.name else 1.25], [1.0])] * 9)
            for c in comparisons
        ]

    monkeypatch.setattr(command, "measure", measure)
    return calls


def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    options = command.parser("What it is.", CASES).parse_args(arguments)
    rows = command.run(CASES, options)
    return command.exit_code(rows, options), rows


def test_all_cases_are_measured(measured: list[Any]) -> None:
    """Without options: every row of every case, by processor time, and the exit code is 0."""
    code, rows = run()
    names = [(row["case"], row["name"]) for row in rows]
    assert names == [("small", "one tool"), ("small", "a peer"), ("large", "one tool")]
    assert code == 0
    assert {schedule for _, schedule in measured} == {timing.Schedule()}
    assert timing.Schedule().clock is timing.time.process_time


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--case", "small"], 0),
        (["--case", "small", "--strict"], 1),
        (["--case", "small", "--only", "tool", "--strict"], 0),
    ],
)
def test_strict_fails_where_nothing_can_be_concluded(
    measured: list[Any], arguments: list[str], code: int
) -> None:
    """``--strict`` exits with 1 if there is an unclear row, and with 0 otherwise."""
    assert run(*arguments)[0] == code


def test_rows_are_written_as_data(measured: list[Any], tmp_path: Path) -> None:
    """``-o`` writes what was printed, what it depends on, and how it was measured."""
    file = tmp_path / "rows.json"
    _, rows = run("--rounds", "7", "--seconds", "0.5", "-o", str(file))
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["rows"] == rows
    assert report["settings"] == {"rounds": 7, "seconds": 0.5}
    assert {"python", "machine", "load"} <= set(report["environment"])


def test_quick_concludes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """``--quick`` really runs, in blocks of one run, and is not a measurement."""
    runs: list[int] = []
    cases: command.Cases = {
        "c": lambda: [Comparison("x", Program(lambda: runs.append(1)), Program(lambda: None))]
    }
    options = command.parser("", cases).parse_args(["--quick"])
    (row,) = command.run(cases, options)
    assert len(runs) == 1 + 1
    assert row["doubt"] == "rounds: 1, at least 6 are needed"
    assert "NOTHING CAN BE CONCLUDED" in capsys.readouterr().out
