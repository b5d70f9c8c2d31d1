"""All analysis tools at once on the architectures that people use, in every mode.

Sizes are small, and the outputs have to be those of the run without tools, to the last bit.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

import amanda
from tests import models
from tests.running import run_python

# isort: split
import timm
import torchvision

tf1 = tf.compat.v1
TOOLS = ("count", "trace", "flops", "nan", "profile", "stats", "sparsity", "dump", "diff")
COMMON = {"id", "type", "name", "direction", "module", "namespace"}
Arrays = list[np.ndarray[Any, Any]]
Run = Callable[[], Arrays]
Prepare = Callable[[], Run]


# -- PyTorch ------------------------------------------------------------------


def resnet() -> models.Built:
    """A ResNet with ResNet-50's blocks, one per stage."""
    block = torchvision.models.resnet.Bottleneck
    net = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=5, width_per_group=8)
    return net, {"x": torch.rand(2, 3, 32, 32)}


def resnet_timm() -> models.Built:
    """The same of timm."""
    block = timm.models.resnet.Bottleneck
    net = timm.models.resnet.ResNet(block, (1, 1, 1, 1), num_classes=5, base_width=8)
    return net, {"x": torch.rand(2, 3, 32, 32)}


def in_torch(build: Callable[[], models.Built], *, training: bool) -> Prepare:
    """A forward pass, or a training step with its gradients and weights."""

    def prepare() -> Run:
        torch.manual_seed(0)
        model, inputs = build()
        model.train(training)
        return lambda: (step if training else forward)(model, inputs)

    def forward(model: torch.nn.Module, inputs: models.Inputs) -> Arrays:
        with torch.no_grad():
            return [tensor.numpy() for tensor in models.tensors(model(**inputs))]

    def step(model: torch.nn.Module, inputs: models.Inputs) -> Arrays:
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        models.loss(model(**inputs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().numpy() for t in [*model.parameters(), *gradients]]

    return prepare


# -- TensorFlow ---------------------------------------------------------------


def keras_resnet() -> Any:
    """A strided residual block with biases and normalization."""
    layers = tf.keras.layers
    entry = tf.keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same")(entry)
    y = layers.BatchNormalization()(layers.Conv2D(16, 3, 2, "same")(x))
    y = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(layers.ReLU()(y)))
    x = layers.ReLU()(layers.Add()([layers.Conv2D(16, 1, 2)(x), y]))
    return tf.keras.Model(entry, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def keras_transformer() -> Any:
    """Embeddings, a layer of attention with its two products, and a head."""
    layers = tf.keras.layers
    entry = tf.keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(entry) + layers.Embedding(6, 8)(tf.range(6))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))
    return tf.keras.Model(entry, layers.Dense(5)(x[:, 0]))


KERAS: dict[str, tuple[Callable[[], Any], Any]] = {
    "resnet": (keras_resnet, np.linspace(-1, 1, 2 * 16 * 16 * 3, dtype="f").reshape(2, 16, 16, 3)),
    "transformer": (keras_transformer, np.arange(12).reshape(2, 6)),
}


def in_keras(name: str, *, eagerly: bool, training: bool = True) -> Prepare:
    """``fit`` or ``predict``, and the weights."""
    build, data = KERAS[name]

    def prepare() -> Run:
        tf.keras.utils.set_random_seed(0)
        model = build()
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=eagerly)
        return lambda: fit(model) if training else [model.predict(data, verbose=0)]

    def fit(model: Any) -> Arrays:
        model.fit(data, np.array([0, 1]), verbose=0)
        return list(model.get_weights())

    return prepare


def in_a_session() -> Run:
    """A convolution, a product and Adam, with their initializers."""
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(1)
        x = tf1.placeholder(tf.float32, [None, 8, 8, 3])
        w, v, b = (
            tf1.get_variable(n, s) for n, s in (("w", [3, 3, 3, 4]), ("v", [4, 3]), ("b", [3]))
        )
        h = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME")), [1, 2])
        loss = tf.reduce_mean(tf.math.log(tf.nn.softmax(h @ v + b) + 0.1))
        step = tf1.train.AdamOptimizer().minimize(loss)
        initialize, data = tf1.global_variables_initializer(), np.ones((2, 8, 8, 3)) / 7

    def run() -> Arrays:
        with tf1.Session(graph=graph) as session:
            session.run(initialize)
            losses = [session.run([loss, step], {x: data})[0] for _ in range(2)]
            return [np.array(losses), *session.run([w, v, b])]

    return run


PROGRAMS: dict[str, Prepare] = {
    "resnet, training": in_torch(resnet, training=True),
    "timm's resnet": in_torch(resnet_timm, training=False),
    "bert, training": in_torch(models.bert, training=True),
    "gpt2": in_torch(models.gpt2, training=False),
    "gpt2, training": in_torch(models.gpt2, training=True),
    "keras resnet, fit": in_keras("resnet", eagerly=False),
    "keras transformer, fit": in_keras("transformer", eagerly=False),
    "keras transformer, eager fit": in_keras("transformer", eagerly=True),
    "keras transformer, predict": in_keras("transformer", eagerly=False, training=False),
    "session": in_a_session,
}

RECORDED_BY_THE_RUNTIME = {
    "keras resnet, fit",
    "keras transformer, fit",
    "keras transformer, predict",
    "session",
}
"""Programs whose operators are timed by TensorFlow's runtime."""

NOT_RECORDED = {
    *("Shape", "ShapeN", "Size", "BroadcastGradientArgs", "IteratorGetNext"),
    *("Reshape", "Squeeze", "ExpandDims", "Identity", "IdentityN", "StopGradient"),
}
"""Kernels that run at once or asynchronously, without a record (TensorFlow 2.21)."""

FOLDED = {
    *(
        "AddV2",
        "Cast",
        "ConcatV2",
        "Fill",
        "FloorMod",
        "InvertPermutation",
        "Range",
        "StridedSlice",
    ),
    "Sub",
}
"""Operators that are computed from constants and shapes once, when a graph is optimized."""


@pytest.fixture
def plain_graphs() -> Iterator[None]:
    """No graph optimizer, which fuses less where there are routines between operators.

    What oneDNN fuses in the runtime stays; only ``TF_ENABLE_ONEDNN_OPTS=0`` before the import of
    TensorFlow switches it off. With it, 4 of 18 weights of the Keras ResNet differed by 1e-9 after
    a fit under ``flops``, whose routines had come between; without it none did (2.21).
    """
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    yield
    tf.config.optimizer.set_experimental_options({name: before})


FUSED = {"keras resnet, fit"}
"""Programs of which oneDNN fuses operators in the runtime, where no routines come between."""

WITHOUT_ONEDNN = """
import numpy, amanda, tensorflow as tf
from tests.tools.test_models import PROGRAMS, tools
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
for name in sorted(NAMES):
    plain = PROGRAMS[name]()()
    run = PROGRAMS[name]()
    with amanda.apply(*tools().values()):
        watched = run()
    assert len(plain) == len(watched)
    assert all(numpy.array_equal(a, b) for a, b in zip(plain, watched, strict=True)), name
"""


def test_fused_programs_are_bit_identical_without_fusion() -> None:
    """Without oneDNN's fusions, which only the environment switches off, every bit is the same."""
    code = WITHOUT_ONEDNN.replace("NAMES", repr(FUSED))
    done = run_python("-c", code, env={"TF_ENABLE_ONEDNN_OPTS": "0"})
    assert done.returncode == 0, done.stderr


def tools() -> dict[str, Any]:
    """One of each."""
    options: dict[str, dict[str, Any]] = {"nan": {"action": "record"}}
    return {name: amanda.tools.load(name)(**options.get(name, {})) for name in TOOLS}


def check_schema(name: str, tool: Any) -> Sequence[dict[str, Any]]:
    """The common form, printed and written without a complaint; the rows."""
    result = tool.result()
    assert set(result) >= {"tool", "schema", "namespaces", "summary", "ops"}
    assert len(result["namespaces"]) >= 1, name
    rows: list[dict[str, Any]] = result["ops"]
    assert all(row.keys() >= COMMON for row in rows), name
    tool.print_summary(io.StringIO())
    return rows


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_tools_on_a_model(name: str, tmp_path: Path) -> None:
    """Bit-identical results; nothing unknown, a line for each operator, figures that agree."""
    plain = PROGRAMS[name]()()
    run, found = PROGRAMS[name](), tools()
    with amanda.apply(*found.values()):
        watched = run()
    assert len(plain) == len(watched)
    for one, other in zip(plain, watched, strict=True):
        assert np.allclose(one, other, 1e-5, 1e-7) if name in FUSED else np.array_equal(one, other)
    rows = {key: check_schema(key, tool) for key, tool in found.items()}
    for key, tool in found.items():
        assert all(path.exists() for path in tool.write_files(tmp_path, key))

    is_training = "training" in name or "fit" in name or name == "session"
    flops = found["flops"].summary()
    assert flops["unknown_ops"] == {}
    assert flops["flops"] > 0
    assert flops["params"] > 0
    assert (flops["flops_backward"] > 0) == is_training
    assert found["nan"].summary()["first"] is None
    # Each line is the user's: a file that is there.
    sources = {row["source"] for row in rows["trace"] if row["direction"] == "forward"}
    assert all(Path(source.rpartition(":")[0]).exists() for source in sources)
    executions = {row["id"]: row["executions"] for row in rows["count"] if row["executions"]}
    # What was recorded of an operator is each of its executions. In a graph, one whose result
    # nothing needs counts none; the runtime executes some of them if no graph optimizer drops them.
    calls = {row["id"]: row["calls"] for row in rows["profile"] if row["id"] in executions}
    assert calls
    assert calls == {op_id: executions[op_id] for op_id in calls}
    absent = [row for row in rows["count"] if row["id"] in executions.keys() - calls.keys()]
    if name in RECORDED_BY_THE_RUNTIME:
        assert {row["name"] for row in absent} <= NOT_RECORDED | FOLDED
        work = {row["id"] for row in rows["flops"] if row["flops"]}
        assert work & executions.keys()
        assert work & executions.keys() <= calls.keys()
    else:
        assert not absent
    assert found["stats"].summary()["not_finite"] == []
    for tool in ("dump", "diff"):
        kinds = {"activations", "gradients"} if is_training else {"activations"}
        assert set(found[tool].summary()["kinds"]) == kinds


def test_rows_have_the_same_keys_in_both_frameworks() -> None:
    """Whoever reads a result need not know where it comes from."""
    keys: dict[str, list[set[tuple[str, ...]]]] = {name: [] for name in TOOLS}
    for name in ("bert, training", "keras resnet, fit", "session"):
        run, found = PROGRAMS[name](), tools()
        with amanda.apply(*found.values()):
            run()
        for key, tool in found.items():
            keys[key].append({tuple(sorted(row)) for row in tool.op_rows()})
            keys[key].append({tuple(sorted(tool.summary()))})
    for name, of in keys.items():
        assert of[0] == of[2] == of[4], name
        assert of[1] == of[3] == of[5], name
