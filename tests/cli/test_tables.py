"""``amanda run --format parquet``, ``amanda merge`` and ``amanda query``: tables of all ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from amanda.cli import main
from amanda.cli.run import create_parser
from amanda.files import read_json
from tests.cli.conftest import Command

pytest.importorskip("duckdb")

import duckdb

from amanda_tools.tables import merge, query
from amanda_tools.tables.rows import copy_to, write_rows

PROGRAM = """
import os, sys
import minigrad as mg
weight = mg.MiniParameter([2.0, 3.0])
steps, killed = map(int, sys.argv[1:])
for step in range(steps):
    mg.backward(mg.add(mg.mul(weight, weight), weight))
    if step == killed:
        os.kill(os.getpid(), int(os.environ.get("SIGNAL", "9")))
"""

TABLES = ("--format", "parquet", "--flush", "10", "-o", "out")


def ask(folder: Path | str, sql: str) -> Sequence[Sequence[Any]]:
    table, left_out = query(str(folder), sql)
    assert not left_out
    return table.rows


@pytest.fixture
def program(script: Callable[[str], Path]) -> str:
    return str(script(PROGRAM))


def part(folder: Path, rank: int, number: int = 0, **about: Any) -> Path:
    """Write a part with a row of an operator, and a header if there is none."""
    path = folder / "count" / f"rank={rank}" / f"part-{number}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "schema": 1, "tool": "count", "tool_schema": 1, "run": "a", "attempt": 0, "first_part": 0,
        "clock_offset": 0.0,
        "rank": {"number": rank, "count": 2, "host": "h", "mesh": {"pp": rank}},
    }  # fmt: skip
    path.with_name("header.json").write_text(json.dumps(header | about))
    row = {"op_id": "/mm:0", "type": "mm", "figure": "executions", "count": 10, "sum": 20 + rank}
    write_rows(path, [row], {"run": "a", "host": "h", "attempt": 0, "step": 10})
    return path


def test_a_killed_rank_loses_one_flush(amanda: Command, tmp_path: Path, program: str) -> None:
    """Parts of a killed process are readable; its restart is a further attempt of the run."""
    assert amanda("run", "-t", "count", *TABLES, program, "40", "26").returncode == -9
    query_parts = (
        "SELECT attempt, step, count(DISTINCT run), sum(sum) FROM count "
        "WHERE direction = 'forward' GROUP BY ALL ORDER BY ALL"
    )
    # Two operators, and `total`, which adds gradients: 20 steps of 26 are there.
    killed = ask(tmp_path / "out", query_parts)
    assert [row[:2] for row in killed] == [(0, 10), (0, 20)]
    folder = tmp_path / "out" / "count" / "rank=0"
    (folder / ".amanda-0.partial").write_bytes(b"PAR1")
    again = amanda("run", "-t", "count", *TABLES, program, "12", "-1")
    assert again.returncode == 0, again.stderr
    assert "amanda: wrote count in " in again.stdout
    assert not (tmp_path / "out" / "count.json").exists()
    both = ask(tmp_path / "out", query_parts)
    assert both == [*killed, (1, 10, 1, 20.0), (1, 12, 1, 4.0)]
    assert killed == [(0, 10, 1, 20.0), (0, 20, 1, 20.0)]
    merged = amanda("merge", "out")
    assert merged.stdout == "amanda: wrote count.parquet in out\n"
    alone = ask(tmp_path / "out" / "count.parquet", query_parts)
    assert alone == both
    assert ask(tmp_path / "out", "SELECT run != '', attempt, has_ended FROM ranks") == [
        (True, 1, True)
    ]
    assert not list(folder.glob(".amanda-*"))
    run = amanda("run", "-t", "count", *TABLES, program, "40", "3", SIGNAL="15", SLURM_JOB_ID="7")
    assert run.returncode == -15
    header = read_json(folder / "header.json")
    assert [header[key] for key in ("run", "attempt", "has_ended")] == ["7", 2, False]


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_are_merged(
    python: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """A rank is killed, and all are started again: attempts of one run, of both ranks."""
    pytest.importorskip("torch")
    text = PROGRAM.replace("step == killed", "step == killed and os.environ['RANK'] == '1'")
    killed = "12 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else -1"
    text = text.replace("steps, killed = map(int, sys.argv[1:])", f"steps, killed = 15, {killed}")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    words = ("-m", "amanda", "run", "-t", "count", *TABLES, str(script(text)))
    run = python(*launcher, *words)
    assert run.returncode == 0, run.stderr
    rows = ask(
        tmp_path / "out",
        "SELECT rank, attempt, max(step), count(DISTINCT run) FROM count "
        "WHERE rank = 1 OR attempt = 1 GROUP BY ALL ORDER BY ALL",
    )
    assert rows == [(0, 1, 15, 1), (1, 0, 10, 1), (1, 1, 15, 1)]
    assert merge(str(tmp_path / "out")) == (["count.parquet"], [])


def test_a_run_after_one_that_ended_replaces_it(
    amanda: Command, tmp_path: Path, program: str
) -> None:
    """Its parts stay, and are left out; a job that a launcher has restarted is one run."""
    for job in ("", "7", "7"):
        run = amanda("run", "-t", "count", *TABLES, program, "3", "-1", SLURM_JOB_ID=job)
        assert run.returncode == 0, run.stderr
    sql = "SELECT DISTINCT run, attempt FROM count ORDER BY attempt"
    table, left_out = query(str(tmp_path / "out"), sql)
    assert table.rows == [("7", 1), ("7", 2)]
    assert left_out == ["count: parts of an earlier run, which had ended, are left out on rank 0"]


def test_json_is_asked_in_the_same_way(amanda: Command, tmp_path: Path, program: str) -> None:
    """Of ranks, and merged; sums are those of the tables."""
    amanda("run", "-t", "count", *TABLES, program, "12", "-1")
    for rank in "01":
        variables = {"RANK": rank, "WORLD_SIZE": "2"}
        amanda("run", "-t", "count,largest", "-o", "json", program, "12", "-1", **variables)
    text = "SELECT op_id, type, module, sum(sum), sum(count) FROM count WHERE rank = 0 GROUP BY ALL"
    assert sorted(ask(tmp_path / "out", text)) == sorted(ask(tmp_path / "json", text))
    largest = "SELECT rank, figure, count, sum, min, max FROM largest WHERE type = 'mul'"
    rows = ask(tmp_path / "json", f"{largest} ORDER BY rank")
    assert rows == [(rank, "largest", 1, 9.0, 9.0, 9.0) for rank in (0, 1)]
    by_rank = "SELECT rank, host FROM by_rank('largest', 'largest') ORDER BY rank"
    places = ask(tmp_path / "json", by_rank)
    assert places == [(0, socket.gethostname()), (1, socket.gethostname())]
    assert main(["merge", str(tmp_path / "json")]) == 0
    for path in (tmp_path / "json").glob("*-rank*"):
        path.unlink()
    assert ask(tmp_path / "json", f"{largest} ORDER BY rank") == rows
    assert ask(tmp_path / "json", by_rank) == places


def test_what_is_no_run_of_a_sweep_stays_beside_results(
    amanda: Command, tmp_path: Path, program: str
) -> None:
    """A folder or file with an equals sign in its name."""
    amanda("run", "-t", "count", "-o", "out", program, "3", "-1")
    (tmp_path / "out" / "count.json").rename(tmp_path / "out" / "count-rank0.json")
    (tmp_path / "out" / "lr=0.1").mkdir()
    (tmp_path / "out" / "x=1.txt").touch()
    assert ask(tmp_path / "out", "SELECT DISTINCT step FROM count") == [(3,)]
    assert main(["merge", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "count.parquet").exists()
    part(tmp_path, 0)
    (tmp_path / "lr=0.1").mkdir()
    assert main(["merge", str(tmp_path)]) == 0


def test_other_columns_are_left_out(tmp_path: Path) -> None:
    """Of the first part only, and of folders above those of results."""
    folder = tmp_path / "lr=0.1" / "out"
    path = part(folder, 0)
    part(folder, 1)
    copy = path.with_name("copy")
    duckdb.connect().execute(copy_to(copy, f"SELECT *, 1 AS more FROM '{path}'"))
    copy.rename(path)
    table = query(str(folder), "FROM count")[0]
    assert "more" not in table.columns
    assert "lr" not in table.columns
    assert len(table.rows) == 2
    assert merge(str(folder)) == (["count.parquet"], [])


def test_views_name_the_worst_rank(tmp_path: Path) -> None:
    """By operator, rank, pipeline stage and step, each of a table and a figure."""
    for rank in (0, 1):
        part(tmp_path, rank)
    spread = "p50, mad, most, worst_rank, ranks"
    called = "('count', 'executions')"
    assert ask(tmp_path, f"SELECT op_id, {spread} FROM by_op{called}") == [
        ("/mm:0", 2.05, pytest.approx(0.05), 2.1, 1, 2)
    ]
    assert ask(tmp_path, f"SELECT rank, value, host, mesh FROM by_rank{called}") == [
        (1, 2.1, "h", {"pp": 1}),
        (0, 2.0, "h", {"pp": 0}),
    ]
    assert ask(tmp_path, f"SELECT stage, worst_rank FROM by_stage{called}") == [(0, 0), (1, 1)]
    assert ask(tmp_path, f"SELECT step, worst_rank, ranks FROM by_step{called}") == [(10, 1, 2)]
    late = [
        {"op_id": op, "figure": "seconds", "count": steps, "sum": 8.0}
        for op, steps in (("/mm:0", 2), ("/add:0", 4))
    ]
    write_rows(tmp_path / "count/rank=0/part-1.parquet", late, {"attempt": 0, "step": 4})
    # One operator is first known in the window: its amount is of all four steps.
    assert ask(tmp_path, "SELECT p50 FROM by_step('count', 'seconds')") == [(6.0,)]
    assert ask(tmp_path.as_uri(), "SELECT count(*), count(DISTINCT rank) FROM count") == [(4, 2)]
    contents = ask(tmp_path, "")
    assert contents[0] == ("count", 4, 2, "executions seconds")
    assert main(["merge", "--html", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "count, executions: each pipeline stage over its ranks" in page


def _truncate(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-100])
    return "count/rank=1/part-1.parquet is left out: "


def _overwrite(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    return "count/rank=1/part-1.parquet is left out: "


def _empty(path: Path) -> str:
    path.write_bytes(b"")
    return "count/rank=1/part-1.parquet is left out: "


def _foreign(path: Path) -> str:
    duckdb.connect().execute(copy_to(path, "SELECT 1 AS count"))
    return "count/rank=1/part-1.parquet is left out: Binder Error: Referenced column "


def _header(text: str) -> Callable[[Path], str]:
    def damage(path: Path) -> str:
        path.with_name("header.json").write_text(text)
        return "count/rank=1/header.json"

    return damage


def _described(what: str, **about: Any) -> Callable[[Path], str]:
    def change(path: Path) -> str:
        header = path.with_name("header.json")
        header.write_text(json.dumps(read_json(header) | about))
        return what

    return change


@pytest.mark.parametrize(
    "damage",
    [
        _truncate, _overwrite, _empty, _foreign, _header("{"), _header("[]"), _header('{"run": 1}'),
        _described("is of version 2, not 1", schema=2),
        _described("count: the tables are of different versions (tool_schema in", tool_schema=9),
        _described("count: clocks differ by 40 s, see clock_offset", clock_offset=40.0),
        _described("count: rows were not written on rank 1", rows_dropped=3),
        _described("count: no table of rank 2, 3", rank={"number": 1, "count": 4}),
        _described("count: clocks differ by", clock_offset=9.0, rank={"number": 1, "count": [2]}),
        _described("count: parts of an earlier run, which had ended, are", first_part=1),
    ],
)  # fmt: skip
def test_what_is_readable_is_used(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """One line names what is damaged, half-written, foreign, missing or of other versions."""
    part(tmp_path, 0)
    part(tmp_path, 1)
    about = damage(part(tmp_path, 1, 1))
    table, lines = query(
        str(tmp_path), "SELECT min(sum), count(DISTINCT rank), min(run) FROM count"
    )
    assert table.rows == [(20.0, 2, "a")]
    assert any(about in line for line in lines), lines
    assert all("\n" not in line for line in lines)
    names, merge_lines = merge(str(tmp_path))
    assert names == ["count.parquet"]
    assert any(about in line for line in merge_lines)
    rows = ask(tmp_path / "count.parquet", "SELECT rank FROM by_rank('count', 'executions')")
    assert sorted(rows) == [(0,), (1,)]
    broken = tmp_path / "flops" / "rank=0" / "part-0.parquet"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"")
    assert merge(str(tmp_path))[0] == ["count.parquet"]


def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of queries and folders; status 2."""
    part(tmp_path, 0)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, said in [
        ((".", "SELEC 1"), 'Parser Error: syntax error at or near "SELEC"'),
        ((".", "SELECT foo FROM count"), 'Referenced column "foo" not found in FROM clause!'),
        ((".", "FROM flops"), "Table with name flops does not exist!"),
        ((".", "FROM cursor"), "Table with name cursor does not exist!"),
        (("empty", "FROM count"), "empty has no tables of results"),
        (("nowhere",), "nowhere has no tables of results"),
    ]:
        assert main(["query", *words]) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("amanda: error: ")
        assert said in err


def test_without_duckdb_the_program_does_not_begin(
    amanda: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """One line names the extra; where nobody has asked for tables, results are JSON."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "duckdb.py").write_text("raise ImportError('no duckdb')")
    path = str(tmp_path / "broken")
    text = "import minigrad as mg\nmg.relu(mg.MiniTensor([1.0]))\nprint('begun')"
    words = ("-t", "count", "-o", "out", str(script(text)))
    refused = amanda("run", "--format", "parquet", *words, PYTHONPATH=path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("pip install 'amanda-tools[scale]'\n")
    assert refused.stderr.count("\n") == 1
    assert "pip install" in amanda("query", ".", PYTHONPATH=path).stderr
    swept = ("sweep", "-t", "largest:digits=0..1", "--format", "parquet", *words[2:])
    assert amanda(*swept, PYTHONPATH=path).returncode == 2
    usual = amanda("run", *words, PYTHONPATH=path, RANK="0", WORLD_SIZE="9")
    assert usual.stdout.startswith("begun\n")
    assert "will be JSON" in usual.stderr
    assert (tmp_path / "out" / "count-rank0.json").exists()
    many = amanda("run", *words, RANK="3", WORLD_SIZE="9")
    assert many.returncode == 0, many.stderr
    assert (tmp_path / "out" / "count" / "rank=3" / "part-0.parquet").exists()
    folderless = amanda("run", "--format", "parquet", "-t", "count", str(script(text)))
    assert "give a folder, -o DIR" in folderless.stderr


def test_a_lost_folder_ends_no_program(
    amanda: Command, tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Rows that cannot be written are counted and named at the end; later ones are written."""
    moves = """
    if step in (15, 25):
        os.rename(*("out/count", "moved")[:: 1 if step == 15 else -1])
"""
    program = str(script(PROGRAM.rstrip() + moves))
    run = amanda("run", "-t", "count", *TABLES, program, "40", "-1")
    assert run.returncode == 0
    assert "a part of the tables is lost: TablesLostError: count: FileNotFoundError" in run.stderr
    assert read_json(tmp_path / "out" / "count" / "rank=0" / "header.json")["rows_dropped"] == 4
    table, left_out = query(str(tmp_path / "out"), "SELECT DISTINCT step FROM count ORDER BY step")
    assert table.rows == [(10,), (30,), (40,)]
    assert left_out == ["count: rows were not written on rank 0"]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("0,8-10", [0, 8, 9, 10]), ("5%", [0, 20]), ("7", [7]), ("100%", range(25))],
)
def test_some_ranks_run_under_tools(text: str, chosen: Sequence[int]) -> None:
    """Those that are named, or a share; the others run without."""
    given = create_parser().parse_args(["--ranks", text, "-t", "count"])
    assert [rank for rank in range(25) if given.ranks(rank)] == [*chosen]


def test_a_rank_that_is_not_chosen_writes_nothing(
    amanda: Command, tmp_path: Path, program: str
) -> None:
    """It runs the program without the tools."""
    for rank in "01":
        words = ("-t", "count", "-o", "out", "--ranks", "1", program, "2", "-1")
        assert amanda("run", *words, RANK=rank, WORLD_SIZE="2").returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["count-rank1.json"]
    assert "needs ranks such as 0,8-15" in amanda("run", "--ranks", "3-1", program).stderr
