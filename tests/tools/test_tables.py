"""Rows of tables of results: windows of real tools, and a thousand ranks made of them."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import amanda
from amanda.cli.rank import Rank
from amanda.tools.reporting import ReportingTool
from amanda_tools.count import CountTool
from amanda_tools.profile import ProfileTool
from amanda_tools.sparsity import SparsityTool
from amanda_tools.stats import StatsTool

pytest.importorskip("duckdb")

from amanda_tools.tables import merge, query, record
from tests.benchmarks.ranks import simulate


def train(folder: Path, steps: int, every: int, **tools: ReportingTool[Any]) -> None:
    """Train a small network under tools whose rows are written; NaN and infinity are among them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(tools, folder, lambda: attrs.asdict(Rank()), every)
    with amanda.apply(*tools.values(), recorder):
        for step in range(steps):
            optimizer.zero_grad()
            data = torch.rand(3, 6)
            data[0, 0] = (math.nan, math.inf, -math.inf, 1.0)[step % 4]
            model(data).nan_to_num(0, 1, -1).sum().backward()
            optimizer.step()
    recorder.write_files(folder, "")


def ask(folder: Path, sql: str) -> Sequence[Sequence[Any]]:
    table, left_out = query(str(folder), sql)
    assert not left_out
    return table.rows


def test_rows_of_many_new_operators_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 16 MB are lost at most, however many steps a part has."""
    for name, limit in (("few", 1000), ("many", 8)):
        monkeypatch.setattr("amanda_tools.tables.writing._NEW_OPS", limit)
        train(tmp_path / name, 5, 100, count=CountTool())
    steps = "SELECT DISTINCT step FROM count ORDER BY step"
    assert ask(tmp_path / "few", steps) == [(5,)]
    assert ask(tmp_path / "many", steps) == [(1,), (5,)]


def test_windows_of_samples_add_up_to_the_run(tmp_path: Path) -> None:
    """Counts, sums, extremes and the histogram, of all elements; each of its own window."""
    stats, sparsity = StatsTool(), SparsityTool()
    train(tmp_path, 7, 3, stats=stats, sparsity=sparsity)
    rows = ask(
        tmp_path,
        "SELECT op_id, figure, list(count ORDER BY step), sum(sum), min(min), max(max), "
        "sum(sum_squares), list(histogram) FROM stats GROUP BY ALL",
    )
    assert len(rows) == len(stats.op_rows()) > 8
    of_tensor = {(row["id"], row["tensor"]): row for row in stats.op_rows()}
    for op_id, figure, counts, total, low, high, squares, histograms in rows:
        row = of_tensor[op_id, figure]
        finite = row["elements"] - row["nan"] - row["inf"]
        assert (sum(counts), low, high) == (finite, row["min"], row["max"])
        if finite:
            assert total / finite == pytest.approx(row["mean"])
            deviation = math.sqrt(max(0, squares / finite - (total / finite) ** 2))
            assert deviation == pytest.approx(row["std"], abs=1e-6)
        bins = collections.Counter[float]()
        for histogram in histograms:
            for bound, number in histogram.items():
                bins["nan" if math.isnan(bound) else bound] += number
        expected = {min(low, high, key=abs): number for low, high, number in row["histogram"]}
        special = {"nan": row["nan"], math.inf: row["inf"]}
        assert bins == expected | {name: n for name, n in special.items() if n}
    assert any(row["nan"] for row in of_tensor.values())
    zeros = ask(tmp_path, "SELECT op_id, sum(count), sum(sum) FROM sparsity GROUP BY op_id, figure")
    of_tool = [(row["id"], row["elements"], row["zeros"]) for row in sparsity.op_rows()]
    assert sorted(zeros) == sorted(of_tool)


def test_amounts_are_those_of_the_steps_of_a_window(tmp_path: Path) -> None:
    """What adds up is the difference to the window before; what is not known is null."""
    count, profile = CountTool(), ProfileTool()
    train(tmp_path, 7, 3, count=count, profile=profile)
    windows = "SELECT step, min(count), max(count), sum(sum) FROM count GROUP BY step ORDER BY step"
    executions = [row[3] for row in ask(tmp_path, windows)]
    assert [row[:3] for row in ask(tmp_path, windows)] == [(3, 3, 3), (6, 3, 3), (7, 1, 1)]
    assert sum(executions) == sum(row["executions"] for row in count.op_rows())
    assert executions[1] == 3 * executions[2]
    unknown = "SELECT count(min), count(max), count(sum_squares), count(histogram) FROM profile"
    assert ask(tmp_path, unknown) == [(0, 0, 0, 0)]
    seconds = "SELECT op_id, sum(sum) FROM profile WHERE figure = 'seconds' GROUP BY op_id"
    expected = {row["id"]: pytest.approx(row["seconds"]) for row in profile.op_rows()}
    assert dict(ask(tmp_path, seconds)) == expected


def test_a_thousand_ranks_are_merged_and_asked(tmp_path: Path) -> None:
    """The views name the slow rank of each operator, and its stage; a missing header one line."""
    train(tmp_path / "one", 4, 2, profile=ProfileTool())
    part = tmp_path / "one" / "profile" / "rank=0" / "part-0.parquet"
    simulate(part, tmp_path / "all" / "profile", 1000, different=4, slow=613)
    names, left_out = merge(str(tmp_path / "all"))
    assert (names, left_out) == (["profile.parquet"], [])
    for folder in (tmp_path / "all", tmp_path / "all" / "profile.parquet"):
        of_ops = ask(folder, "SELECT worst_rank, ranks FROM by_op('profile', 'seconds')")
        assert set(of_ops) == {(613, 1000)}
        assert len(of_ops) > 10
    worst = "SELECT rank, mesh['pp'] FROM by_rank('profile', 'seconds') LIMIT 1"
    assert ask(tmp_path / "all", worst) == [(613, 2)]
    stages = "SELECT stage, ranks FROM by_stage('profile', 'seconds')"
    assert ask(tmp_path / "all", stages) == [(stage, 250) for stage in range(4)]
    (tmp_path / "all" / "profile" / "rank=7" / "header.json").unlink()
    assert merge(str(tmp_path / "all"))[1] == ["profile: no header of rank 7"]
