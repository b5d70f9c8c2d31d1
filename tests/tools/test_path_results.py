"""What ``path`` takes and gives: labels, outputs, bad input, files."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.path import PathTool, read, similarity, write
from tests.tools.path_oracle import applied

END = "Sequential.2/linear:0"


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def test_labels_choose_the_class(net: nn.Module) -> None:
    x = torch.rand(3, 6)
    tool = PathTool()
    with amanda.apply(tool):
        net(x)
        tool.labels = [3, 3, 0]
        net(x)
    predicted = net(x).argmax(1).tolist()
    assert [path.label for path in tool.paths] == [*predicted, 3, 3, 0]
    expected: dict[int, int] = {}
    for label in [*predicted, 3, 3, 0]:
        expected[label] = expected.get(label, 0) + 1
    assert tool.counts == expected
    critical = tool.paths[3].ops[END].neurons
    assert critical is not None
    assert critical.array.tolist() == [False, False, False, True]


def test_each_thread_has_passes_of_its_own(net: nn.Module) -> None:
    inputs, barrier = [torch.rand(3, 6), torch.rand(3, 6)], threading.Barrier(2)
    tool, alone = PathTool(synapses=True), applied(net, inputs[0])
    net[0].register_forward_hook(lambda *_: [barrier.wait(60), None][1])
    with amanda.apply(tool), ThreadPoolExecutor(2) as threads:
        list(threads.map(net, inputs))
    found, expected = ([str(path.ops) for path in each.paths] for each in (tool, alone))
    assert len(found) == 6
    assert expected in (found[:3], found[3:])


@pytest.mark.parametrize("labels", [[1, 2], [1, 2, 4], [0.5, 1, 2], [-1, 0, 0]])
def test_labels_that_do_not_fit_are_refused(net: nn.Module, labels: list[Any]) -> None:
    tool = PathTool()
    tool.labels = labels
    message = r"labels must be .* Sequential\.2/linear:0"
    with pytest.raises(ValueError, match=message), amanda.apply(tool):
        net(torch.rand(3, 6))


@pytest.mark.parametrize("theta", [0, -0.5, 1.01])
def test_theta_out_of_range(theta: float) -> None:
    with pytest.raises(ValueError, match="theta must be above 0 and at most 1"):
        PathTool(theta=theta)


def test_an_output_that_never_came(net: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    tool = applied(net, torch.rand(2, 6), output="decoder.*")
    with pytest.raises(AmandaError, match=r"no operator or module 'decoder\.\*'"):
        _ = tool.paths
    assert tool.summary()["passes_without_output"] == 1
    assert next(iter(tool.tables())).title.startswith("path: no operator or module")
    assert tool.result()["ops"] == []


def test_no_model_ran(tmp_path: Path) -> None:
    tool = applied(lambda: None)
    assert tool.paths == []
    assert [table.title for table in tool.tables()] == ["path: no model ran"]
    assert tool.write_files(tmp_path, "path") == []
    assert tool.class_paths == {}


def test_an_axis_that_is_none(net: nn.Module) -> None:
    with pytest.raises(ValueError, match="axis=0 is not an axis of classes"):
        applied(net, torch.rand(2, 6), axis=0)


def test_output_by_module_and_axis() -> None:
    """A map of classes, channels first: each place has its class."""
    torch.manual_seed(9)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sigmoid())
    x = torch.rand(2, 2, 4, 4)
    tool = applied(net, x, output="0", axis=1)
    scores = net[0](x).detach().numpy()
    for path, expected in zip(tool.paths, scores, strict=True):
        mask = path.ops["Sequential.0/conv2d:0"].neurons
        assert mask is not None
        np.testing.assert_array_equal(mask.array, expected == expected.max(axis=0))
    assert tool.summary()["output"] == "Sequential.0/conv2d:0"


def test_files(net: nn.Module, tmp_path: Path) -> None:
    """What is written is read again, equal; the chart and the table have every operator."""
    tool = applied(net, torch.rand(3, 6))
    written = tool.write_files(tmp_path, "path")
    assert [path.name for path in written] == ["path.safetensors", "path.csv"]
    found = read(written[0])
    labels = sorted(tool.class_paths)
    assert set(found) == {*(f"input {i}" for i in range(3)), *(f"class {c}" for c in labels)}
    for i, path in enumerate(tool.paths):
        again = found[f"input {i}"]
        assert again.label == path.label
        for kind in ("neurons", "weights", "synapses"):
            assert similarity(path, again, kind) == 1
            assert again.density(kind) == path.density(kind)
        assert {k: m.shape for k, m in again.inputs.items()} == {
            k: m.shape for k, m in path.inputs.items()
        }
    assert len(written[1].read_text().splitlines()) == 1 + len(tool.op_rows())
    json.dumps(tool.result())
    (chart,) = tool.charts()
    assert chart.names == [row["id"] for row in tool.op_rows()]
    assert chart.values["weights"] == [row["weight_density"] for row in tool.op_rows()]
    quiet = applied(net, torch.rand(3, 6), csv=False)
    assert [path.name for path in quiet.write_files(tmp_path, "q")] == ["q.safetensors"]
    (tmp_path / "other.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(AmandaError, match="is not a file that path has written"):
        read(tmp_path / "other.safetensors")
    with pytest.raises(OSError, match="cannot be written"):
        write(tmp_path / "nowhere" / "path.safetensors", found)


def test_paths_that_cannot_be_compared(net: nn.Module) -> None:
    tool = PathTool()
    with amanda.apply(tool):
        net(torch.rand(2, 6))
    with pytest.raises(AmandaError, match="synapses=True"):
        similarity(*tool.paths, "synapses")
    with pytest.raises(AmandaError, match="kind must be one of"):
        similarity(*tool.paths, "edges")


def test_the_limit_keeps_classes_whole(net: nn.Module) -> None:
    x = torch.rand(5, 6)
    few, all_of_them = (applied(net, x, limit=limit) for limit in (2, 100))
    assert len(few.paths) == 2
    assert few.summary()["paths_not_kept"] == 3
    assert few.summary()["inputs"] == 5
    for label, path in all_of_them.class_paths.items():
        assert similarity(path, few.class_paths[label]) == 1
    assert few.op_rows() == all_of_them.op_rows()


def test_tokens_are_called_tokens() -> None:
    """Where batch and tokens are one axis, each token has a path, and the summary says so."""

    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 7)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens).view(-1, 8))

    tool = applied(Flattening(), torch.randint(0, 11, (2, 5)))
    assert (tool.summary()["inputs"], tool.summary()["sequences"]) == (10, 2)
    titles = {table.title: table.columns for table in tool.tables()}
    assert next(iter(titles)).startswith("path: 10 tokens of 2 sequences from Flattening.head/")
    assert titles["path: classes"][1] == "tokens"
    assert "sequences" not in applied(nn.Linear(5, 3), torch.rand(2, 5)).summary()
