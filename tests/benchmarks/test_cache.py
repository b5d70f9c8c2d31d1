"""The benchmark of the action cache runs; times are asserted nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import cache


@pytest.mark.parametrize("mode", cache.CASES)
def test_cache(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each tool, printed and written, with the times that its ratio is made of."""
    pytest.importorskip({"eager": "torch", "function": "tensorflow"}[mode])
    file = tmp_path / "rows.json"
    arguments = ["--case", mode, "--only", "count", "--only", "prune", "--quick", "-o", str(file)]
    assert cache.main(arguments) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["case"], row["name"]) for row in rows] == [(mode, "count"), (mode, "prune")]
    assert all(row["name"] in printed for row in rows)
    assert all(row[key] > 0 for row in rows for key in ("median", "minimum", "milliseconds"))
    assert "on average" in printed
