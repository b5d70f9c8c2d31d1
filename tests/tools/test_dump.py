"""``dump``: the tensors of a run, read back with safetensors' own reader."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

import amanda
from amanda.testing import loopback as lb
from amanda_tools._values.tensor_files import read_tensor, write_tensors
from amanda_tools.dump import DumpTool
from tests.running import applied, run_python


def read(tool: DumpTool, folder: Path) -> dict[tuple[str, str, int], torch.Tensor]:
    """The tensors by operator, tensor and step, through the index."""
    *files, index = tool.write_files(folder, "dump")
    assert all(file.suffix == ".safetensors" for file in files)
    found = {}
    for entry in json.loads(index.read_text())["tensors"]:
        with safe_open(folder / entry["file"], framework="pt") as file:
            tensor = file.get_tensor(entry["key"])
        assert list(tensor.shape) == entry["shape"]
        assert str(tensor.dtype) == f"torch.{entry['dtype']}"
        found[entry["id"], entry["tensor"], entry["step"]] = tensor
    return found


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Activations, weights and gradients of each step, as hooks see them."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    outputs: list[torch.Tensor] = []
    data = [torch.rand(2, 4, requires_grad=True) for _ in range(2)]

    def run() -> None:
        for x in data:
            y = layer(x)
            outputs.append(y.detach().clone())
            (y * y).sum().backward()

    tool = applied(DumpTool(tensors=("activations", "weights", "gradients")), run)
    found = read(tool, tmp_path)
    for step, (x, y) in enumerate(zip(data, outputs, strict=True)):
        assert torch.equal(found["Linear/linear:0", "output0", step], y)
        assert torch.equal(found["Linear/linear:0", "weight", step], layer.weight.detach())
        of_data = found["Linear/linear:0/grad/AddmmBackward0:0", "grad1", step]
        assert x.grad is not None
        assert torch.equal(of_data, x.grad)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_every_type_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Those too that numpy lacks; scalars and tensors that are not contiguous."""
    x = (torch.randn(3, 4) * 10).to(dtype)
    kept: list[torch.Tensor] = []
    tool = applied(DumpTool(), lambda: kept.extend((x.t(), x[0, 0].clone())))
    found = read(tool, tmp_path)
    assert torch.equal(found["/t:0", "output0", 0].float(), kept[0].float())
    assert torch.equal(found["/clone:0", "output0", 0].float(), kept[1].float())
    assert (tool.load(tool.entries[0]) == kept[0].double().numpy()).all()


def test_what_the_format_lacks_is_counted() -> None:
    """A complex tensor is not taken, and said so."""
    parts = torch.rand(2), torch.rand(2)
    tool = applied(DumpTool(), lambda: torch.complex(*parts))
    assert tool.summary()["not_taken"] == 1
    out = io.StringIO()
    tool.print_summary(out)
    assert "dump: tensors that were not looked at\n  kind       tensors\n" in out.getvalue()
    assert "limit" not in out.getvalue()


def test_executions_are_counted_over_all_scopes(tmp_path: Path) -> None:
    """A tensor of a second scope, or of a run without the cache, has a step of its own."""
    tool = DumpTool()
    for _ in range(2):
        applied(tool, lambda: torch.ones(2))
    with amanda.cache_disabled():
        applied(tool, lambda: torch.ones(2))
    assert [step for *_, step in read(tool, tmp_path)] == [0, 1, 2]
    assert tool.summary()["not_taken"] == 0


def test_a_file_that_is_written_again_is_read_anew(tmp_path: Path) -> None:
    """Files are kept open, and not those that another run has replaced."""
    for value in (1.0, 2.0):
        write_tensors(tmp_path / "x", {"a": np.float32([value])})
        assert read_tensor(tmp_path / "x", "a") == value


def test_tensors_of_optimizers_are_left_out() -> None:
    """Unless all phases are asked for; gradients are taken by default, as ``diff`` takes them."""
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)

    def run() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for options, has in (({}, False), ({"phases": "all"}, True)):
        entries = applied(DumpTool(**options), run).entries
        assert ("optimizer" in {entry.row["phase"] for entry in entries}) is has
        assert {entry.kind for entry in entries} == {"activations", "gradients"}


def test_many_tensors_make_several_files(tmp_path: Path) -> None:
    """No more than a file's worth waits in memory; the limits bound the rest."""

    def run() -> None:
        for _ in range(10):
            torch.ones(100)
            amanda.new_iteration()

    tool = applied(DumpTool(shard=1000), run)
    assert tool.files.waiting_bytes < 1000
    assert len(read(tool, tmp_path)) == 10
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    # Written a second time, it is the same.
    (tmp_path / "again").mkdir()
    assert len(read(tool, tmp_path / "again")) == 10
    assert applied(DumpTool(limit=3), run).summary() == {
        "tensors": 3, "bytes": 1200, "not_taken": 7, "ops": 1, "kinds": {"activations": 3},
        "not_looked_at": {},
    }  # fmt: skip
    assert applied(DumpTool(bytes=900), run).summary()["tensors"] == 2
    assert [entry.step for entry in applied(DumpTool(every=4), run).entries] == [0, 4, 8]


def test_tensors_whose_index_cannot_be_written_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted once: as not taken."""

    def fail(*_: object) -> None:
        raise OSError("No space left")

    monkeypatch.setattr("amanda_tools.dump.files.write_json", fail)
    tool = applied(DumpTool(shard=1), lambda: torch.ones(2).exp())
    summary = tool.result()["summary"]
    assert (tool.entries, summary["tensors"], summary["bytes"]) == ([], 0, 0)
    assert summary["not_taken"] == 2
    assert "No space left" in summary["problem"]


def test_a_file_is_read_by_the_functions_of_the_library(tmp_path: Path) -> None:
    """``load_file`` of PyTorch and of numpy."""
    applied(DumpTool(), lambda: torch.ones(2).exp()).write_files(tmp_path, "dump")
    [path] = tmp_path.glob("*.safetensors")
    assert set(safetensors.torch.load_file(path)) == {"/other/ones:0 output0 0", "/exp:0 output0 0"}
    assert safetensors.numpy.load_file(path)["/other/ones:0 output0 0"].tolist() == [1.0, 1.0]


def test_two_frameworks_write_files_of_their_own(tmp_path: Path) -> None:
    """In one run; the index says which tensor is where."""
    tool = applied(DumpTool(), lambda: (torch.ones(2).exp(), lb.relu(lb.tensor([-1.0, 2.0]))))
    found = read(tool, tmp_path)
    assert {entry.file for entry in tool.entries} == {0, 1}
    assert found["/relu:0", "output0", 0].tolist() == [0.0, 2.0]


def test_the_result_is_the_index() -> None:
    """A row for each tensor, as plain data."""
    tool = applied(DumpTool(), lambda: torch.ones(2).exp())
    result = tool.result()
    assert json.loads(json.dumps(result)) == result
    assert [(row["type"], row["file"]) for row in result["ops"]] == [
        ("ones", "dump-00000.safetensors"),
        ("exp", "dump-00000.safetensors"),
    ]


_KILLED = """
import os, signal
import torch
import amanda

tool = amanda.tools.load("dump")(shard=1)
with amanda.apply(tool):
    torch.ones(3).relu()
    torch.full((2,), 5.0).neg()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_finished_files_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    """They are in the temporary folder, with an index that names all of them."""
    run_python("-c", _KILLED, env={"TMPDIR": str(tmp_path)})
    (folder,) = tmp_path.glob("amanda-dump-*")
    tensors = json.loads((folder / "dump.index.json").read_text())["tensors"]
    found = {t["type"]: read_tensor(folder / t["file"], t["key"]).tolist() for t in tensors}
    assert (found["relu"], found["neg"]) == ([1.0, 1.0, 1.0], [-5.0, -5.0])
