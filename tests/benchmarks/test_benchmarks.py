"""The benchmarks run; what they measure of time is asserted nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.benchmarks import memory, overhead
from tests.benchmarks.cases import CONTESTANTS


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_overhead_reports_every_contestant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a row, and the file an entry, for each contestant."""
    file = tmp_path / "overhead.json"
    case = "gpt2-4x64-infer"
    assert overhead.main(["--case", case, "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert [r["contestant"] for r in results] == list(CONTESTANTS)
    assert all(r["contestant"] in printed and r["case"] == case for r in results)


@pytest.mark.parametrize("case", ["resnet18-b1-32-infer", "gpt2-4x64-train"])
def test_no_tensor_outlives_its_scope(case: str) -> None:
    """Memory after the scope equals memory before, to the tensor and to the byte."""
    usages = memory.measure(case)
    before, after = usages["before"], usages["after"]
    assert (after.tensors, after.tensor_bytes) == (before.tensors, before.tensor_bytes)
