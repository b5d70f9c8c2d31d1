"""Files that tools write: whole or not at all, whatever the disk and the names are."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
from amanda_tools._output.csv_files import write_rows
from amanda_tools._values import tensor_files
from amanda_tools.diff import Recording
from amanda_tools.dump import DumpTool
from amanda_tools.prune import files as prune_files

HOSTILE = "=1+2\x1b[31m\udc80\u202e"
"""A name that is a formula, a command, no text and written from right to left."""


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_cells_that_begin_like_formulas_are_quoted(tmp_path: Path) -> None:
    """Numbers, also negative ones and those in texts, stay numbers."""
    texts = ["=1+2", "+cmd", "-cmd", "@SUM(A1)", "\t=1", "\r=1", "a=1", "", "é"]
    numbers = [-1, -2.5, float("-inf"), "-1.5", "+1e3", True, None]
    write_rows(tmp_path / "a.csv", [{"=name": value} for value in [*texts, *numbers]])
    head, *rows = read(tmp_path / "a.csv")
    assert head == ["'=name"]
    found = [row[0] if row else "" for row in rows]
    quoted = [
        f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text for text in texts
    ]
    assert found == [*quoted, "-1", "-2.5", "-inf", "-1.5", "+1e3", "True", ""]


def test_a_table_is_whole_or_as_it_was(tmp_path: Path) -> None:
    """A value that cannot be written leaves the earlier file."""

    class Broken:
        def __str__(self) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.csv"
    write_rows(path, [{"a": 1}])
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.csv'"):
        write_rows(path, [{"a": 2}, {"a": Broken()}])
    assert read(path) == [["a"], ["1"]]
    assert os.listdir(tmp_path) == ["a.csv"]


def program(body: str) -> str:
    return f"import torch\nmodel = torch.nn.Linear(4, 4)\n{body}\nprint('the end')\n"


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amanda", "run", *words],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100,
        check=False, errors="surrogateescape",
    )  # fmt: skip


def test_hostile_names_reach_no_terminal_and_every_file(tmp_path: Path) -> None:
    """All tools that write files, of a module whose name is as bad as it can be."""
    name = HOSTILE.replace("\udc80", "\\udc80").replace("\x1b", "\\x1b")
    (tmp_path / "program.py").write_text(
        program(
            f"model = torch.nn.Sequential()\nmodel.add_module('{name}', torch.nn.Linear(4, 4))\n"
            "model(torch.rand(2, 4)).sum().backward()"
        )
    )
    tools = "count,trace,flops,stats,sparsity,dump,profile,prune,quantize,path"
    done = run(tmp_path, "-t", tools, "-o", "out", "--html", "program.py", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "is lost" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "=1+2\\x1b[31m\\udc80\\u202e" in done.stdout
    found = json.loads((tmp_path / "out/count.json").read_text())
    assert any(HOSTILE in row["module"] for row in found["ops"])
    assert len(Recording.read(tmp_path / "out/dump.index.json").records) > 0
    for path in (tmp_path / "out").glob("*.csv"):
        assert not any(cell.startswith("=") for row in read(path) for cell in row)
    # Masks of such an operator come back.
    masks, _ = prune_files.read(tmp_path / "out/prune.masks.safetensors", "masks")
    assert any(HOSTILE in op_id for op_id in masks)


def test_a_full_disk_costs_tensors_and_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dump` counts what it has lost, keeps what it has written, and says why."""
    write, written = tensor_files.write_tensors, []

    def full(path: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, *rest)

    monkeypatch.setattr("amanda_tools.dump.files.write_tensors", full)
    tool = DumpTool(shard=1)
    with amanda.apply(tool):
        for i in range(5):
            torch.mul(torch.tensor([1.0, 2.0]), i)
    found = tool.summary()
    assert (found["tensors"], found["not_taken"]) == (2, 8)
    assert found["problem"] == (
        "temporary files cannot be written: [Errno 28] No space left on device"
    )
    assert any("No space left" in table.title for table in tool.tables())
    monkeypatch.undo()
    *_, index = tool.write_files(tmp_path, "dump")
    assert [len(r.load()) for r in Recording.read(index).records] == [2, 2]


def test_no_place_for_temporary_files_costs_tensors_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where tempfile finds no folder at all."""

    def nowhere(**_: Any) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", nowhere)
    tool = DumpTool(shard=1)
    with amanda.apply(tool):
        result = torch.mul(torch.ones(2), 2)
    assert result.tolist() == [2, 2]
    assert tool.summary()["tensors"] == 0
    assert "No usable temporary directory" in tool.files.problem


def test_a_dump_that_does_not_fit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tensors without an index nor a part of a file; links are replaced, not followed."""
    tool = DumpTool(shard=1)
    with amanda.apply(tool):
        torch.mul(torch.ones(2), 2)
    other = tmp_path / "other"
    other.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / "dump-00000.safetensors").symlink_to(other)
    tool.write_files(out, "dump")
    assert (other.read_text(), (out / "dump-00000.safetensors").is_symlink()) == ("precious", False)

    def full(source: Path, target: Path) -> None:
        if "1" in Path(source).name:
            target.write_bytes(b"part")
            raise OSError(errno.ENOSPC, "No space left on device", source, None, str(target))
        target.write_bytes(Path(source).read_bytes())

    monkeypatch.setattr("shutil.copyfile", full)
    # The name that the user knows, and none of a temporary file.
    with pytest.raises(OSError, match=r"No space left on device: '[^']*/late-00001\.safetensors'$"):
        tool.write_files(out, "late")
    assert sorted(os.listdir(out)) == [
        "dump-00000.safetensors", "dump-00001.safetensors", "dump.index.json"
    ]  # fmt: skip


def test_a_limit_of_the_size_of_files_is_no_end_of_the_program(tmp_path: Path) -> None:
    """As a full disk: files that do not fit are named in the summary, the program ends well."""
    (tmp_path / "program.py").write_text(
        program(
            "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
            "for i in range(300): model(torch.rand(20, 4))"
        )
    )
    done = run(tmp_path, "-t", "dump,profile", "-o", "out", "program.py")
    assert done.returncode == 0, done.stderr
    assert "the end" in done.stdout
    assert "dump: temporary files cannot be written" in done.stdout
    assert "a result of profile is lost: OSError: [Errno 27] File too large" in done.stdout
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_a_standard_output_that_is_full_changes_no_status(tmp_path: Path) -> None:
    """The summary is lost, and said to be; what the program has printed has its own status."""
    (tmp_path / "program.py").write_text("import torch")
    with open("/dev/full", "w") as full:
        for closed in (False, True):
            done = subprocess.run(
                [sys.executable, "-m", "amanda", "run", "-t", "count", "program.py"],
                cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100,
                check=False, preexec_fn=(lambda: os.close(1)) if closed else None,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert "the summary is lost" in done.stderr


def test_messages_send_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a table, whatever the encoding of the stream is."""
    from amanda.cli.messages import complain

    stream = io.StringIO()
    sys.__stderr__, kept = stream, sys.__stderr__
    try:
        complain(f"error: {HOSTILE}\nsecond line")
    finally:
        sys.__stderr__ = kept
    assert stream.getvalue() == "amanda: error: =1+2\\x1b[31m\\udc80\\u202e\nsecond line\n"


def test_a_link_for_a_folder_of_results_is_not_followed(tmp_path: Path) -> None:
    """The event files of TensorBoard have a folder in the folder of the results."""
    pytest.importorskip("tensorboard")
    tool = amanda.tools.load("stats")(tensorboard=True, csv=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "stats.tensorboard").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError, match=r"a link.*stats\.tensorboard"):
        tool.write_files(tmp_path, "stats")
    assert os.listdir(tmp_path / "other") == []
