"""The tool ``path`` on TensorFlow: one architecture has the same paths in every mode, and on
PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn import functional

import amanda
from amanda_tools.path import Path, PathTool
from amanda_tools.path.recording import PassRecorder

tf1 = tf.compat.v1
Weights = dict[str, Any]


@pytest.fixture
def weights() -> Weights:
    """In TensorFlow's layouts."""
    random = np.random.default_rng(0)
    shapes = {
        "first": (3, 3, 3, 4), "first_bias": (4,), "scale": (4,), "offset": (4,), "mean": (4,),
        "depthwise": (3, 3, 4, 1), "grouped": (2, 2, 4, 6), "dense": (6, 5), "dense_bias": (5,),
    }  # fmt: skip
    made = {name: random.normal(0, 1, shape).astype("float32") for name, shape in shapes.items()}
    return {**made, "variance": random.uniform(0.5, 2, 4).astype("float32")}


@pytest.fixture
def image() -> Any:
    return np.random.default_rng(1).normal(0, 1, (3, 9, 9, 3)).astype("float32")


def in_tensorflow(x: Any, w: Any) -> Any:
    """Convolutions with borders, batch norm, both poolings, a sum, a list, a product."""
    x = tf.nn.bias_add(tf.nn.conv2d(x, w["first"], 1, "SAME"), w["first_bias"])
    x = tf1.nn.fused_batch_norm(
        x, w["scale"], w["offset"], w["mean"], w["variance"], epsilon=1e-3, is_training=False
    )[0]
    x = tf.nn.relu(x)
    branch = tf.nn.depthwise_conv2d(x, w["depthwise"], (1, 1, 1, 1), "SAME")
    x = tf.nn.max_pool2d(tf.concat([x, x + branch], axis=-1), 3, 2, "VALID")
    x = tf.tanh(tf.nn.conv2d(tf.nn.avg_pool2d(x, 2, 1, "VALID"), w["grouped"], 1, "VALID"))
    x = tf.reduce_mean(tf.transpose(x, (0, 3, 1, 2)), (2, 3))
    return tf.nn.softmax(tf.linalg.matmul(x, w["dense"]) + w["dense_bias"])


def in_torch(x: Any, weights: Weights) -> Any:
    """The same."""
    w = {name: torch.nn.Parameter(torch.tensor(array), False) for name, array in weights.items()}
    first, grouped = (w[name].permute(3, 2, 0, 1) for name in ("first", "grouped"))
    x = functional.conv2d(x, first, w["first_bias"], padding=1)
    x = functional.batch_norm(x, w["mean"], w["variance"], w["scale"], w["offset"], eps=1e-3)
    x = functional.relu(x)
    branch = functional.conv2d(x, w["depthwise"].permute(2, 3, 0, 1), padding=1, groups=4)
    x = functional.max_pool2d(torch.cat([x, x + branch], dim=1), 3, 2)
    x = torch.tanh(functional.conv2d(functional.avg_pool2d(x, 2, 1), grouped, groups=2))
    return functional.softmax(x.mean((2, 3)) @ w["dense"] + w["dense_bias"], dim=-1)


def eager(weights: Weights, image: Any) -> Callable[[], Any]:
    variables = {name: tf.Variable(array) for name, array in weights.items()}
    x = tf.constant(image)
    return lambda: in_tensorflow(x, variables)


def function(weights: Weights, image: Any) -> Callable[[], Any]:
    variables = {name: tf.Variable(array) for name, array in weights.items()}
    traced = tf.function(lambda x: in_tensorflow(x, variables))
    x = tf.constant(image)
    traced(x)
    return lambda: traced(x)


def session(weights: Weights, image: Any) -> Callable[[], Any]:
    with tf.Graph().as_default() as graph:
        fed = tf1.placeholder("float32", image.shape)
        variables = {
            name: tf1.get_variable(name, initializer=array) for name, array in weights.items()
        }
        result = in_tensorflow(fed, variables)
        initialize = tf1.global_variables_initializer()
    running = tf1.Session(graph=graph)
    running.run(initialize)
    return lambda: running.run(result, {fed: image})


MODES = {"eager": eager, "function": function, "session": session}
TYPES = ("conv2d", "batch_norm", "relu", "cat", "max_pool2d", "avg_pool2d", "tanh", "softmax")


def applied(run: Callable[[], Any], **options: Any) -> PathTool:
    tool = PathTool(synapses=True, **options)
    with amanda.apply(tool):
        run()
    return tool


def of_types(tool: PathTool, path: Path) -> Iterator[tuple[str, Any]]:
    """The operators that both frameworks have, in the order of the model."""
    for row in tool.op_rows():
        if row["type"] in TYPES:
            yield row["type"], path.ops[row["id"]]
        elif row["type"] in ("linear", "matmul"):
            yield "product", path.ops[row["id"]]


def channels_first(mask: Any) -> Any:
    return mask.array.transpose(2, 0, 1) if len(mask.shape) == 3 else mask.array


def weight_in_torch(mask: Any) -> Any:
    """A filter's mask in PyTorch's layout."""
    array = mask.array
    if array.ndim != 4:
        return array
    return array.transpose(2, 3, 0, 1) if array.shape[2:] == (4, 1) else array.transpose(3, 2, 0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_paths_of_torch(mode: str, weights: Weights, image: Any) -> None:
    """Masks of neurons and weights, and the counts of synapses, input by input."""
    ours = applied(MODES[mode](weights, image))
    x = torch.tensor(image).permute(0, 3, 1, 2).contiguous()
    theirs = applied(lambda: in_torch(x, weights))
    assert ours.summary()["unknown_ops"] == theirs.summary()["unknown_ops"] == {}
    assert len(ours.paths) == len(theirs.paths) == 3
    for one, other in zip(ours.paths, theirs.paths, strict=True):
        assert one.label == other.label
        left, right = list(of_types(ours, one)), list(of_types(theirs, other))
        assert [kind for kind, _ in left] == [kind for kind, _ in right]
        assert {kind for kind, _ in left} == {*TYPES, "product"}
        for (kind, a), (_, b) in zip(left, right, strict=True):
            np.testing.assert_array_equal(channels_first(a.neurons), b.neurons.array, kind)
            assert (a.critical, a.total) == (b.critical, b.total), kind
            assert (a.weights is None) == (b.weights is None), kind
            if a.weights is not None:
                expected = b.weights.array.reshape(weight_in_torch(a.weights).shape)
                np.testing.assert_array_equal(weight_in_torch(a.weights), expected, kind)
        [mask], [expected_mask] = one.inputs.values(), other.inputs.values()
        np.testing.assert_array_equal(channels_first(mask), expected_mask.array)
        assert 0 < mask.count < mask.size


@pytest.mark.parametrize("mode", ["function", "session"])
def test_the_order_in_which_a_graph_runs_changes_no_path(
    mode: str, weights: Weights, image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routines beside its operators run in any order: here, backwards."""
    run, finish = MODES[mode](weights, image), PassRecorder.finish

    def backwards(recorder: PassRecorder) -> None:
        for running in vars(recorder)["_passes"].values():
            running.executions = dict(reversed(running.executions.items()))
        finish(recorder)

    expected = applied(run)
    monkeypatch.setattr(PassRecorder, "finish", backwards)
    found = applied(run)
    assert found.op_rows() == expected.op_rows()


@pytest.mark.parametrize("mode", MODES)
def test_runs_that_follow_each_other(mode: str, weights: Weights, image: Any) -> None:
    """Each run is a pass of its own; a second one of the same image has the same paths."""
    run = MODES[mode](weights, image)

    def several() -> None:
        for _ in range(3):
            run()
            amanda.new_iteration()

    tool = applied(several)
    assert len(tool.paths) == 9
    assert tool.summary()["passes_without_output"] == 0
    densities = [[path.density(kind) for kind in ("neurons", "synapses")] for path in tool.paths]
    assert densities[:3] == densities[3:6] == densities[6:]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_weights_drawn_under_the_tool_are_no_data(mode: str) -> None:
    """A model that is built by its first call, and a fused loss, which gives rows as well."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(6, "relu", name="first"), tf.keras.layers.Dense(3, name="last")]
    model = tf.keras.Sequential(layers)
    targets = tf.constant([0, 2, 1, 1])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = model(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables)

    run = step if mode == "eager" else tf.function(step)
    x = tf.constant(np.random.default_rng(2).normal(0, 1, (4, 5)).astype("float32"))
    tool = applied(lambda: [run(x) for _ in range(3)])
    summary = tool.summary()
    assert "last" in summary["output"]
    assert summary["unknown_ops"] == {}
    assert summary["inputs"] == 12
    for path in tool.paths:
        assert 0 < path.density("weights") < 1
        [fed] = path.inputs.values()
        assert fed.shape == (5,)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_keras_model_that_is_trained(mode: str) -> None:
    """fit() runs, the scores and not the loss are explained, and a loop is listed."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            layers.Embedding(12, 6),
            layers.Dense(8, activation="gelu"),
            layers.LayerNormalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dropout(0.2),
            layers.Dense(3, activation="softmax"),
        ]
    )
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, 12, (12, 5)), random.integers(0, 3, 12)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=mode == "eager")
    tool = applied(lambda: model.fit(tokens, targets, batch_size=4, epochs=1, verbose=0))
    summary = tool.summary()
    assert summary["unknown_ops"] == {}
    assert summary["inputs"] == 12
    assert sum(c["inputs"] for c in summary["classes"].values()) == 12
    for path in tool.paths:
        scores = next(part.neurons for part in path.ops.values() if part.neurons is not None)
        assert (scores.shape, scores.count) == ((3,), 1)
        assert 0 < path.density("weights") < 1


class OwnStep(tf.keras.Sequential):
    """A model that computes its loss by hand."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_a_loss_that_is_computed_by_hand_is_no_output() -> None:
    """In a step of Keras, whose operators are named as those of modules are."""
    model = OwnStep([tf.keras.Input((4,)), tf.keras.layers.Dense(3, name="last")])
    model.compile("sgd")
    tool = applied(lambda: model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0))
    assert tool.summary()["output"].endswith("last/BiasAdd:0")


def test_what_builds_a_model_is_no_output() -> None:
    """A path begins in the forward pass, where the model has no rows of scores, too."""
    layers, random = tf.keras.layers, np.random.default_rng(0)
    one, other = tf.keras.Input((6,)), tf.keras.Input((6,))
    encoder = layers.Dense(4, name="encoder")
    model = tf.keras.Model([one, other], layers.Dot(1)([encoder(one), encoder(other)]))
    model.compile("sgd", "mse")
    inputs = [random.random((8, 6)) for _ in range(2)]
    tool = applied(lambda: model.fit(inputs, random.random((8, 1)), batch_size=4, verbose=0))
    start = next(row for row in tool.op_rows() if row["id"] == tool.summary()["output"])
    assert (start["phase"], start["module"].rpartition("/")[2]) == ("forward", "dot")
    assert tool.summary()["inputs"] == 8


@pytest.mark.parametrize("mode", ["function", "session"])
def test_a_loop_of_a_graph_is_no_new_pass(mode: str) -> None:
    """What runs several times in a pass does not end it."""
    weight = np.eye(4, dtype="float32")

    def build(x: Any) -> Any:
        x = tf.while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, z + 1.0), [0, x])[1]
        return tf.linalg.matmul(x, weight)

    image = np.arange(8, dtype="float32").reshape(2, 4)
    if mode == "function":
        traced, x = tf.function(build), tf.constant(image)
        tool = applied(lambda: traced(x))
    else:
        with tf.Graph().as_default() as graph:
            fed = tf1.placeholder("float32", (2, 4))
            result = build(fed)
        running = tf1.Session(graph=graph)
        tool = applied(lambda: running.run(result, {fed: image}))
    assert [path.label for path in tool.paths] == [3, 3]
    summary = tool.summary()
    assert summary["passes_without_output"] == 0
    [loop] = summary["loops_and_branches"]
    assert loop.endswith("/while")
    assert "loops and branches" in list(tool.tables())[-1].title


def test_branches_of_a_graph_and_scopes_of_their_names() -> None:
    """The scores are those of the model, however short it is after a branch; said."""
    weight = tf.Variable(np.eye(4, dtype="float32"))

    @tf.function
    def run(x: Any, deep: Any) -> Any:
        with tf.name_scope("net"), tf.name_scope("body"):
            x = tf.linalg.matmul(x, weight)
        with tf.name_scope("net"):
            x = tf.cond(deep, lambda: tf.tanh(tf.sigmoid(tf.tanh(tf.tanh(x)))), lambda: x)
        return tf.linalg.matmul(x, weight, name="scores")

    x = tf.constant(np.arange(8, dtype="float32").reshape(2, 4))
    tool = applied(lambda: run(x, tf.constant(True)))
    summary = tool.summary()
    assert summary["output"].endswith(("scores/MatMul", "run/Identity"))
    assert summary["loops_and_branches"] == ["run/net_1/cond"]
    assert tool.op_rows()[-1]["type"] in ("linear", "identity")


@pytest.mark.parametrize("collects", [True, False])
def test_a_recurrent_model_is_explained_down_to_its_loop(collects: bool) -> None:
    """What a loop has collected counts as an input, and its steps are no sequences."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    pooling = [layers.GlobalMaxPooling1D()] if collects else []
    recurrent = layers.SimpleRNN(6, return_sequences=collects)
    model = tf.keras.Sequential([recurrent, *pooling, layers.Dense(3)])
    x = tf.random.uniform((2, 4, 5))
    model(x)
    run = tf.function(model)
    tool = applied(lambda: run(x))
    summary = tool.summary()
    assert len(summary["loops_and_branches"]) == 1
    assert "sequences" not in summary
    assert summary["output"].split("/")[-1].startswith("BiasAdd")
    assert [path.label for path in tool.paths] == run(x).numpy().argmax(axis=1).tolist()
    for path in tool.paths:
        assert sum(mask.count for mask in path.inputs.values()) > 0


@pytest.mark.parametrize("metrics", [["accuracy", "mae"], ["auc"]])
def test_metrics_are_no_part_of_the_model(metrics: list[str], image: Any) -> None:
    """Under Keras' ``evaluate`` the way ends at the model's own output, and not at a metric's."""
    import keras

    model = keras.Sequential(
        [keras.Input((9, 9, 3)), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")],
        name="net",
    )
    made = [keras.metrics.AUC() if name == "auc" else name for name in metrics]
    model.compile(loss="mse", metrics=made)
    tool = PathTool()
    with amanda.apply(tool):
        model.evaluate(image, np.eye(3, dtype=np.float32), verbose=0)
    assert tool.summary()["output"].startswith("net/dense")
    assert tool.summary()["inputs"] == len(image)
