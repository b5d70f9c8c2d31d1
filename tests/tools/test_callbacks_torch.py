"""The callbacks of transformers, and of Lightning with a stand-in for its trainer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amanda
import tests.torchvision_ops  # noqa: F401
from amanda.state import LIVE_SCOPES
from amanda_tools.transformers import Callback
from tests.running import run_python


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": nn.functional.dropout(super().forward(x)).pow(2).mean()}


def train(folder: Path, *callbacks: Any, name: str = "x") -> list[Any]:
    """The parameters after three steps with batches of four."""
    trainers = importlib.import_module("transformers")
    torch.manual_seed(0)
    model, data = Net(4, 8), [{name: x} for x in torch.ones(12, 4)]
    args = trainers.TrainingArguments(
        str(folder), num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True, report_to=[]
    )
    trainers.Trainer(model, args, train_dataset=data, callbacks=[*callbacks]).train()
    return [parameter.tolist() for parameter in model.parameters()]


def test_the_trainer_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A training is the same with the callback, and one that fails leaves no scope."""
    callback = Callback("flops", output=tmp_path / "out")
    assert train(tmp_path) == train(tmp_path, callback)
    summary = callback.tools["flops"].result()["summary"]  # type: ignore[attr-defined]
    assert (summary["per_step"]["flops"], summary["steps"]) == (2 * 4 * 4 * 8, 3)
    with pytest.raises(ValueError, match="batch received was empty"):
        train(tmp_path, callback, name="unknown")
    assert not LIVE_SCOPES
    assert capsys.readouterr().out.count("amanda: wrote flops.json") == 2


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_trainer_of_lightning(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tools act from `on_train_start` to `on_train_end` or `on_exception`; each process of a
    distributed training writes files of its own, and the first one prints. Either package of
    Lightning does."""
    theirs = SimpleNamespace(Callback=object)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, package, theirs)
    theirs.pytorch = theirs
    callback = importlib.import_module("amanda_tools.lightning").Callback("count", output=tmp_path)
    monkeypatch.delitem(sys.modules, "amanda_tools.lightning")
    for rank, ends in enumerate((callback.on_train_end, callback.on_exception)):
        place = SimpleNamespace(global_rank=rank, world_size=2, local_rank=rank)
        callback.on_train_start(place, None)
        torch.ones(2) + 1
        ends(None, None, *[KeyboardInterrupt()] * rank)
        assert not LIVE_SCOPES
    assert {path.name for path in tmp_path.iterdir()} == {"count-rank0.json", "count-rank1.json"}
    assert capsys.readouterr().out.count("; tools took ") == 1


def test_a_tool_may_end_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of its results has the reason."""
    callback = Callback("count")
    callback.on_train_begin()
    torch.ones(2)
    callback.end(amanda.StopRun("it is enough"))
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("amanda: stopped: it is enough; 1 op")
    )


def test_no_trainer_is_imported_by_others() -> None:
    """The tools, and what the callbacks share, import none of the three."""
    code = "import sys, amanda_tools.flops, amanda_tools._training; print(*sys.modules)"
    found = {*run_python("-c", code).stdout.split()}
    ours = "amanda_tools._training"
    assert found & {ours, "keras", "lightning", "transformers"} == {ours}
