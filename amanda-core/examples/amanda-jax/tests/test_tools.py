"""The tools of amanda-tools on JAX, against figures by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import amanda
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import BLOCK, MLP, Block, Mlp, equal, loss, rows, texts

MODELS = {"mlp": (Mlp, rows, MLP), "block": (Block, texts, BLOCK)}


def run(name: str, kind: str = "mlp", times: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    """A tool, its result, and outputs and gradients under it."""
    model, inputs = MODELS[kind][0](), MODELS[kind][1]()
    tool = amanda.tools.load(name)(**options)
    with amanda.apply(tool):
        for _ in range(times):
            found = eqx.filter_value_and_grad(loss)(model, inputs)
    return tool, tool.result(), found


def exact(kind: str = "mlp", change: Any = lambda path, value: value) -> Any:
    """Loss and gradients without a tool, of a model whose weights are changed."""
    model = jax.tree_util.tree_map_with_path(
        lambda keys, value: change(jax.tree_util.keystr(keys, simple=True, separator="."), value),
        MODELS[kind][0](),
    )
    return eqx.filter_value_and_grad(loss)(model, MODELS[kind][1]())


@pytest.mark.parametrize("name", ["count", "flops", "nan", "summary", "dump", "stats", "trace"])
@pytest.mark.parametrize("kind", MODELS)
def test_watching_changes_nothing(name: str, kind: str) -> None:
    """Loss and gradients have the bits that they have without a tool."""
    assert equal(run(name, kind)[2], exact(kind))


def test_count() -> None:
    """Every operator, and one backward operator for each that has a gradient."""
    _, result, _ = run("count", times=2)
    assert result["summary"]["steps"] == 2
    forward = [r["type"] for r in result["ops"] if r["direction"] == "forward"]
    assert forward == ["einsum", "add", "relu", "einsum", "add", "pow", "mean"]
    assert result["summary"]["forward"] == 2 * len(forward)
    assert result["summary"]["backward"] == 2 * len(forward)
    _, result, _ = run("count", "block")
    products = [r["module"] for r in result["ops"] if r["type"] == "einsum"]
    # Scores and their sum are no layers.
    assert products == ["q", "k", "v", "", "", "out", "up", "down"]
    assert result["summary"]["by_type"]["backward"]["einsum_backward"]["ops"] == len(products)


@pytest.mark.parametrize("kind", MODELS)
def test_flops(kind: str) -> None:
    """Two operations per product; a gradient for each factor but the inputs of the model."""
    _, result, _ = run("flops", kind, times=2)
    summary, expected = result["summary"], MODELS[kind][2]
    of_inputs = 2 * 4 * 3 * 8 if kind == "mlp" else 0
    assert summary["flops"] == 2 * expected
    assert summary["flops_backward"] == 2 * (2 * expected - of_inputs)
    assert (summary["unknown_ops"], summary["bound"], summary["not_seen"]) == ({}, None, {})


def test_summary() -> None:
    """Modules by the paths of their attributes, with parameters and outputs of the whole batch."""
    _, result, _ = run("summary", "block")
    found = {row["path"]: (row["parameters"], row["output"]) for row in result["modules"]}
    assert found["Block"] == (584, [2, 6, 8])
    assert found["Block/q"] == (72, [2, 6, 8])
    assert found["Block/up"] == (144, [2, 6, 16])
    assert found["Block/norm"] == (16, [2, 6, 8])
    assert result["summary"]["models"]["Block"]["flops"] == BLOCK


def test_nan_names_the_first_operator() -> None:
    """The logarithm of a negative number, not what computes with it."""
    tool = amanda.tools.load("nan")()
    with pytest.warns(match="log produced NaN"), amanda.apply(tool):
        jnp.exp(jnp.log(jnp.asarray([0.5, -1.0]))) * 2
    assert tool.result()["summary"]["first"]["id"] == "/log:0"


def test_stats_and_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of each operator are those that the program computes."""
    model, x = Mlp(), rows()
    hidden = jax.vmap(lambda row: jax.nn.relu(model.layers[0](row)))(x)
    _, stats, _ = run("stats")
    means = {(row["id"], row["tensor"]): row["mean"] for row in stats["ops"]}
    assert means["Mlp/relu:0", "output0"] == pytest.approx(float(hidden.mean()), rel=1e-5)
    monkeypatch.chdir(tmp_path)
    tool, dump, (_, gradients) = run("dump")
    tool.write_files(tmp_path, "dump")
    found = load_file(tmp_path / dump["ops"][0]["file"])
    values = {(row["id"], row["tensor"]): found[row["key"]] for row in dump["ops"]}
    assert np.array_equal(values["Mlp/relu:0", "output0"], hidden)
    weight = np.asarray(gradients.head.weight)
    assert any(np.array_equal(value, weight) for value in values.values())


@pytest.mark.parametrize(("kind", "layer"), [("mlp", "head"), ("block", "v")])
def test_diff_names_the_first_operator_that_differs(tmp_path: Path, kind: str, layer: str) -> None:
    """A recording, and a run in which a layer has another weight."""
    model, x = MODELS[kind][0](), MODELS[kind][1]()
    other = eqx.tree_at(lambda m: getattr(m, layer).weight, model, replace_fn=lambda w: w * 2)

    def compared(model: Any, **options: Any) -> Any:
        tool = amanda.tools.load("diff")(**options)
        with amanda.apply(tool):
            jax.vmap(model)(x)
        tool.write_files(tmp_path, "diff")
        return tool.result()["summary"]

    compared(model)
    assert compared(model, reference=str(tmp_path))["first"] is None
    found = compared(other, reference=str(tmp_path))["first"]
    assert found["id"].startswith(f"{type(model).__name__}.{layer}/")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mlp", {"layers.0": 12, "head": 20}),
        ("block", {"q": 32, "k": 32, "v": 32, "out": 32, "up": 64, "down": 64}),
    ],
)
def test_prune_is_a_model_of_masked_weights(kind: str, sizes: dict[str, int]) -> None:
    """Weights under masks, and their gradients, as if the model had them."""
    tool, result, found = run("prune", kind, method="magnitude", sparsity=0.5)
    masks = {op_id.partition("/")[0].partition(".")[2]: mask for op_id, mask in tool.masks.items()}
    assert result["summary"]["skipped"] == []
    assert {name: int(mask.sum()) for name, mask in masks.items()} == sizes

    def masked(path: str, value: Any) -> Any:
        return value * masks[path[:-7]] if path.endswith("weight") and path[:-7] in masks else value

    expected = exact(kind, masked)
    assert np.allclose(found[0], expected[0], rtol=1e-6)
    weights = [eqx.filter(found[1], eqx.is_array), eqx.filter(expected[1], eqx.is_array)]
    own, others = (jax.tree_util.tree_leaves_with_path(each) for each in weights)
    for (keys, one), (_, other) in zip(own, others, strict=True):
        name = jax.tree_util.keystr(keys, simple=True, separator=".")
        assert np.allclose(one, masked(name, other), rtol=1e-4, atol=1e-6), name
    for method in ("nm", "activation", "tile"):
        assert np.isfinite(run("prune", kind, method=method)[2][0])


def test_quantize_is_a_model_of_rounded_weights() -> None:
    """Weights of 8 bits per output channel: as if the model had them."""
    _, result, found = run("quantize", activation_bits=0)
    assert result["summary"]["skipped"] == []

    def rounded(path: str, value: Any) -> Any:
        if not path.endswith("weight"):
            return value
        scale = np.abs(value).max(1, keepdims=True) / 127
        return np.round(value / scale) * scale

    assert np.allclose(found[0], exact("mlp", rounded)[0], rtol=1e-5)
    for options in ({"method": "static", "calibration": 1}, {"method": "dynamic"}):
        _, result, found = run("quantize", "block", **options)
        assert result["summary"]["skipped"] == []
        assert result["summary"]["ops"] == 6
        assert np.allclose(found[0], exact("block")[0], rtol=0.1)


@pytest.mark.parametrize("kind", MODELS)
def test_inject_changes_one_element(kind: str) -> None:
    """A bit of the output of a layer is flipped, by the same seed the same one."""
    results = [run("inject", kind, seed=3)[2] for _ in range(2)]
    assert not equal(results[0], exact(kind))
    assert equal(*results)


def test_on_the_command_line(tmp_path: Path) -> None:
    """A program of its own, which imports JAX and Equinox under the tools."""
    (tmp_path / "train.py").write_text(
        "import equinox as eqx, jax, jax.numpy as jnp\n"
        "model = eqx.nn.MLP(3, 5, 8, 1, key=jax.random.key(0))\n"
        "@eqx.filter_jit\n"
        "@eqx.filter_grad\n"
        "def gradient(model, x):\n"
        "    return jnp.sum(jax.vmap(model)(x))\n"
        "print(gradient(model, jnp.ones((4, 3))).layers[0].weight.shape)\n"
    )
    command = "-m amanda run -t count,flops,summary -o out train.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "(8, 3)" in done.stdout
    assert "jitted functions" in done.stderr
    flops = json.loads((tmp_path / "out/flops.json").read_text())
    assert flops["summary"]["flops"] == MLP
    assert flops["summary"]["flops_backward"] == 2 * MLP - 2 * 4 * 3 * 8
    modules = json.loads((tmp_path / "out/summary.json").read_text())["modules"]
    assert {row["path"] for row in modules} == {"MLP", "MLP/layers", "MLP/layers/0", "MLP/layers/1"}
