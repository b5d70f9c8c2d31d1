"""``quantize`` on TensorFlow: the same tool, against functions written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.quantize import QuantizeTool
from amanda_tools.quantize.calibration import gptq
from amanda_tools.quantize.numbers import QuantGrid
from tests.tools.optimization.test_prune_tensorflow import MODES, images, net, runner, weights


def by_hand(x: Any, w: dict[str, Any], seen: list[Any]) -> Any:
    """The net with TensorFlow's own rounding, activations in the ranges of `seen` or their own."""

    def rounded(value: Any, place: int) -> Any:
        of = seen[place] if seen else value
        low, high = float(min(tf.reduce_min(of), 0)), float(max(tf.reduce_max(of), 0))
        return tf.quantization.fake_quant_with_min_max_args(value, low, high, num_bits=8)

    def weight(name: str) -> Any:
        value = w[name]
        bound = tf.reduce_max(abs(value), list(range(len(value.shape) - 1)))
        return tf.quantization.fake_quant_with_min_max_vars_per_channel(
            value, -bound, bound, num_bits=8, narrow_range=True
        )

    x = tf.nn.relu(tf.nn.conv2d(rounded(x, 0), weight("conv"), 1, "SAME"))
    x = tf.nn.relu(tf.nn.conv2d(rounded(x, 1), weight("strided"), 2, "VALID"))
    return tf.matmul(rounded(tf.reduce_mean(x, [1, 2]), 2), weight("dense"))


def activations(x: Any, w: dict[str, Any]) -> list[Any]:
    """What enters each operator, without rounding."""
    h = tf.nn.relu(tf.nn.conv2d(x, w["conv"], 1, "SAME"))
    return [x, h, tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(h, w["strided"], 2, "VALID")), [1, 2])]


@MODES
@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_rounding_acts_as_in_a_function_changed_by_hand(mode: str, method: str) -> None:
    """TensorFlow's own operators round the same values, but for ties and last bits."""
    x, w = images(), weights()
    run = runner(mode, x, w, net)
    with amanda.apply(QuantizeTool(method=method)):
        run()
        amanda.new_iteration()
        output = np.asarray(run())
    expected = by_hand(x, w, activations(x, w) if method == "static" else []).numpy()
    exact = net(x, w).numpy()
    assert np.abs(output - expected).max() < 0.1 * np.abs(expected - exact).max()
    assert np.abs(expected - exact).max() > 1e-4


@MODES
def test_eight_bit_floating_point(mode: str) -> None:
    x, w = images(), weights()
    run = runner(mode, x, w, net)
    with amanda.apply(QuantizeTool(method="dynamic", number="e4m3", activation_bits=0)):
        output = np.asarray(run())
    small = {}
    for name, value in w.items():
        scale = tf.reduce_max(abs(value), list(range(len(value.shape) - 1))) / 448
        kind = tf.dtypes.experimental.float8_e4m3fn
        small[name] = tf.cast(tf.cast(value / scale, kind), tf.float32) * scale
    assert np.allclose(output, net(x, small).numpy(), atol=1e-5)


@MODES
@pytest.mark.parametrize("method", ["static", "qat"])
def test_groups(mode: str, method: str) -> None:
    """Consecutive inputs of a matrix, which are rows in TensorFlow, share a scale."""
    x, w = images(), weights()
    run = runner(mode, x, w, net)
    options = {"learning_rate": 1e-3} if method == "qat" else {}
    tool = QuantizeTool(method=method, group=2, weight_bits=4, activation_bits=0, **options)
    with amanda.apply(tool):
        run()
        amanda.new_iteration()
        output = np.asarray(run())
    quantizers = [q for found in tool.quantizers.values() for q in found]
    for quantizer, value in zip(quantizers, list(w.values())[-len(quantizers) :], strict=True):
        shape = [*value.shape]
        shape[-2] //= 2
        assert quantizer.final()[0].shape == tuple(shape)
    exact = net(x, w).numpy()
    assert 1e-4 < np.abs(output - exact).max() < 0.5 * np.abs(exact).max()


@MODES
def test_gptq_and_what_is_kept(mode: str) -> None:
    """The integers are those of the algorithm on the data that the operator has got."""
    x, w = images(), weights()
    run = runner(mode, x, w, net)
    tool = QuantizeTool(gptq=True, weight_bits=3, activation_bits=0)
    with amanda.apply(tool):
        run()
        amanda.new_iteration()
        output = np.asarray(run())
    rows, matrix = activations(x, w)[2].numpy().astype(np.float64), w["dense"].numpy().T
    scale = (np.abs(matrix).max(1) / 3).astype(np.float32)
    grid = QuantGrid.of("int", 3, symmetric=True)
    whole, _ = gptq(matrix, 2 * rows.T @ rows, lambda _: scale, grid)
    expected = rows @ (whole * scale[:, None]).T
    assert np.allclose(output, expected, atol=1e-4)
    tool = QuantizeTool(keep=3)
    with amanda.apply(tool):
        run()
        amanda.new_iteration()
        assert np.allclose(run(), net(x, w), atol=1e-6)
    assert len(tool.result()["summary"]["sensitivity"]) == 3


def test_sensitivity_and_integers() -> None:
    x, w = images(), weights()
    tool = QuantizeTool(weight_bits=4)
    found = tool.sensitivity(lambda: net(x, w), lambda y: -float(tf.reduce_sum(abs(y))))
    assert len(found.ops) == 3
    assert all(5 < op.sqnr < 60 for op in found.ops)
    whole = tool.integer_weights(lambda: net(x, w))
    for (name, value), found_value in zip(w.items(), whole.values(), strict=True):
        assert found_value.shape == value.shape, name
        assert np.abs(found_value).max() == 7


def test_the_zeros_in_which_a_recurrent_state_begins_are_no_range() -> None:
    """In a graph all steps are executions of one operator, whose first input is zero."""
    tf.keras.utils.set_random_seed(1)
    layer = tf.keras.layers.SimpleRNN(5, return_sequences=True)
    rows = np.random.default_rng(0).random((12, 10, 6), np.float32)
    vanilla, run = layer(rows).numpy(), tf.function(layer)
    tool = QuantizeTool(method="static")
    with amanda.apply(tool):
        run(rows)
        found = run(rows).numpy()
    # The first state that is not zero gives the range, which later ones leave a little.
    assert 0 < np.abs(found - vanilla).max() < 0.25


def test_an_operator_that_gets_zeros_only_is_calibrated() -> None:
    """Zeros are exact, and the first tensor that is not zero gives the range."""
    weight, tool = weights()["dense"], QuantizeTool(method="static")
    zeros = np.zeros((2, weight.shape[0]), np.float32)
    with amanda.apply(tool):
        for _ in range(3):
            assert not (zeros @ weight).numpy().any()
        [quantizer, _] = next(iter(tool.quantizers.values()))
        assert quantizer.is_ready


def test_operators_of_a_graph_that_never_run_are_left_out_of_the_export(tmp_path: Path) -> None:
    """Such as the step by which Keras finds a recurrent layer's shape: no run calibrates them."""
    layer, rows = tf.keras.layers.SimpleRNN(5, return_sequences=True), np.ones((4, 3, 6), "f")
    run, tool = tf.function(layer), QuantizeTool(method="static")
    run(rows)
    with amanda.apply(tool):
        run(rows)
    never = [op_id for op_id, found in tool.quantizers.items() if not found[0].has_run]
    path = tool.export(tmp_path / "ranges.safetensors", lambda: run(rows))
    assert never
    assert path.is_file()
    written = path.read_bytes().decode(errors="replace")
    assert [op_id in written for op_id in tool.quantizers] == [
        op_id not in never for op_id in tool.quantizers
    ]
