"""Models that torch.onnx has exported: their operators have the ids and figures of PyTorch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import amanda
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("amanda_torch")
pytest.importorskip("amanda_tools")
pytestmark = pytest.mark.filterwarnings("ignore")

SHARED = {
    "Net.conv/conv2d:0", "Net.norm/batch_norm:0", "Net/relu:0", "Net/transpose:0",
    "Net.blocks.0.fc/linear:0", "Net.blocks.0.act/gelu:0", "Net.blocks.0/add:0",
    "Net.blocks.0.norm/layer_norm:0", "Net.blocks.1.fc/linear:0", "Net.blocks.1.act/gelu:0",
    "Net.blocks.1/add:0", "Net.blocks.1.norm/layer_norm:0", "Net/mean:0", "Net.head/linear:0",
    "Net/softmax:0",
}  # fmt: skip


class Block(torch.nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = torch.nn.Linear(8, 8), torch.nn.GELU()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.act(self.fc(x)) + x)


class Net(torch.nn.Module):
    """A convolution and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)).softmax(-1)


@pytest.fixture(scope="module", params=[False, True], ids=["as exported", "optimized"])
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model, its path, and whether the exporter has optimized the graph."""
    torch.manual_seed(0)
    net = Net().eval()
    path = tmp_path_factory.mktemp("exported") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = (torch.rand(2, 4, 6, 6),)
        torch.onnx.export(net, x, path, dynamo=True, verbose=False, optimize=request.param)
    return net, path, request.param


def session(path: Path, *, optimized: bool = False) -> Any:
    """A session of a file."""
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def both(exported: Any, name: str, **options: Any) -> list[tuple[Any, Any]]:
    """A tool and the outputs under it, in ONNX Runtime and in PyTorch."""
    net, path, _ = exported
    made, x = session(path), torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    found = []

    def run_net() -> Any:
        with torch.no_grad():
            return net(x).numpy()

    for run in (lambda: made.run(None, {"x": x.numpy()})[0], run_net):
        tool = amanda.tools.load(name)(**options)
        with amanda.apply(tool):
            outputs = [run() for _ in range(2)]
        found.append((tool, outputs[-1]))
    return found


def test_ids_are_those_of_pytorch(exported: Any) -> None:
    """Operators that the graph has as one node; PyTorch's linear with its weight among them."""
    (onnx_tool, output), (torch_tool, expected) = both(exported, "count")
    ids, others = ({row["id"] for row in t.result()["ops"]} for t in (onnx_tool, torch_tool))
    # The exporter's optimizer makes one convolution of the convolution and the norm.
    fused = {"Net.conv/conv2d:0", "Net.norm/batch_norm:0"} if exported[2] else set()
    assert ids & others == SHARED - fused
    # The bias of a linear of three axes is a node of its own, as is the view of a flatten.
    rest = {op_id.rpartition("/")[2] for op_id in ids - others}
    assert rest <= {"Add:0", "view:0", "Conv:0", "clone:0"}
    assert np.allclose(output, expected, atol=1e-6)


def test_figures_are_those_of_pytorch(exported: Any) -> None:
    """FLOPs, and the parameters and operations of the model."""
    (one, _), (other, _) = both(exported, "flops")
    assert one.result()["summary"]["flops"] == other.result()["summary"]["flops"] > 0
    assert not one.result()["summary"]["unknown_ops"]
    (one, _), (other, _) = both(exported, "summary")
    mine, theirs = (tool.result()["summary"]["models"]["Net"] for tool in (one, other))
    assert mine["flops"] == theirs["flops"]
    # Means and variances are constants of the graph. The exporter's optimizer merges the norm into
    # the convolution, and constants of equal values.
    extra = -16 - 16 if exported[2] else 16
    assert mine["parameters"] == theirs["parameters"] + extra


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prune", {"method": "magnitude"}),
        ("prune", {"method": "nm"}),
        ("quantize", {"calibration": 1}),
        ("quantize", {"method": "dynamic"}),
        ("quantize", {"number": "e5m2", "calibration": 1}),
    ],
)
def test_changes_are_those_of_pytorch(exported: Any, name: str, options: Any) -> None:
    """The same tool changes the outputs in the same way."""
    if exported[2]:
        pytest.skip("the optimizer has merged the norm into the convolution's weight")
    (one, output), (other, expected) = both(exported, name, **options)
    assert {row["id"] for row in one.result()["ops"]} == {
        row["id"] for row in other.result()["ops"]
    }
    assert np.allclose(output, expected, atol=2e-6)
    if name == "prune":
        for op_id, mask in one.masks.items():
            # The exporter transposes the weight of a product of three axes.
            expected = other.masks[op_id]
            assert np.array_equal(mask, expected) or np.array_equal(mask, expected.T)


def test_an_optimized_session_keeps_its_bits(exported: Any) -> None:
    """Whatever ONNX Runtime fuses, a program under tools that watch gets its outputs."""
    made, feed = session(exported[1], optimized=True), {"x": np.ones((2, 4, 6, 6), np.float32)}
    expected = made.run(None, feed)[0]
    tool = amanda.tools.load("stats")()
    with amanda.apply(tool):
        assert all(np.array_equal(made.run(None, feed)[0], expected) for _ in range(3))


@pytest.mark.parametrize("planted", ["", "conv.bias", "blocks.1.fc.bias", "head.weight"])
def test_diff_names_an_operator_with_an_error(
    exported: Any, planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is wrong in the exported model is found, by a recording of PyTorch's run."""
    net, path, is_optimized = exported
    if is_optimized:
        pytest.skip("the optimizer has merged constants")
    monkeypatch.chdir(tmp_path)
    x = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    recording = amanda.tools.load("diff")()
    with torch.no_grad(), amanda.apply(recording):
        net(x)
    made = onnx.load(path)
    for tensor in made.graph.initializer:
        if tensor.name == planted:
            value = numpy_helper.to_array(tensor) * 1.01
            tensor.CopyFrom(numpy_helper.from_array(value, planted))
    onnx.save(made, tmp_path / "changed.onnx")
    run = session(tmp_path / "changed.onnx")
    tool = amanda.tools.load("diff")(reference=recording, align="value")
    with amanda.apply(tool):
        run.run(None, {"x": x.numpy()})
    summary = tool.result()["summary"]
    if not planted:
        assert summary["first"] is None
        assert summary["compared"] >= len(SHARED)
    else:
        assert summary["first"]["module"] == planted.rpartition(".")[0]


KERAS = """
import keras, numpy as np, onnxruntime as ort
layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(5)]
model, x = keras.Sequential(layers), np.random.rand(2, 8, 8, 3).astype("float32")
expected = keras.ops.convert_to_numpy(model(x))
model.export("model.onnx", format="onnx", verbose=False)
session = ort.InferenceSession("model.onnx")
import amanda
tool = amanda.tools.load("flops")()
with amanda.apply(tool):
    found = session.run(None, {session.get_inputs()[0].name: x})[0]
assert np.allclose(found, expected, atol=1e-5)
import json
print(json.dumps(tool.result()["summary"]))
"""


def test_a_model_of_keras(tmp_path: Path) -> None:
    """Keras' exporter, on PyTorch: the products of a convolution and a dense layer."""
    pytest.importorskip("keras")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERAS],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["flops"] == 2 * 2 * (6 * 6 * 4 * 3 * 3 * 3 + 6 * 6 * 4 * 5)
    assert not summary["unknown_ops"]
