"""A transformer of Keras, built and trained, and its summary as JSON: run on one backend."""

from __future__ import annotations

import json
import sys
from typing import Any

import keras
import numpy as np
from keras import layers

import amanda

TOKENS = np.arange(24).reshape(4, 6) % 11


class Block(layers.Layer):  # type: ignore[misc]
    """Attention and two layers after it, with residual connections."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, width // 2, name="attention")
        self.norm = layers.LayerNormalization(name="norm")
        up, down = layers.Dense(4 * width, "relu", name="up"), layers.Dense(width, name="down")
        self.feed = keras.Sequential([up, down], name="feed")

    def call(self, x: Any) -> Any:
        x = self.norm(x + self.attention(x, x))
        return x + self.feed(x)


def build() -> Any:
    """The model."""
    tokens = keras.Input((6,))
    x = layers.Embedding(11, 8, name="embed")(tokens)
    for number in range(2):
        x = Block(8, name=f"block{number}")(x)
    x = layers.Dropout(0.1, name="dropout")(x)
    x = layers.BatchNormalization(name="batch")(layers.GlobalAveragePooling1D(name="pool")(x))
    return keras.Model(tokens, layers.Dense(3, name="head")(x), name="net")


def rows_of(run: Any) -> list[dict[str, Any]]:
    """The rows of a program, in which all is built."""
    tool = amanda.tools.load("summary")()
    with amanda.apply(tool):
        run()
    found: list[dict[str, Any]] = json.loads(json.dumps(tool.result()["modules"]))
    return found


def fit() -> Any:
    """Build the model, and train it for two steps."""
    model = build()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(np.tile(TOKENS, (2, 1)), np.arange(8) % 3, batch_size=4, verbose=0)
    return model


def check(model: Any, rows: list[dict[str, Any]]) -> None:
    """Parameters and shapes are those of Keras' own summary, and operations the analytic ones."""
    found = {row["path"]: row for row in rows}
    assert found["net"]["parameters"] == model.count_params()
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert found["net"]["trainable"] == trainable
    for layer in model.layers:
        row = found[f"net/{layer.name}"]
        assert row["parameters"] == layer.count_params()
        assert row["output"][1:] == list(layer.output.shape[1:])
        assert row["calls"] == (not isinstance(layer, layers.InputLayer))
    block = 24 * (4 * 8 * 8 + 2 * 8 * 32) + 4 * 2 * 2 * 6 * 6 * 4
    assert found["net"]["macs"] == 2 * block + 4 * 8 * 3
    assert found["net/block1/attention"]["macs"] == block - 24 * 2 * 8 * 32
    assert found["net/block0/feed/up"]["output"] == [4, 6, 32]
    assert [row["depth"] for row in rows[:4]] == [0, 1, 1, 1]
    assert [row["model"] for row in rows] == ["net"] * len(rows)


def check_steps() -> None:
    """Operations of each of two steps are those of a count by hand, twice as many backward.

    PyTorch's fused attention computes a part of its forward pass again there.
    """
    tool = amanda.tools.load("flops")()
    with amanda.apply(tool):
        fit()
    summary = tool.result()["summary"]
    macs = 2 * (24 * (4 * 8 * 8 + 2 * 8 * 32) + 4 * 2 * 2 * 6 * 6 * 4) + 4 * 8 * 3
    again = 2 * 4 * 2 * 6 * 6 * 4 if keras.config.backend() == "torch" else 0
    step = {"flops": 2 * macs, "flops_backward": 4 * macs + 2 * again, "macs": macs}
    step |= {"samples": 4, "tokens": TOKENS.size}
    assert summary["steps"] == 2, summary["steps"]
    assert summary["per_step"] == step, (summary["per_step"], step)


def check_attributes() -> None:
    """Canonical attributes of layers are those of any backend, under the layers' names."""
    images = keras.Input((9, 9, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same", name="strided")(images)
    x = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    x = layers.MaxPooling2D(2, name="pooled")(x)
    network = keras.Model(images, layers.Softmax(axis=-1, name="shares")(x))
    tool = amanda.tools.load("count")()
    with amanda.apply(tool):
        network(np.ones((2, 9, 9, 3), "float32"))
    types = ("conv2d", "max_pool2d", "softmax")
    found = {
        row["module"].rpartition("/")[2]: row["attributes"]
        for row in tool.op_rows()
        if row["type"] in types
    }
    plain = {"kernel_size": [3, 3], "padding": [[1, 1], [1, 1]], "dilation": [1, 1]}
    pooling = {"kernel_size": [2, 2], "padding": [[0, 0], [0, 0]], "dilation": [1, 1]}
    assert found == {
        "strided": {**plain, "stride": [2, 2], "groups": 1},
        "depthwise": {**plain, "stride": [1, 1], "groups": 4},
        "pooled": {**pooling, "stride": [2, 2], "ceil_mode": False},
        "shares": {"axis": 3},
    }, found


def main() -> None:
    """Check the model where it is called and where it is trained."""
    keras.utils.set_random_seed(0)
    model = build()
    check(model, rows_of(lambda: model(TOKENS)))
    check(model, amanda.summary(model, TOKENS).modules)
    trained: list[Any] = []
    rows = rows_of(lambda: trained.append(fit()))
    check(trained[0], rows)
    check_steps()
    check_attributes()
    assert keras.layers.Layer.__call__.__module__.startswith("keras")


if __name__ == "__main__":
    main()
    sys.exit()
