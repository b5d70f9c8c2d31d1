"""``prune`` on PyTorch: files of masks, exported and baked weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.numpy import save_file
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.prune import PruneTool
from tests import models
from tests.running import applied


def test_saved_masks_make_another_process_prune_the_same(tmp_path: Path) -> None:
    model, inputs = models.build("resnet18", training=False)
    tool = PruneTool(method="nm")
    with amanda.apply(tool):
        expected = model(**inputs)
    path = tool.save(tmp_path / "masks.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0  # the same values, in the same places
    again = PruneTool(method="nm", masks=str(path))
    with amanda.apply(again):
        assert torch.equal(model(**inputs), expected)
    assert again.result()["summary"]["masks_never_used"] == []
    assert all(np.array_equal(again.masks[op_id], mask) for op_id, mask in tool.masks.items())


def test_loaded_masks_hold_whatever_the_weights_are(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 4), torch.rand(2, 8)
    tool = PruneTool(method="nm")
    with amanda.apply(tool):
        model(x)
        nn.init.normal_(model.weight)
        path = tool.save(tmp_path / "masks.safetensors")
        again = PruneTool()
        again.load(path)
        mask = torch.from_numpy(tool.masks["Linear/linear:0"])
    with amanda.apply(again):
        assert torch.equal(model(x), F.linear(x, model.weight * mask, model.bias))


def test_masks_of_another_model_name_the_first_missing_op(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    tool = applied(PruneTool(), lambda: small(torch.rand(2, 8)))
    path = tool.save(tmp_path / "masks.safetensors")
    again = PruneTool(masks=str(path))
    with amanda.apply(again), pytest.raises(AmandaError, match=r"no mask for op Sequential\.1/lin"):
        large(torch.rand(2, 8))
    third = PruneTool(masks=str(path))
    wider = nn.Sequential(nn.Linear(12, 8))
    with (
        amanda.apply(third),
        pytest.raises(AmandaError, match=r"has the shape \(8, 8\), its weigh"),
    ):
        wider(torch.rand(2, 12))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no masks")
    with pytest.raises(AmandaError, match="a file that prune has written"):
        PruneTool(masks=str(tmp_path / "text.safetensors"))
    save_file({"a": np.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(AmandaError, match="holds nothing known, and not masks of version 1"):
        PruneTool(masks=str(tmp_path / "other.safetensors"))


@pytest.mark.parametrize("name", ["resnet18", "bert"])
def test_a_baked_model_runs_the_same_without_the_tool(name: str) -> None:
    model, inputs = models.build(name, training=False)
    tool = PruneTool(sparsity=0.75)
    with amanda.apply(tool), torch.no_grad():
        expected = list(models.tensors(model(**inputs)))

    def run() -> Any:
        return model(**inputs)

    tool.bake(run)
    for op_id, mask in tool.masks.items():
        weight = model.get_submodule(op_id.partition("/")[0].partition(".")[2]).weight
        assert torch.equal(weight != 0, torch.from_numpy(mask))
    with torch.no_grad():
        outputs = list(models.tensors(model(**inputs)))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_a_run_that_misses_an_operator_says_which() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with amanda.apply(tool := PruneTool()):
        model(torch.rand(1, 4))
    with pytest.raises(AmandaError, match=r"not executed op Sequential\.0/linear:0"):
        tool.bake(lambda: None)


def test_there_is_nothing_to_bake_before_masks_are_made() -> None:
    model, x = nn.Linear(8, 4), torch.rand(2, 8)

    def run() -> Any:
        return model(x)

    late, dynamic = PruneTool(start=2, end=4), PruneTool(method="channel")
    for tool in (late, dynamic):
        with amanda.apply(tool):
            run()
    for tool, said in (
        (PruneTool(), "run the model under the tool first"),
        (late, r"op Linear/linear:0 has no mask yet: .* masks begin at step 2"),
        (dynamic, "method=channel chooses anew for every input"),
    ):
        with pytest.raises(AmandaError, match=said):
            tool.bake(run)
    assert (model.weight != 0).all()
