"""The benchmarks of PyTorch's time and memory run; times are asserted nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.benchmarks import memory, overhead, tools
from tests.benchmarks.cases_torch import CHECKERS


def test_overhead_reports_every_scope(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the file have a row for each scope, with the bounds of Amanda's own."""
    file = tmp_path / "overhead.json"
    case = "gpt2-4x64-infer"
    assert overhead.main(["--case", case, "--quick", "-o", str(file)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == list(overhead.SCOPES)
    assert all(row["name"] in printed and row["case"] == case for row in rows)
    bounds = [row["bound"] for row in rows]
    assert bounds == [1.75 if name in overhead.AMANDA else None for name in overhead.SCOPES]


def test_tools_reports_every_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the file have a row for each tool that was asked for, and each peer."""
    file = tmp_path / "tools.json"
    arguments = ["--case", "gpt2-12x64-infer", "--tool", "flops", "--tool", "stats"]
    assert tools.main([*arguments, "--quick", "-o", str(file)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["amanda, flops", "amanda, stats", *CHECKERS]
    assert [row["bound"] for row in rows] == [2.0, None, None, None, None]
    assert all(row["name"] in printed for row in rows)


@pytest.mark.parametrize("case", ["resnet18-b1-32-infer", "gpt2-4x64-train"])
def test_no_tensor_outlives_its_scope(case: str) -> None:
    """Memory after the scope equals memory before, to the tensor and to the byte."""
    usages = memory.measure(case)
    before, after = usages["before"], usages["after"]
    assert (after.tensors, after.tensor_bytes) == (before.tensors, before.tensor_bytes)
