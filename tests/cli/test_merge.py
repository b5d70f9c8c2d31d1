"""``amanda merge``: the files of all ranks in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amanda.cli.merge import MergeError, merge
from tests.cli.conftest import Command


def result(flops: float, tool: str = "flops", schema: int = 1) -> dict[str, Any]:
    return {
        "tool": tool,
        "schema": schema,
        "namespaces": ["pytorch/2.13/eager"],
        "summary": {"flops": flops, "unknown_ops": {"svd": flops}},
        "ops": [{"id": "/mm:0", "flops": flops}],
    }


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name.replace('_', '-', 1)}.json").write_text(json.dumps(content))


def test_results_become_one_with_the_rank_in_each_row(amanda: Command, tmp_path: Path) -> None:
    """Numbers have sum and range, the rest stands by rank; other files are left alone."""
    write(tmp_path, flops_rank0=result(10), flops_rank1=result(30), flops_rank10=result(2))
    (tmp_path / "notes.json").write_text("[]")
    run = amanda("merge", str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"amanda: wrote flops.json in {tmp_path}\n"
    merged = json.loads((tmp_path / "flops.json").read_text())
    assert merged["ranks"] == [0, 1, 10]
    assert merged["summary"]["flops"] == {
        "by_rank": {"0": 10, "1": 30, "10": 2}, "sum": 42, "min": 2, "max": 30,
    }  # fmt: skip
    assert merged["summary"]["unknown_ops"]["by_rank"]["1"] == {"svd": 30}
    assert [(row["rank"], row["flops"]) for row in merged["ops"]] == [(0, 10), (1, 30), (10, 2)]
    assert len(list(tmp_path.iterdir())) == 5


def test_timelines_become_processes_of_one(tmp_path: Path) -> None:
    """Each rank is a process with a name; its events stay as they are."""
    for rank in (0, 1):
        events = [{"name": "mm", "ph": "X", "ts": 1, "dur": 2, "pid": 77, "tid": 5}]
        path = tmp_path / f"trace-rank{rank}.timeline.json"
        path.write_text(json.dumps({"traceEvents": events}))
    [path] = merge(tmp_path)
    assert path.name == "trace.timeline.json"
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["pid"] for e in events if e["ph"] == "X"] == [0, 1]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    (tmp_path / "trace-rank1.timeline.json").write_text('{"traceEvents": 1}')
    with pytest.raises(
        MergeError, match=r"trace\.timeline\.json: the timeline of rank 1 has no list"
    ):
        merge(tmp_path)


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Different tools, broken files."""
    write(tmp_path, flops_rank0=result(1), flops_rank1=result(1, schema=2))
    with pytest.raises(MergeError, match="different tools or versions"):
        merge(tmp_path)
    write(tmp_path, flops_rank1=[1])
    with pytest.raises(MergeError, match="common form"):
        merge(tmp_path)
    (tmp_path / "flops-rank1.json").write_text("{")
    with pytest.raises(MergeError, match=r"flops-rank1\.json cannot be read"):
        merge(tmp_path)


def test_numbers_of_any_length_are_merged(tmp_path: Path) -> None:
    """JSON has integers that no float can hold: such a figure has no sum, and the others have."""
    for huge, added in (([10**400, 1.5], None), ([10**308, 1.5, 10**308], "inf"), ([2, 3], 5)):
        folder = tmp_path / str(added)
        folder.mkdir()
        write(folder, **{f"flops_rank{rank}": result(value) for rank, value in enumerate(huge)})
        merge(folder)
        merged = json.loads((folder / "flops.json").read_text())["summary"]["flops"]
        assert merged["by_rank"] == {str(rank): value for rank, value in enumerate(huge)}
        assert merged.get("sum") == added


def test_a_run_tells_how_many_ranks_there_are(
    amanda: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """The result of the last rank is missed, too; --partial merges without it, and says so."""
    program = str(script("import minigrad as mg\na = mg.MiniTensor(2)\nmg.add(a, a)\n"))
    for rank in ("0", "1"):
        run = amanda("run", "-t", "largest", "-o", "out", program, RANK=rank, WORLD_SIZE="3")
        assert run.returncode == 0, run.stderr
    refused = amanda("merge", "out")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "largest.json has no result of rank 2" in refused.stderr
    assert "amanda merge --partial merges the others" in refused.stderr
    assert not (tmp_path / "out" / "largest.json").exists()
    merged = amanda("merge", "--partial", "out")
    assert merged.returncode == 0
    assert "warning: largest.json has no result of rank 2" in merged.stderr
    assert json.loads((tmp_path / "out" / "largest.json").read_text())["ranks"] == [0, 1]
