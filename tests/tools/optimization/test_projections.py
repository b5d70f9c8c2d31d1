"""Products whose weight has several axes, or is reshaped on its way: attention's projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.prune import PruneTool
from amanda_tools.quantize import QuantizeTool

Arrays = list[np.ndarray[Any, Any]]

X = np.random.default_rng(0).normal(size=(4, 5, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 5, 8)).astype(np.float32)
RATE = 0.1


def attention() -> Any:
    keras.utils.set_random_seed(0)
    x = keras.Input((None, 8))
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def kernels(model: Any) -> list[Any]:
    """Those of query, key, value and output, in the order in which they run."""
    return [weight for weight in model.weights if len(weight.shape) == 3]


def masked(model: Any, tool: PruneTool) -> Arrays:
    """The masks in the shape of the kernels."""
    return [
        mask.reshape(kernel.shape)
        for mask, kernel in zip(tool.masks.values(), kernels(model), strict=True)
    ]


def pruned_by_hand(masks: Arrays) -> Any:
    model = attention()
    for kernel, mask in zip(kernels(model), masks, strict=True):
        kernel.assign(kernel.numpy() * mask)
    return model


def run_eager(model: Any) -> Any:
    return model(X).numpy()


def run_fixed(model: Any) -> Any:
    """Keras multiplies with a reshaped kernel."""
    return model.predict(X, verbose=0)


def run_open(model: Any) -> Any:
    """Keras takes ``Einsum`` where a length is not known."""
    signature = [tf.TensorSpec((None, None, 8))]
    return tf.function(lambda x: model(x), input_signature=signature)(X).numpy()


RUNS = pytest.mark.parametrize("run", [run_eager, run_fixed, run_open])


def smallest(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """All but the smaller half."""
    mask = np.ones(value.size, bool)
    mask[np.argsort(np.abs(value).ravel())[: value.size // 2]] = False
    return mask.reshape(value.shape)


def two_of_four(value: np.ndarray[Any, Any], summed: int) -> np.ndarray[Any, Any]:
    """By brute force: of four inputs in a row the two largest, for each output.

    Args:
        value: a kernel.
        summed: how many of its first axes are summed.
    """
    matrix = np.abs(value).reshape(int(np.prod(value.shape[:summed])), -1)
    mask = np.zeros(matrix.shape, bool)
    for output in range(matrix.shape[1]):
        for first in range(0, matrix.shape[0], 4):
            group = matrix[first : first + 4, output]
            for i in sorted(range(4), key=lambda i: -group[i])[:2]:
                mask[first + i, output] = True
    return mask.reshape(value.shape)


@RUNS
def test_pruned_projections_are_those_pruned_by_hand(run: Callable[[Any], Any]) -> None:
    model, tool = attention(), PruneTool()
    with amanda.apply(tool):
        output = run(model)
    masks = [smallest(kernel.numpy()) for kernel in kernels(model)]
    for found, mask in zip(masked(model, tool), masks, strict=True):
        assert np.array_equal(found, mask)
    assert tool.result()["summary"]["skipped"] == []
    assert np.array_equal(output, run(pruned_by_hand(masks)))
    assert not np.array_equal(output, run(model))


def step(model: Any, x: Any) -> None:
    weights = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - Y) ** 2)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(RATE * gradient)


def train_eagerly(model: Any) -> None:
    for _ in range(2):
        step(model, X)


def train_open(model: Any) -> None:
    signature = [tf.TensorSpec((None, None, 8))]
    function = tf.function(lambda x: step(model, x), input_signature=signature)
    for _ in range(2):
        function(X)


def fit(model: Any) -> None:
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)


@pytest.mark.parametrize("train", [train_eagerly, train_open, fit])
def test_pruned_weights_are_trained_as_those_masked_by_hand(train: Callable[[Any], None]) -> None:
    """What is kept learns what it would in the model masked by hand; what is not stays."""
    model, tool = attention(), PruneTool()
    before = [kernel.numpy() for kernel in kernels(model)]
    with amanda.apply(tool):
        train(model)
    masks = masked(model, tool)
    reference = pruned_by_hand(masks)
    for _ in range(2):
        step(reference, X)
        for kernel, mask in zip(kernels(reference), masks, strict=True):
            kernel.assign(kernel.numpy() * mask)
    for kernel, wanted, mask, old in zip(
        kernels(model), kernels(reference), masks, before, strict=True
    ):
        assert np.array_equal(kernel.numpy()[~mask], old[~mask])
        assert np.allclose(kernel.numpy() * mask, wanted.numpy(), atol=1e-6)
        assert not np.allclose(kernel.numpy()[mask], old[mask])


@RUNS
def test_two_of_four_inputs_stay(run: Callable[[Any], Any]) -> None:
    model, tool = attention(), PruneTool(method="nm")
    with amanda.apply(tool):
        run(model)
    *projections, output = masked(model, tool)
    *values, last = [kernel.numpy() for kernel in kernels(model)]
    for mask, value in zip(projections, values, strict=True):
        assert np.array_equal(mask, two_of_four(value, 1))
    assert np.array_equal(output, two_of_four(last, 2))


def test_tiles_are_those_of_the_matrix() -> None:
    """The same masks whether Keras reshapes the kernel or not."""
    found = []
    for run in (run_eager, run_open):
        model, tool = attention(), PruneTool(method="tile", tile=4)
        with amanda.apply(tool):
            run(model)
        found.append(masked(model, tool))
    for mask, other in zip(*found, strict=True):
        assert np.array_equal(mask, other)
        assert 0.4 < 1 - mask.mean() <= 0.5


@pytest.mark.parametrize("run", [run_eager, run_open])
@pytest.mark.parametrize("per_channel", [True, False])
def test_kernels_are_rounded_per_output(run: Callable[[Any], Any], per_channel: bool) -> None:
    model = attention()
    tool = QuantizeTool(activation_bits=0, weight_bits=4, per_channel=per_channel)
    with amanda.apply(tool):
        output = run(model)
    assert tool.result()["summary"]["skipped"] == []
    reference = attention()
    for kernel, summed in zip(kernels(reference), (1, 1, 1, 2), strict=True):
        value = kernel.numpy()
        axes = tuple(range(summed)) if per_channel else None
        scale = (np.abs(value).max(axes, keepdims=True) / np.float32(7)).astype(np.float32)
        kernel.assign(np.clip(np.round(value * (1 / scale)), -7, 7) * scale)
    assert np.array_equal(output, run(reference))


def test_ranges_of_several_axes_are_learned() -> None:
    """A scale for each head and each of its numbers, in training and in rows."""
    model, tool = attention(), QuantizeTool(method="qat", learning_rate=0.01)
    with amanda.apply(tool):
        train_open(model)
    weights = [q for found in tool.quantizers.values() for q in found if q.role == "weight"]
    assert [q.row()["axis"] for q in weights] == [[1, 2], [1, 2], [1, 2], 2]
    assert [len(q.row()["scale"]) for q in weights] == [8, 8, 8, 8]
    assert all(len(set(q.row()["scale"])) == 8 for q in weights)


def test_reshaped_weights_of_a_session() -> None:
    v1, value = tf.compat.v1, np.random.default_rng(2).normal(size=(2, 8, 4)).astype(np.float32)
    graph, tool = tf.Graph(), PruneTool(method="nm")
    with graph.as_default():
        x = v1.placeholder(tf.float32, (None, 8))
        weight = v1.get_variable("w", initializer=value, use_resource=True)
        matrix = tf.reshape(tf.transpose(weight, [1, 0, 2]), [8, -1])
        y = tf.matmul(x, matrix)
        gradient = v1.gradients(tf.reduce_sum(y * y), [weight])[0]
        start = v1.global_variables_initializer()
    data = X[:, 0]
    with v1.Session(graph=graph) as session:
        session.run(start)
        with amanda.apply(tool):
            output, found = session.run((y, gradient), {x: data})
        (mask,) = tool.masks.values()
        assert np.array_equal(mask, two_of_four(value.transpose(1, 0, 2).reshape(8, 8), 1))
        original = mask.reshape(8, 2, 4).transpose(1, 0, 2)
        weight.load(value * original, session)
        expected, dense = session.run((y, gradient), {x: data})
    assert np.array_equal(output, expected)
    assert np.array_equal(found, dense * original)


def test_views_of_one_variable_have_masks_of_their_own() -> None:
    """A mask of a weight is none of its transposition, though both have one shape."""
    weight, tool = tf.Variable(np.random.default_rng(3).normal(size=(8, 8))), PruneTool(method="nm")
    x = tf.constant(X[:, 0].astype(np.float64))
    with amanda.apply(tool):
        x @ weight
        x @ tf.transpose(weight)
        x @ weight
    one, other, again = tool.masks.values()
    assert np.array_equal(one, two_of_four(weight.numpy(), 1))
    assert np.array_equal(other, two_of_four(weight.numpy().T, 1))
    assert np.array_equal(one, again)


def test_one_dimensional_convolutions_are_pruned() -> None:
    """Their kernel gets an axis on its way."""
    keras.utils.set_random_seed(0)
    layer, tool = keras.layers.Conv1D(6, 3), PruneTool(method="nm")
    layer.build(X.shape)
    with amanda.apply(tool):
        output = layer(X).numpy()
    (mask,) = tool.masks.values()
    layer.kernel.assign(layer.kernel.numpy() * mask.reshape(layer.kernel.shape))
    assert mask.mean() == 0.5
    assert np.array_equal(output, layer(X).numpy())


def test_what_cannot_be_treated_is_listed() -> None:
    experts, computed = tf.Variable(tf.ones([4, 8, 8])), tf.Variable(tf.ones([8, 8]))
    tiles = PruneTool(method="tile", ops=["linear", "matmul"])
    with amanda.apply(tiles):
        tf.einsum("gbi,gio->gbo", X, experts)
        tf.einsum("...i,...io->...o", X[:, 0], experts)
        tf.matmul(X[0], computed * 2)
    assert tiles.masks == {}
    reasons = [row["reason"] for row in tiles.result()["summary"]["skipped"]]
    assert "a matrix of weights for each position" in reasons[0]
    assert "3 axes, and not the layout IO" in reasons[1]
    assert "none of its inputs is known as its weight" in reasons[2]


def test_experts_are_pruned_one_by_one() -> None:
    """A batch of matrices has no tile, and N:M all the same."""
    value = np.random.default_rng(4).normal(size=(4, 8, 2)).astype(np.float32)
    experts, tool = tf.Variable(value), PruneTool(method="nm")
    with amanda.apply(tool):
        tf.einsum("gbi,gio->gbo", X, experts)
        tf.matmul(X, experts)
    mask, same = tool.masks.values()
    assert np.array_equal(mask, same)
    assert np.array_equal(mask, np.stack([two_of_four(part, 1) for part in value]))
