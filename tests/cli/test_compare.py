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
    """Figures that differ have their ratio, and equal ones are counted; rows of times are left out,
    and operators that initialise the model come last."""
    conv, relu = {"id": "Net.a/conv:0"}, {"id": "Net.b/relu:0"}
    shapes = [[{"shape": [2, n], "dtype": "float32"}] for n in (4, 8)]
    setup = [{"id": "/empty:0", "phase": "setup", "outputs": outputs} for outputs in shapes]
    one = write(
        tmp_path / "one",
        {"flops": 2000, "macs": 1, "first": None, "phases": {"forward": 1}, "by_type": {"mm": 1}},
        *(
            setup[0],
            {**conv, "order": 0},
            {**relu, "outputs": shapes[0]},
            {"id": "old", "type": "mm"},
        ),
    )
    other = write(
        tmp_path / "other",
        {"macs": 1, "flops": 3000, "first": relu, "mean": 0.25, "per_step": {"macs": 1}},
        *(
            setup[1],
            {**conv, "order": 5},
            {**relu, "outputs": shapes[1]},
            {"id": "new", "type": "mm"},
        ),
    )
    write(one, {"n": 1}, {"id": "x", "seconds": 1}, tool="profile")
    write(other, {"n": 1}, {"id": "x", "seconds": 2}, tool="profile")
    write(one, {"n": 1}, tool="count")
    (other / "flops.timeline.json").write_text("no JSON")
    run = amanda("compare", "one", "other")
    assert (run.returncode, run.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in run.stdout.splitlines() if "----" not in line]
    assert lines == [
        *("one (A) and other (B): 5 of 8 figures not equal", "figure A B B / A"),
        *("flops: flops 2,000 3,000 1.5", "flops: macs 1 -", "flops: first - Net.b/relu:0"),
        *("flops: mean - 0.25", "flops: per step: macs - 1"),
        *("4 of 5 operators not equal", "operator A → B"),
        *("Net.b/relu:0 outputs: 0: shape: 2x4 → 2x8", "old type: mm → -"),
        *("/empty:0 outputs: 0: shape: 2x4 → 2x8", "new type: - → mm"),
    ]
    same = amanda("compare", "one", "one").stdout
    assert "one (A) and one (B): 0 of 7 figures not equal" in same
    assert "0 of 4 operators not equal" in same


def test_runs_without_a_common_tool_are_refused(amanda: Command, tmp_path: Path) -> None:
    """The message names the tools of both; a damaged file is named, too."""
    one, other = write(tmp_path / "a", {}), write(tmp_path / "b", {}, tool="nan")
    said = f"amanda: error: {one} (flops) and {other} (nan) have no tool in common\n"
    run = amanda("compare", str(one), str(other))
    assert (run.returncode, run.stdout, run.stderr) == (2, "", said)
    (one / "nan.json").write_text("no JSON")
    assert "error: a/nan.json cannot be read" in amanda("compare", "a", "b").stderr
