"""``prune`` on TensorFlow: the same tool, against functions written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.prune import PruneTool

v1 = tf.compat.v1
Weights = dict[str, Any]
MODES = pytest.mark.parametrize("mode", ["eager", "function", "session"])


def weights() -> Weights:
    random = np.random.default_rng(0)
    shapes = {"conv": (3, 3, 4, 8), "strided": (3, 3, 8, 8), "dense": (8, 6)}
    return {
        name: tf.Variable(random.normal(size=shape).astype(np.float32) / 4, name=name)
        for name, shape in shapes.items()
    }


def images() -> Any:
    return tf.constant(np.random.default_rng(1).normal(size=(5, 9, 9, 4)).astype(np.float32))


def net(x: Any, w: Weights, conv: Callable[..., Any] = tf.nn.conv2d) -> Any:
    """Convolutions of two sizes and a matrix product; `conv` stands for a changed one."""
    x = tf.nn.relu(conv(x, w["conv"], 1, "SAME"))
    x = tf.nn.relu(conv(x, w["strided"], 2, "VALID"))
    return tf.matmul(tf.reduce_mean(x, [1, 2]), w["dense"])


def step(x: Any, w: Weights, *args: Any) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        y = net(x, w, *args)
        loss = tf.reduce_sum(y * y)
    return y, tape.gradient(loss, list(w.values()))


def runner(
    mode: str, x: Any, w: Weights, run: Any = step, build: Callable[..., Any] | None = None
) -> Callable[[], Any]:
    """`run`, a step unless told, in one of the modes; `build` is what a graph has in its place."""
    if mode == "eager":
        return lambda: run(x, w)
    if mode == "function":
        return tf.function(lambda: run(x, w))  # type: ignore[no-any-return]
    values = {name: value.numpy() for name, value in w.items()}
    with tf.Graph().as_default() as graph:
        entry = v1.placeholder(x.dtype, x.shape)
        variables = {
            name: v1.get_variable(name, initializer=value, use_resource=True)
            for name, value in values.items()
        }
        fetches = (build or run)(entry, variables)
        start = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(start)
    return lambda: session.run(fetches, {entry: x.numpy()})


def with_gradients(x: Any, w: Weights) -> tuple[Any, list[Any]]:
    """A step of a graph."""
    y = net(x, w)
    return y, v1.gradients(tf.reduce_sum(y * y), list(w.values()))


def by_name(tool: PruneTool, w: Weights) -> dict[str, Any]:
    """The masks by weight; operators run in the order of the weights."""
    return dict(zip(w, tool.masks.values(), strict=True))


def assert_close(found: Any, expected: Any) -> None:
    (y, gradients), (wanted, others) = found, expected
    assert np.allclose(y, wanted, atol=1e-6)
    for a, b in zip(gradients, others, strict=True):
        assert np.allclose(a, b, atol=1e-5)


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.7},
        {"method": "nm"},
        {"method": "tile", "tile": 3},
        {"sparsity": 0.8, "scope": "global"},
        {"sparsity": 0.9, "end": 3},
    ],
    ids=str,
)
def test_masks_act_as_in_a_function_changed_by_hand(mode: str, options: dict[str, Any]) -> None:
    x, w = images(), weights()
    tool = PruneTool(**options)
    run = runner(mode, x, w, build=with_gradients)
    with amanda.apply(tool):
        *_, found = (run() for _ in range(6))
    sparsity = tool.result()["summary"]["sparsity"]
    assert sparsity == pytest.approx(options.get("sparsity", 0.5), abs=0.01)
    masks = by_name(tool, w)
    assert [mask.shape for mask in masks.values()] == [tuple(v.shape) for v in w.values()]

    with tf.GradientTape() as tape:
        masked = {name: v * masks[name].astype(np.float32) for name, v in w.items()}
        y = net(x, masked)
        loss = tf.reduce_sum(y * y)
    assert_close(found, (y, tape.gradient(loss, list(w.values()))))
    assert np.count_nonzero(np.asarray(found[1][0])[~masks["conv"]]) == 0


def gated_channels(keep: int) -> Callable[..., Any]:
    """Feature boosting and suppression by hand, with its initial parameters."""

    def conv(x: Any, w: Any, *args: Any) -> Any:
        phi = tf.reduce_sum(abs(w.numpy()), [0, 1])
        phi = phi / (tf.reduce_sum(phi) / phi.shape[1])
        saliency = tf.nn.relu(tf.reduce_mean(abs(x), [1, 2]) @ phi + 1)
        least = tf.math.top_k(saliency, keep).values[:, -1:]
        gate = tf.where(saliency >= least, saliency, 0.0)
        return tf.nn.conv2d(x, w, *args) * gate[:, None, None, :]

    return conv


@MODES
def test_channel_gates_act_as_in_a_function_changed_by_hand(mode: str) -> None:
    x, w = images(), weights()
    run = runner(mode, x, w, build=with_gradients)
    with amanda.apply(tool := PruneTool(method="channel", sparsity=0.25)):
        run()
        found = run()
    assert len(tool.parameters()) == 4
    assert_close(found, step(x, w, gated_channels(6)))


@MODES
def test_spatial_gates_keep_the_share_of_positions(mode: str) -> None:
    """Counted in the output of the gated operator itself, with the values that stay."""
    x, w = images(), {"conv": weights()["conv"]}

    def conv(x: Any, w: Weights) -> Any:
        return tf.nn.conv2d(x, w["conv"], 1, "SAME")

    dense, run = conv(x, w), runner(mode, x, w, conv)
    with amanda.apply(PruneTool(method="activation", sparsity=0.4)):
        y = np.asarray(run())
    kept = (y != 0).any(-1)
    assert kept.sum((1, 2)).tolist() == [81 - round(0.4 * 81)] * 5
    assert np.allclose(y[kept], dense.numpy()[kept], atol=1e-6)
    saliency = np.abs(x.numpy()).mean(-1)
    assert saliency[kept].min() > 0
    for sample, mask in zip(saliency, kept, strict=True):
        assert sample[mask].min() >= sample[~mask].max() - 1e-6


def test_a_validation_has_the_masks_of_the_training() -> None:
    """Though it is another function, which first runs when the weights are others."""
    keras = tf.keras
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(6, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    x = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    y = np.ones((12, 6), np.float32)
    tool = PruneTool(method="magnitude", sparsity=0.5)
    with amanda.apply(tool):
        found = model.fit(x, y, batch_size=4, epochs=3, validation_data=(x, y), verbose=0).history
    (one,) = tool.masks.values()
    (weight,) = model.get_weights()
    again = np.abs(weight) > np.quantile(np.abs(weight), 0.5)
    assert not np.array_equal(one, again)  # or it would be the same by chance
    expected = float(np.square(x @ (weight * one) - 1).mean())
    assert found["val_loss"][-1] == pytest.approx(expected, rel=1e-5)


def test_channel_gates_of_a_depthwise_convolution_look_at_its_own_channels() -> None:
    """Output ``c * 2 + m`` depends on input ``c`` alone, as with PyTorch's groups."""
    random = np.random.default_rng(0)
    value = random.normal(size=(3, 3, 4, 2)).astype(np.float32)
    weight, tool = tf.Variable(value), PruneTool(method="channel", sparsity=0.5)
    x = images()
    with amanda.apply(tool):
        found = tf.nn.depthwise_conv2d(x, weight, [1, 1, 1, 1], "SAME").numpy()
    phi = np.zeros((4, 8))
    for channel in range(4):
        for m in range(2):
            phi[channel, channel * 2 + m] = np.abs(value[:, :, channel, m]).sum()
    phi /= phi.sum() / 8
    saliency = np.maximum(np.abs(x.numpy()).mean((1, 2)) @ phi + 1, 0)
    kept = np.zeros_like(saliency)
    for row, order in zip(kept, np.argsort(-saliency, axis=1), strict=True):
        row[order[:4]] = 1
    exact = tf.nn.depthwise_conv2d(x, weight, [1, 1, 1, 1], "SAME").numpy()
    assert np.allclose(found, exact * (kept * saliency)[:, None, None, :], atol=1e-5)
    assert tool.result()["summary"]["skipped"] == []
