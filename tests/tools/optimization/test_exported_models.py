"""Alignment with exported programs, and the export of what tools change; ONNX where installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import amanda
from amanda.errors import AmandaError, FileError, UnsupportedProgramError
from amanda_tools.export import Change, Function, Mask, Rounding, export_model
from amanda_tools.export.checks import Applied

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
ONNX = pytest.param(".onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="needs ONNX"))
BOTH = pytest.mark.parametrize("suffix", [".pt2", ONNX])


class Net(nn.Module):
    """A convolution with a norm, functional attention, and a linear layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2).contiguous()
        q, k, v = self.qkv(x)[:, :9].chunk(3, -1)
        x = nn.functional.dropout((q @ k.transpose(1, 2) / 3).softmax(-1) @ v, 0.1, self.training)
        return self.head(self.head(x)).mean(1)


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


X = (torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)),)


def ran(model: Any, name: str = "quantize", **options: Any) -> Any:
    """A tool that has run a model."""
    given = {"calibration": 1} if options.get("method", "static") in ("static", "qat") else {}
    tool = amanda.tools.load(name)(**(given if name == "quantize" else {}), **options)
    with amanda.apply(tool), torch.no_grad():
        model(*X), model(*X)
    return tool


@BOTH
@pytest.mark.parametrize("optimize", [False, True])
def test_operators_have_nodes_of_the_exported_program(
    net: Any, tmp_path: Path, suffix: str, optimize: bool
) -> None:
    """Of a program and of its file; what an exporter leaves out, or joins, is told."""
    path = tmp_path / f"net{suffix}"
    if suffix == ".pt2":
        torch.export.save(torch.export.export(net, X), path)
    else:
        torch.onnx.export(net, X, path, dynamo=True, verbose=False, optimize=optimize)
    found = amanda.align(net, X, path)
    joined = suffix == ".onnx" and optimize
    missing = {op_id for op_id, one in found.items() if not one.nodes and not one.is_dropped}
    # The exporter's optimizer writes a split that names no operator.
    assert missing == ({"Net/chunk:0"} if joined else set())
    assert all("left it out" in one.reason for one in found.values() if one.is_dropped)
    heads = [found[f"Net.head{call}/linear:0"].nodes for call in ("", "#1")]
    assert heads[0]
    assert heads[0] != heads[1]
    assert found["Net.conv/conv2d:0"].weight == "conv.weight"
    assert (found["Net.conv/conv2d:0"].nodes == found["Net.norm/batch_norm:0"].nodes) == joined


def test_missing_operators_and_other_targets_are_named(net: Any, tmp_path: Path) -> None:
    program = torch.export.export(net, X)
    net.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    missing = amanda.align(net, X, program)["Net.head.1/tanh:0"]
    assert (missing.nodes, missing.reason) == ((), "the program has no other tanh in head.1")
    with pytest.raises(UnsupportedProgramError, match="is no exported program"):
        amanda.align(net, X, "net.bin")
    with pytest.raises(FileError, match=r"net\.pt2 cannot be read"):
        amanda.align(net, X, tmp_path / "net.pt2")


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"symmetric": True}, {"weight_bits": 4, "activation_bits": 4}, {"activation_bits": 0},
     {"per_channel": False}, {"method": "dynamic"}, {"method": "qat"}, {"number": "e4m3"},
     {"group": 4}, {"group": 8, "weight_bits": 4}, {"group": 2, "method": "qat"},
     {"method": "dynamic", "per_token": True}, {"method": "dynamic", "smooth": 0.5},
     {"smooth": 0.5, "gptq": True, "group": 4}, {"gptq": True, "weight_bits": 4},
     {"weight_bits": 3, "per_channel": False}],
)  # fmt: skip
def test_quantize_exports_what_it_simulates(
    net: Any, tmp_path: Path, suffix: str, options: Any
) -> None:
    """Integer weights and nodes that quantize; the model itself is as it was."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = ran(net, **options).export_model(net, X, tmp_path / f"net{suffix}")
    # The convolution has three inputs, which are no groups, and no tokens.
    assert len(found.ops) == 4 - any(map(options.get, ("group", "per_token", "smooth", "gptq")))
    assert found.difference <= (2e-6 if suffix == ".onnx" else 0)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    if suffix == ".pt2" and "number" not in options:
        program = torch.export.load(found.path)
        kinds = {v.dtype for name, v in program.state_dict.items() if "integers" in name}
        assert kinds == {torch.uint8 if options.get("weight_bits", 8) < 8 else torch.int8}
        assert "dequantize_per" in str(program.graph)
    if suffix == ".onnx" and options.get("weight_bits", 8) < 8:
        model = importlib.import_module("onnx").load(found.path)
        kinds = {each.data_type for each in model.graph.initializer if "integers" in each.name}
        assert kinds == {model.graph.initializer[0].DataType.INT4}


@pytest.mark.parametrize("suffix", [".pt2", ".safetensors", ONNX])
def test_prune_exports_its_masks(net: Any, tmp_path: Path, suffix: str) -> None:
    found = ran(net, "prune", method="nm").export_model(net, X, tmp_path / f"net{suffix}")
    assert found.difference <= (2e-6 if suffix == ".onnx" else 0)
    if suffix == ".safetensors":
        net.load_state_dict(load_file(found.path))
        assert (net.head.weight == 0).float().mean() == 0.5


class Own(amanda.Tool):
    """A tool of a third party: halves what enters an operator, and says so or something else."""

    def __init__(self, told: Sequence[Change]) -> None:
        super().__init__()
        self.told = told
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_id() == "Net.qkv/linear:0":
            context.insert_before_op(lambda x: x / 2, inputs=[0])

    def changes(self) -> Sequence[Change]:
        return self.told


@BOTH
def test_a_difference_is_an_error_that_names_the_operator(
    net: Any, tmp_path: Path, suffix: str
) -> None:
    """Any tool that states its changes is exported, and held to them."""
    path = tmp_path / f"net{suffix}"
    halved = Function("Net.qkv/linear:0", 0, lambda x: x / 2)
    assert export_model(Own([halved]), net, X, path).ops == ["Net.qkv/linear:0"]
    before = path.read_bytes()
    wrong = Function("Net.qkv/linear:0", 0, lambda x: x / 3)
    with pytest.raises(UnsupportedProgramError, match=r"first at op Net\.qkv/linear:0, by"):
        export_model(Own([wrong]), net, X, path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


class Branching(nn.Module):
    """Has control flow that depends on values."""

    def forward(self, x: Any) -> Any:
        return x @ x if x.sum() > 0 else x


WIDE = Rounding("Net.qkv/linear:0", 0, [[1.0], [2.0]], [[0.0], [0.0]], -128, 127)
MASK = Mask("Net.qkv/linear:0", 1, torch.ones(2, 2).numpy())


@pytest.mark.parametrize(
    ("tool", "model", "inputs", "name", "message"),
    [
        ([WIDE], Net(), None, "net.pt2", "needs example inputs"),
        ([WIDE], Net(), X, "net.bin", "none of the suffixes"),
        ([WIDE], lambda x: x, X, "net.pt2", "only models of PyTorch"),
        ([], Net(), X, "net.pt2", "nothing to export"),
        ([WIDE], Branching(), X, "net.pt2", r"torch\.export refuses the model"),
        ([WIDE], nn.Sequential(Net()), X, "net.pt2", "the model has changed"),
        ([WIDE], Net(), X, "net.pt2", r"qkv/linear:0: \.pt2 cannot express .* several axes"),
        ([WIDE], Net(), X, "net.safetensors", r"\.safetensors has no operators"),
        ([MASK], Net(), X, "net.pt2", r"has the shape \(2, 2\)"),
        ([WIDE], Net(), X, "missing/net.pt2", "No such file"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, tool: Any, model: Any, inputs: Any, name: str, message: str
) -> None:
    with pytest.raises((AmandaError, OSError), match=message) as caught:
        export_model(Own(tool), model, inputs, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


@BOTH
def test_activations_can_have_groups(net: Any, tmp_path: Path, suffix: str) -> None:
    """As a third party may state; what is no constant is rounded by plain arithmetic."""
    grid = np.full((2, 16, 2), 0.1), np.zeros((2, 16, 2))
    changes = [Rounding("Net.qkv/linear:0", 0, *grid, -8, 7, axis=2, group=4)]
    tool: Any = Applied(changes)
    tool.changes = lambda: changes
    found = export_model(tool, net, X, tmp_path / f"net{suffix}")
    assert found.difference <= (2e-6 if suffix == ".onnx" else 0)


def test_an_operator_can_stay_in_floating_point(net: Any, tmp_path: Path) -> None:
    kept = Function("Net.conv/conv2d:0", 0, lambda x: x / 2)
    found = export_model(Own([WIDE, kept]), net, X, tmp_path / "net.pt2", fallback=True)
    assert found.ops == ["Net.conv/conv2d:0"]
    assert "several axes" in found.in_floating_point["Net.qkv/linear:0"]
