"""The benchmark of speed, its page, growth and peaks of memory; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import growth, memory, speed


def row(case: str, name: str, median: float, bound: float | None, doubt: str = "") -> Any:
    """A row as the benchmark reports it."""
    return {
        "case": case, "name": name, "median": median, "minimum": median, "bound": bound,
        "interval": {"low": median, "high": median}, "doubt": doubt,
        "conclusion": "within the bound" if bound and median < bound else "above the bound",
    }  # fmt: skip


def test_a_case_has_a_row_for_each_interceptor(tmp_path: Path) -> None:
    """A row says by its name which interceptor it is of, and has that one's goal."""
    file = tmp_path / "speed.json"
    arguments = ["--quick", "--case", "architecture-bert", "--interceptor", "mode", "-o", str(file)]
    assert speed.main(arguments) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["name"], row["bound"]) for row in rows] == [(f"mode: {speed.ROUTINE}", None)]


def test_the_page_says_what_is_shown() -> None:
    """Cases are columns, with goals; architectures are summed up by median and worst."""
    rows = [
        row("gpt2-12x64-infer", "gate: count", 1.1, 1.05),
        row("gpt2-12x64-infer", "peer: DebugMode", 5.0, None, doubt="few rounds"),
        row("gpt2-12x64-infer", "peer: torchlens.trace", 300.0, None),
        row("gpt2-12x64-train", "gate: count", 1.2, 1.25),
        row("architecture-a", "gate: routine", 1.2, 1.6),
        row("architecture-b", "gate: routine", 1.4, 1.6),
        row("architecture-c", "gate: routine", 1.3, 1.6),
    ]
    text = speed.page(rows, ["## Growth", "none"])
    assert "| gate: count | 1.10 (1.10-1.10); 1.05 missed | 1.20 (1.20-1.20); 1.25 kept |" in text
    assert "| peer: DebugMode | 5.00 (5.00-5.00) unsure |  |" in text
    assert "median 1.30, worst 1.40 on b (goals: 1.22 and 1.40)" in text
    assert text.endswith("## Growth\n\nnone\n")
    chart, _ = speed.charts(text)
    assert list(chart.labels) == ["gate: count", "peer: DebugMode"]
    assert chart.values == {"ratio": [1.1, 5.0]}


def test_growth_has_a_line_for_each_setting() -> None:
    """Operators, tools and routines of a tool grow one at a time."""
    lines = growth.growth(quick=True).splitlines()[4:]
    settings = [line.split(" | ")[:3] for line in lines]
    assert [[part.strip("| ") for part in setting] for setting in settings] == [
        ["100", "1", "1"], ["1,000", "1", "1"], ["100", "4", "1"], ["100", "16", "1"],
        ["100", "1", "4"], ["100", "1", "16"],
    ]  # fmt: skip


def test_the_peak_of_a_process_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark's own child processes print one number of bytes."""
    assert memory.main(["--peak-of", "resnet18-b1-32-infer", "--watched"]) == 0
    assert int(capsys.readouterr().out) > 2**20
