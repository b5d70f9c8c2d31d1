"""The tools of amanda-tools on sessions, against figures by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import amanda
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

from models import FLOAT, cnn, images, model, session

pytest.importorskip("amanda_tools")

CONV = 2 * (2 * 8 * 4 * 4) * 4 * 3 * 3
HEAD = 2 * 2 * 8 * 5
KINDS = ["conv2d", "relu", "adaptive_avg_pool2d", "reshape", "linear", "add"]


def run(name: str, made: Any = None, times: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    """A tool, its result, and the output of the last run under it."""
    made = made or session(cnn())
    tool = amanda.tools.load(name)(**options)
    with amanda.apply(tool):
        for _ in range(times):
            output = made.run(None, images())[0]
    return tool, tool.result(), output


def with_weights(change: Any) -> Any:
    """The output of the model whose weights are `change(name, value)`."""
    made = cnn()
    for tensor in made.graph.initializer:
        value = change(tensor.name, numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
    return session(made).run(None, images())[0]


def test_count_and_flops() -> None:
    """Every node of every run, and the products of a convolution and a linear layer."""
    _, count, _ = run("count")
    assert count["summary"]["forward"] == 12
    assert [row["type"] for row in count["ops"]] == KINDS
    assert count["summary"]["steps"] == 2
    _, flops, output = run("flops")
    assert flops["summary"]["flops"] == 2 * (CONV + HEAD)
    assert not flops["summary"]["unknown_ops"]
    assert np.array_equal(output, session(cnn()).run(None, images())[0])


def test_flops_of_recurrent_operators() -> None:
    """Both matrices of each gate, for each step and direction."""
    random = np.random.default_rng(0)
    constants = {
        "w": random.normal(size=(2, 20, 4)).astype(np.float32),
        "r": random.normal(size=(2, 20, 5)).astype(np.float32),
    }
    node = helper.make_node(
        "LSTM", ["x", "w", "r"], ["y"], hidden_size=5, direction="bidirectional"
    )
    made = session(model([node], {"x": FLOAT}, {"y": FLOAT}, constants))
    tool = amanda.tools.load("flops")()
    with amanda.apply(tool):
        made.run(None, {"x": np.ones((7, 3, 4), np.float32)})
    assert tool.result()["summary"]["flops"] == 7 * 3 * 2 * (2 * 20 * 4 + 2 * 20 * 5)


def test_trace_summary_profile_and_path() -> None:
    """Operators in order, modules with shapes, and a time for each operator."""
    _, trace, _ = run("trace")
    assert [row["type"] for row in trace["ops"]] == KINDS
    _, summary, _ = run("summary")
    assert summary["summary"]["models"]["Net"]["flops"] == CONV + HEAD
    found = {row["path"]: (row["parameters"], row["output"]) for row in summary["modules"]}
    assert found == {
        "Net": (8 * 4 * 9 + 8 + 8 * 5 + 5, [2, 5]),
        "Net/stem": (8 * 4 * 9 + 8, [2, 8, 4, 4]),
        "Net/head": (8 * 5 + 5, [2, 5]),
    }
    _, profile, _ = run("profile")
    assert all(row["calls"] == 2 and row["seconds"] > 0 for row in profile["ops"])
    _, path, _ = run("path")
    assert len(path["ops"]) == 6


def test_stats_sparsity_and_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of each node are those that the session computes."""
    whole = cnn()
    names = [name for node in whole.graph.node for name in node.output]
    whole.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names[:-1])
    values = dict(zip(["y", *names[:-1]], session(whole).run(None, images()), strict=True))
    _, stats, _ = run("stats")
    means = {(row["id"], row["tensor"]): row["mean"] for row in stats["ops"]}
    assert means["Net.stem/Relu:0", "output0"] == pytest.approx(values["b"].mean(), rel=1e-5)
    assert means["Net.head/Add:0", "output0"] == pytest.approx(values["y"].mean(), rel=1e-5)
    _, sparsity, _ = run("sparsity")
    assert any(row["id"] == "Net.stem/Relu:0" for row in sparsity["ops"])
    monkeypatch.chdir(tmp_path)
    tool, dump, _ = run("dump", times=1)
    tool.write_files(tmp_path, "dump")
    found = load_file(tmp_path / dump["ops"][0]["file"])
    outputs = {row["id"]: found[row["key"]] for row in dump["ops"] if row["tensor"] == "output0"}
    assert len(outputs) == 6
    assert np.array_equal(outputs["Net.stem/Relu:0"], values["b"])
    assert np.array_equal(outputs["Net.head/Add:0"], values["y"])


def test_nan_names_the_first_operator() -> None:
    """The logarithm of a negative number, not what computes with it."""
    nodes = [
        helper.make_node("Sub", ["x", "one"], ["a"], "/m/Sub"),
        helper.make_node("Log", ["a"], ["b"], "/m/Log"),
        helper.make_node("Mul", ["b", "one"], ["y"], "/m/Mul"),
    ]
    made = session(model(nodes, {"x": FLOAT}, {"y": FLOAT}, {"one": np.float32([1])}))
    tool = amanda.tools.load("nan")()
    with pytest.warns(match="log produced NaN"), amanda.apply(tool):
        made.run(None, {"x": np.float32([0.0, 4.0])})
    assert tool.result()["summary"]["first"]["id"] == "Net.m/Log:0"


def test_prune_is_a_session_of_masked_weights() -> None:
    """Weights under masks: as if they were in the model; the session keeps its own."""
    tool, result, output = run("prune", method="magnitude", sparsity=0.5)
    masks = {
        "stem.weight": tool.masks["Net.stem/Conv:0"],
        "head.weight": tool.masks["Net.head/MatMul:0"],
    }
    assert result["summary"]["skipped"] == []
    assert [int(mask.sum()) for mask in masks.values()] == [144, 20]
    expected = with_weights(lambda name, value: value * masks.get(name, 1))
    assert np.allclose(output, expected, atol=1e-5)
    for method in ("nm", "channel", "activation", "tile", "attention"):
        assert np.isfinite(run("prune", method=method)[2]).all()
    with pytest.raises(amanda.errors.AmandaError):
        tool.bake(lambda: session(cnn()).run(None, images()))


def test_quantize_is_a_session_of_rounded_weights() -> None:
    """Weights of 8 bits per channel alone: as if they were in the model."""
    _, result, output = run("quantize", activation_bits=0)
    assert result["summary"]["skipped"] == []

    def rounded(name: str, value: Any) -> Any:
        if name not in ("stem.weight", "head.weight"):
            return value
        axes = (1, 2, 3) if value.ndim == 4 else (0,)
        scale = np.abs(value).max(axes, keepdims=True) / 127
        return np.round(value / scale) * scale

    assert np.allclose(output, with_weights(rounded), atol=1e-4)
    exact = session(cnn()).run(None, images())[0]
    for options in (
        {"method": "static", "calibration": 1},
        {"method": "dynamic"},
        {"number": "e4m3", "calibration": 1},
    ):
        _, result, output = run("quantize", **options)
        assert result["summary"]["skipped"] == []
        assert 0 < np.abs(output - exact).max() < 0.1 * np.abs(exact).max()


def test_inject_changes_one_element() -> None:
    """A bit of the output of the convolution or the linear layer is flipped, by the same seed."""
    exact = session(cnn()).run(None, images())[0]
    outputs = [run("inject", times=1, seed=3)[2] for _ in range(2)]
    assert not np.array_equal(outputs[0], exact)
    assert np.array_equal(*outputs)


def test_on_the_command_line(tmp_path: Path) -> None:
    """A program of its own, and the line about what is not seen."""
    onnx.save(cnn(), tmp_path / "model.onnx")
    (tmp_path / "infer.py").write_text(
        "import numpy as np, onnxruntime as ort\n"
        "session = ort.InferenceSession('model.onnx')\n"
        "x = np.ones((1, 4, 6, 6), np.float32)\n"
        "print(session.run(None, {'x': x})[0].shape)\n"
    )
    command = [
        sys.executable,
        "-m",
        "amanda",
        "run",
        "-t",
        "count,flops,nan",
        "-o",
        "out",
        "infer.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "(1, 5)" in done.stdout
    flops = json.loads((tmp_path / "out/flops.json").read_text())
    assert flops["summary"]["flops"] == (CONV + HEAD) // 2
    assert flops["namespaces"][0].startswith("onnx/")
