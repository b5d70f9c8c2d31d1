"""``amanda compare``: two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Command


def write(folder: Path, summary: Any, *rows: Any, tool: str = "flops") -> Path:
    folder.mkdir(exist_ok=True)
    result = {"tool": tool, "schema": 1, "namespaces": [], "summary": summary, "ops": rows}
    (folder / f"{tool}.json").write_text(json.dumps(result))
    return folder


def test_two_runs_are_compared(amanda: Command, tmp_path: Path) -> None:
    """Figures that differ have their ratio, and equal ones are counted; times are no difference."""
    conv, relu = {"id": "Net.a/conv:0", "module": "a"}, {"id": "Net.b/relu:0", "module": "b"}
    shapes = [[{"shape": [2, n], "dtype": "float32"}] for n in (4, 8)]
    one = write(
        tmp_path / "one",
        {"flops": 2000, "macs": 1, "first": None, "phases": {"forward": 1}, "by_type": {"mm": 1}},
        *({**conv, "order": 0}, {**relu, "outputs": shapes[0]}, {"id": "old", "module": "b"}),
    )
    other = write(
        tmp_path / "other",
        {"flops": 3000, "macs": 1, "first": relu, "per_step": {"flops": 1}},
        *({**conv, "order": 5}, {**relu, "outputs": shapes[1]}, {"id": "new", "module": "c"}),
    )
    write(one, {"n": 1}, {"id": "x", "seconds": 1}, tool="profile")
    write(other, {"n": 1}, {"id": "x", "seconds": 2}, tool="profile")
    write(one, {"n": 1}, tool="count")
    (other / "flops.timeline.json").write_text("no JSON")
    run = amanda("compare", "one", "other")
    assert (run.returncode, run.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in run.stdout.splitlines() if "----" not in line]
    assert lines == [
        *("one (A) and other (B): 3 figures of 5 not equal", "tool figure A B B / A"),
        *("flops flops 2,000 3,000 1.5", "flops first - Net.b/relu:0", "flops per step: flops - 1"),
        *("modules and operators of one run alone: 3", "name kind run"),
        *("c module B", "old operator A", "new operator B"),
        *("first difference in an operator of both runs", "tool operator figure A B"),
        "flops Net.b/relu:0 outputs [2, 4] float32 [2, 8] float32",
    ]
    (one / "renamed.json").write_bytes((one / "profile.json").read_bytes())
    same = amanda("compare", "one/renamed.json", "other")
    assert "0 figures of 1 not equal" in same.stdout
    assert "first difference in an operator of both runs: none" in same.stdout
