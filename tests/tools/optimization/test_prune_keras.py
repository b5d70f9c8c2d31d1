"""``prune`` on one Keras model in all its modes: masks carry over, and weights can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.errors import AmandaError
from amanda_tools.prune.tool import PruneTool

X = np.random.default_rng(0).normal(size=(4, 3, 4)).astype(np.float32)
Y = np.ones((4, 3), np.float32)
ROW = tf.constant([[1.0, -2.0, 3.0]])


def network() -> Any:
    """A product in another view of its variable, one that is called twice, and a normalization."""
    keras.utils.set_random_seed(0)
    shared = keras.layers.Dense(4, name="shared")
    inputs = keras.Input((3, 4))
    x = keras.layers.EinsumDense("abc,cde->abde", output_shape=(3, 2, 2), name="einsum")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Reshape((3, 4))(x))
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dense(3, name="head")(shared(shared(x)))
    model = keras.Model(inputs, x, name="net")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def runs_of(model: Any) -> dict[str, Callable[[], Any]]:
    """The ways to run a model."""
    function = tf.function(lambda x: model(x))
    return {
        "fit": lambda: model.fit(X, Y, verbose=0),
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "predict": lambda: model.predict(X, verbose=0),
        "call": lambda: model(X),
        "function": lambda: function(tf.constant(X)),
    }


def masked(run: Callable[[], Any], path: Path) -> PruneTool:
    """The tool with the masks of a file after a run."""
    with amanda.apply(tool := PruneTool(masks=str(path))):
        run()
    return tool


def test_one_file_of_masks_serves_all_modes(tmp_path: Path) -> None:
    """Masks that were saved in one mode of a Keras model are those of all others, and of the model
    that is loaded from a file."""
    model = network()
    with amanda.apply(tool := PruneTool(sparsity=0.5)):
        model.fit(X, Y, verbose=0)
    path = tool.save(tmp_path / "masks.safetensors")
    model.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras")
    runs = {**runs_of(model), "loaded": lambda: loaded.predict(X, verbose=0)}
    for name, run in runs.items():
        found = masked(run, path)
        assert found.masks.keys() == tool.masks.keys(), name
        for op_id, mask in tool.masks.items():
            assert np.array_equal(found.masks[op_id], mask), name
        assert not found.summary()["masks_never_used"]


def test_baked_model_computes_what_the_masks_computed() -> None:
    """After fit and evaluate under the tool, bake() writes the variables, whatever runs the model:
    the vanilla model gives what it gave under the masks."""
    model = network()
    runs = runs_of(model)
    with amanda.apply(tool := PruneTool(sparsity=0.5)):
        runs["fit"]()
        runs["evaluate"]()
        expected = np.array(model(X))
    dense = model.get_weights()
    for name in ("call", "predict", "function"):
        model.set_weights(dense)
        tool.bake(runs[name])
        assert np.array_equal(model(X), expected), name
        kernel = np.array(model.get_layer("head").kernel)
        assert np.count_nonzero(kernel) == kernel.size // 2


def pair() -> tuple[Any, Any, Any]:
    """Two variables of one shape, and a function that multiplies by one of them."""
    one = tf.Variable(np.arange(9.0, dtype=np.float32).reshape(3, 3) - 4.0, name="one")
    two = tf.Variable(4.0 - np.arange(9.0, dtype=np.float32).reshape(3, 3), name="two")

    @tf.function
    def either(x: Any, is_first: Any) -> Any:
        return tf.cond(is_first, lambda: x @ one, lambda: x @ tf.transpose(two))

    return one, two, either


@pytest.mark.parametrize("by", ["eager", "function"])
def test_variables_without_keras_are_written(by: str) -> None:
    """bake() writes a variable that operators of another mode have read, in whatever view."""
    one, two, either = pair()
    with amanda.apply(tool := PruneTool(sparsity=0.4)):
        expected = [np.array(either(ROW, tf.constant(first))) for first in (True, False)]

    def eagerly() -> None:
        tf.matmul(ROW, one)
        tf.matmul(ROW, tf.transpose(two))

    tool.bake(eagerly if by == "eager" else lambda: either(ROW, tf.constant(True)))
    found = [np.array(either(ROW, tf.constant(first))) for first in (True, False)]
    np.testing.assert_array_equal(found, expected)
    assert np.count_nonzero(one) < 8
    assert np.count_nonzero(two) < 8


def test_a_mask_of_another_weight_is_refused(tmp_path: Path) -> None:
    """An operator with a known id that reads a weight of another name gets no mask."""
    one, two, _ = pair()
    with amanda.apply(tool := PruneTool(sparsity=0.4)):
        tf.matmul(ROW, one)
    path = tool.save(tmp_path / "masks.safetensors")
    with pytest.raises(AmandaError, match="is of the weight one, and the op reads two"):
        masked(lambda: tf.matmul(ROW, two), path)


def test_a_second_model_gets_no_mask_of_the_first(tmp_path: Path) -> None:
    """The masks of a model are not given to a second one of the same architecture."""
    models = [keras.Sequential([keras.layers.Dense(3, name="d")], name="net") for _ in range(2)]
    for model in models:
        model(ROW)
    with amanda.apply(tool := PruneTool(sparsity=0.4)):
        models[0](ROW)
    path = tool.save(tmp_path / "masks.safetensors")
    with pytest.raises(AmandaError, match="net@1/d/MatMul:0"):
        masked(lambda: [model(ROW) for model in models], path)


def test_a_variable_that_others_read_whole_is_not_written() -> None:
    """bake() refuses a variable that an operator reads without the mask."""
    one, _, _ = pair()
    with amanda.apply(tool := PruneTool(ops=["linear"], sparsity=0.4, exclude=["/MatMul:1"])):
        tf.matmul(ROW, one)
        tf.matmul(ROW, one)
    with pytest.raises(AmandaError, match="without its mask"):
        tool.bake(lambda: tf.matmul(ROW, one))


def test_baking_before_there_are_masks() -> None:
    """bake() before any run says that there are no masks."""
    with pytest.raises(AmandaError, match="there are no masks"):
        PruneTool().bake(lambda: None)


def test_variables_of_a_session_are_written() -> None:
    """bake() writes the variables of a session, by their initializers."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        weight = tf1.get_variable("w", initializer=tf.reshape(tf.range(9.0), (3, 3)) - 4.0)
        x = tf1.placeholder(tf.float32, (None, 3))
        y = x @ weight
        initialize = tf1.global_variables_initializer()
    with tf1.Session(graph=graph) as session:
        session.run(initialize)
        run = lambda: session.run(y, {x: [[1.0, -2.0, 3.0]]})  # noqa: E731
        with amanda.apply(tool := PruneTool(sparsity=0.4)):
            expected = run()
        assert not np.array_equal(run(), expected)
        tool.bake(run)
        assert np.array_equal(run(), expected)


def test_baking_by_a_run_that_reads_another_weight_under_an_id() -> None:
    """bake() never writes a mask into another weight, though an operator of its id reads that."""
    one, two, _ = pair()
    with amanda.apply(tool := PruneTool(sparsity=0.4)):
        tf.matmul(ROW, one)
    before = np.array(two)
    with pytest.raises(AmandaError, match="of another model"):
        tool.bake(lambda: tf.matmul(ROW, two))
    with amanda.apply(tool):
        amanda.new_iteration()
        tf.matmul(ROW, one)
        tf.matmul(ROW, two)
    with pytest.raises(AmandaError, match="has not executed"):
        tool.bake(lambda: tf.matmul(ROW, two))
    assert np.array_equal(two, before)
