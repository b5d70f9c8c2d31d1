"""SmoothQuant, GPTQ, ranges of tokens, and what ``quantize`` keeps in floating point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda_tools.quantize import QuantizeTool
from amanda_tools.quantize.calibration import gptq, smoothing
from amanda_tools.quantize.numbers import QuantGrid
from tests.tools.optimization.test_quantize import rounded_activation, rounded_weight

INT4 = QuantGrid.of("int", 4, symmetric=True)


def data(rows: int = 256, width: int = 16, seed: int = 0) -> Any:
    """Correlated features, of which one has outliers."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(3, width, generator=generator)
    x = torch.randn(rows, 3, generator=generator) @ mixing
    x = x + 0.1 * torch.randn(rows, width, generator=generator)
    x[:, 5] *= 40
    return x


def outputs(tool: QuantizeTool, model: Any, x: Any, runs: int = 1) -> Any:
    """What a model gives after its calibration."""
    with amanda.apply(tool), torch.no_grad():
        for _ in range(runs):
            model(x)
        return model(x)


def error(tool: QuantizeTool, model: Any, x: Any) -> float:
    """The relative error of the output."""
    exact = model(x).detach()
    return float((outputs(tool, model, x) - exact).norm() / exact.norm())


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(1)
    return nn.Linear(16, 8)


# -- SmoothQuant -----------------------------------------------------------------


def test_the_factors_of_smoothing_by_hand() -> None:
    """sqrt(4 / 1), sqrt(1 / 4); a channel that has nothing to share stays."""
    found = smoothing(np.array([4.0, 1.0, 0.0, 3.0]), np.array([1.0, 4.0, 1.0, 0.0]), 0.5)
    assert found.tolist() == [2, 0.5, 1, 1]
    assert smoothing(np.array([8.0]), np.array([2.0]), 1.0).tolist() == [8]


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_smoothed_operators_equal_ones_changed_by_hand(layer: Any, method: str) -> None:
    """Data are divided and weights multiplied before both are rounded; outliers cost less."""
    x, weight = data(), layer.weight.detach()
    tool = QuantizeTool(smooth=0.5, method=method)
    found = outputs(tool, layer, x)
    s = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    smooth = x / s
    given = rounded_activation(smooth, smooth.min().item(), smooth.max().item(), 8, False)
    expected = F.linear(given, rounded_weight(weight * s, 8, per_channel=True), layer.bias)
    assert torch.allclose(found, expected.detach(), rtol=1e-4, atol=1e-4)
    row = tool.result()["ops"][0]["quantizers"][0]
    assert row["factors"] == pytest.approx(s.tolist(), rel=1e-5)
    plain = QuantizeTool(method=method)
    assert error(QuantizeTool(smooth=0.5, method=method), layer, x) < error(plain, layer, x) / 2


# -- GPTQ ------------------------------------------------------------------------


def by_inverses(matrix: Any, hessian: Any, scale: Any) -> Any:
    """GPTQ as its paper derives it: the inverse Hessian of the columns that remain, each time."""
    rest, whole = matrix.astype(np.float64), np.zeros(matrix.shape)
    hessian = hessian + 0.01 * hessian.diagonal().mean() * np.eye(len(hessian))
    for i in range(len(hessian)):
        inverse = np.linalg.inv(hessian[i:, i:])
        whole[:, i] = np.clip(np.round(rest[:, i] / scale), -7, 7)
        change = (rest[:, i] - whole[:, i] * scale) / inverse[0, 0]
        rest[:, i:] -= np.outer(change, inverse[0])
    return whole


def test_gptq_by_hand() -> None:
    """0.4 becomes 0; the other column, correlated by 1/2.02, makes up for it: 0.598 becomes 1."""
    hessian = np.array([[2.0, 1.0], [1.0, 2.0]])
    whole, scales = gptq(np.array([[0.4, 0.4]]), hessian, lambda _: np.ones(1), INT4)
    assert whole.tolist() == [[0, 1]]
    assert scales.tolist() == [1]
    # Without correlation, and without data: to the nearest.
    for free in (2 * np.eye(2), np.zeros((2, 2))):
        assert not gptq(np.array([[0.4, 0.4]]), free, lambda _: np.ones(1), INT4)[0].any()


@pytest.mark.parametrize("width", [6, 128, 300])
def test_gptq_equals_the_paper_without_cholesky_and_blocks(width: int) -> None:
    matrix = np.random.default_rng(0).normal(size=(6, width))
    x = data(2 * width, width).numpy().astype(np.float64)
    x[:, 5] /= 40
    scale = (np.abs(matrix).max(1) / 7).astype(np.float32)
    whole, _ = gptq(matrix, 2 * x.T @ x, lambda _: scale, INT4)
    assert (whole != by_inverses(matrix, 2 * x.T @ x, scale)).mean() < 0.002


@pytest.mark.parametrize(
    "options",
    [{}, {"group": 4}, {"per_channel": False}, {"observer": "mse"}, {"smooth": 0.5}],
    ids=str,
)
def test_gptq_lowers_the_error_on_correlated_data(layer: Any, options: dict[str, Any]) -> None:
    """Its integers are what the operator computes with."""
    bits = {"weight_bits": 3, "activation_bits": 8 if "smooth" in options else 0}
    x, tool = data(), QuantizeTool(gptq=True, **bits, **options)
    plain = error(QuantizeTool(**bits, **options), layer, x)
    assert error(tool, layer, x) < 0.75 * plain
    if not bits["activation_bits"]:
        [whole] = tool.integer_weights(lambda: layer(x)).values()
        scale = np.array(tool.result()["ops"][0]["quantizers"][0]["scale"])
        spread = scale.repeat(4, 1) if "group" in options else scale[:, None]
        weight = torch.tensor((whole * spread).astype(np.float32))
        assert torch.allclose(outputs(tool, layer, x), F.linear(x, weight, layer.bias), rtol=1e-4)


def test_all_executions_of_the_calibration_count(layer: Any) -> None:
    """The integers are those for all the data at once."""
    x, options = data(), {"gptq": True, "weight_bits": 3, "activation_bits": 0}
    tools = QuantizeTool(**options), QuantizeTool(calibration=2, **options)
    for tool, batches in zip(tools, ([x], x.split(128)), strict=True):
        with amanda.apply(tool), torch.no_grad():
            for batch in batches:
                layer(batch)
    one, other = (tool.integer_weights(lambda: layer(x)) for tool in tools)
    assert np.array_equal(one["Linear/linear:0|1"], other["Linear/linear:0|1"])


def test_operators_without_a_matrix_are_skipped_by_name() -> None:
    conv, x = nn.Conv1d(4, 4, 2), torch.randn(2, 4, 6)
    for options, reason in (
        ({"gptq": True}, "smooth and gptq are for products of data with a weight matrix"),
        ({"smooth": 0.5}, "smooth and gptq are for products of data with a weight matrix"),
        ({"method": "dynamic", "per_token": True}, "per_token is for data whose last axis holds"),
    ):
        tool = QuantizeTool(**options)
        assert torch.equal(outputs(tool, conv, x), conv(x))
        [row] = tool.result()["summary"]["skipped"]
        assert row["reason"].startswith(reason)
    tool = QuantizeTool(smooth=0.5)
    linear = nn.Linear(4, 4)
    outputs(tool, linear, torch.randn(2, 4))
    with pytest.raises(AmandaError, match="its weight is for smoothed data"):
        tool.to_torchao(linear, lambda: linear(torch.randn(2, 4)))


# -- tokens ----------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
def test_each_token_has_its_range(layer: Any, symmetric: bool) -> None:
    """A row of data; of a product's right side a column."""
    x = data(6)
    given = {"method": "dynamic", "per_token": True, "symmetric": symmetric}

    def rows(value: Any) -> Any:
        every = [(row, row.min().item(), row.max().item()) for row in value]
        return torch.stack([rounded_activation(*one, 8, symmetric) for one in every])

    found = outputs(QuantizeTool(**given, weight_bits=0), layer, x)
    assert torch.allclose(found, layer(rows(x)), rtol=1e-5, atol=1e-5)
    one = QuantizeTool(method="dynamic", symmetric=symmetric)
    assert error(QuantizeTool(**given), layer, x) < error(one, layer, x)
    k = torch.randn(6, 16)
    with amanda.apply(QuantizeTool(**given, ops=["matmul"])):
        product = x @ k.mT
    assert torch.allclose(product, rows(x) @ rows(k).mT, rtol=1e-5, atol=1e-5)


# -- what stays in floating point ------------------------------------------------


class Stack(nn.Module):
    """Three layers, of which the second one has outliers among its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.second.weight.data[:, 0] *= 60

    def forward(self, x: Any) -> Any:
        return {"y": self.third(self.second(self.first(x).relu()).relu())}


@pytest.mark.parametrize("options", [{"calibration": 2}, {"method": "dynamic"}], ids=str)
def test_the_worst_operators_stay_in_floating_point(options: dict[str, Any]) -> None:
    """By the ranking of the last iteration that calibrates; the calibration is exact."""
    model, x = Stack(), torch.randn(32, 16)
    tool, other = (
        QuantizeTool(weight_bits=4, **options, **o) for o in ({"keep": 1}, {"exclude": ["second"]})
    )
    exact, calibrating = model(x)["y"], options.get("calibration", 1)
    for each in (tool, other):
        with amanda.apply(each), torch.no_grad():
            found = [model(x)["y"] for _ in range(calibrating + 1)]
        if each is tool:
            assert all(torch.equal(y, exact) for y in found[:-1])
            kept = found[-1]
    assert torch.equal(found[-1], kept)
    result = tool.result()
    first = result["summary"]["sensitivity"][0]
    assert (first["id"], first["is_kept"]) == ("Stack.second/linear:0", True)
    assert [row["id"] for row in result["ops"]] == ["Stack.first/linear:0", "Stack.third/linear:0"]
    assert result["summary"]["skipped"][0]["reason"] == "keep=1 leaves it in floating point"
    assert {change.op for change in tool.changes()} == {row["id"] for row in result["ops"]}
    table = next(table for table in tool.tables() if table.title == "quantize: sensitivity")
    assert [row[3] for row in table.rows] == ["float", "rounded", "rounded"]


@pytest.mark.parametrize("metric", [None, "output", lambda out: float(out["y"].sum())])
def test_what_is_kept_follows_the_metric(metric: Any) -> None:
    """A measurement ranks anew, and keeps the first operators from then on."""
    model, x = Stack(), torch.randn(32, 16)
    tool = QuantizeTool(weight_bits=4, keep=2)
    with torch.no_grad():
        found = tool.sensitivity(lambda: model(x), metric)
        assert [op.is_kept for op in found.ops] == [True, True, False]
        others = [op.id for op in found.ops if op.is_kept]
        with amanda.apply(tool):
            y = model(x)["y"]
        expected = outputs(QuantizeTool(weight_bits=4, exclude=others), model, x)["y"]
        assert torch.equal(y, expected)
        again = tool.sensitivity(lambda: model(x), metric)
    assert again == found
    with amanda.apply(tool):
        model(x)
    assert {row["id"] for row in tool.result()["summary"]["skipped"]} == {*others}
    if metric == "output":
        exact, first = model(x)["y"].detach(), found.ops[0]
        alone = QuantizeTool(weight_bits=4, exclude=[op.id for op in found.ops[1:]])
        noise = (outputs(alone, model, x)["y"] - exact).norm() / exact.norm()
        assert first.metric == pytest.approx(-20 * np.log10(float(noise)), rel=1e-4)
