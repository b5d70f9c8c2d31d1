"""Samples and tokens of models of Keras, on the backend that Keras has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import amanda
from amanda_tools.flops import FlopsTool

layers = keras.layers
BATCH, STEPS, WIDTH = 4, 5, 6
"""Samples of a batch, positions of a sequence, and features of each."""


def numbers(*sizes: int) -> Any:
    return np.random.default_rng(0).random(sizes, dtype="float32")


def tokens(samples: int) -> Any:
    return np.random.default_rng(0).integers(0, 9, (samples, STEPS))


class Positions(layers.Layer):  # type: ignore[misc]
    """Embeds positions first, which are as many in each batch, and then tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.words = layers.Embedding(STEPS, WIDTH), layers.Embedding(9, WIDTH)

    def call(self, x: Any) -> Any:
        places = self.places(keras.ops.arange(STEPS))
        return self.words(x) + places


def attention() -> Any:
    inputs = keras.Input((STEPS,), dtype="int32")
    x = layers.Embedding(9, WIDTH)(inputs)
    x = layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def two_inputs() -> Any:
    inputs = {"a": keras.Input((WIDTH,), name="a"), "b": keras.Input((3,), name="b")}
    parts = [layers.Dense(4)(one) for one in inputs.values()]
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(parts)))


def sequential(*shape: int, parts: Callable[[], list[Any]], static: bool = False) -> Any:
    batch = BATCH if static else None
    return keras.Sequential([layers.Input(shape, batch_size=batch), *parts(), layers.Dense(2)])


def recurrent(kind: str, static: bool = False, **options: Any) -> Callable[[], Any]:
    def parts() -> list[Any]:
        return [getattr(layers, kind)(3, **options)]

    return lambda: sequential(STEPS, WIDTH, parts=parts, static=static)


def sequences(samples: int) -> Any:
    return numbers(samples, STEPS, WIDTH)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "dense": (
        lambda: sequential(WIDTH, parts=lambda: [layers.Dense(4)]),
        lambda n: numbers(n, WIDTH),
    ),
    "convolution": (
        lambda: sequential(6, 6, 3, parts=lambda: [layers.Conv2D(2, 3), layers.Flatten()]),
        lambda n: numbers(n, 6, 6, 3),
    ),
    "attention": (attention, tokens),
    "positions first": (
        lambda: sequential(STEPS, parts=lambda: [Positions(), layers.Flatten()]),
        tokens,
    ),
    "two inputs": (two_inputs, lambda n: {"a": numbers(n, WIDTH), "b": numbers(n, 3)}),
    "lstm": (recurrent("LSTM"), sequences),
    "lstm, static": (recurrent("LSTM", static=True), sequences),
    "lstm, unrolled": (recurrent("LSTM", unroll=True), sequences),
    "lstm, stateful": (recurrent("LSTM", static=True, stateful=True), sequences),
    "gru": (recurrent("GRU"), sequences),
    "gru, static": (recurrent("GRU", static=True), sequences),
    "tokens into an lstm": (
        lambda: sequential(
            STEPS, parts=lambda: [layers.Embedding(9, WIDTH, mask_zero=True), layers.LSTM(3)]
        ),
        tokens,
    ),
    "both directions": (
        lambda: sequential(STEPS, WIDTH, parts=lambda: [layers.Bidirectional(layers.LSTM(3))]),
        sequences,
    ),
}

WAYS: dict[str, Callable[[Any, Any, Any], object]] = {
    "fit": lambda net, x, y: net.fit(x, y, BATCH, verbose=0),
    "evaluate": lambda net, x, y: net.evaluate(x, y, BATCH, verbose=0),
    "predict": lambda net, x, y: net.predict(x, BATCH, verbose=0),
    "train_on_batch": lambda net, x, y: [net.train_on_batch(*one) for one in batches(x, y)],
    "test_on_batch": lambda net, x, y: [net.test_on_batch(*one) for one in batches(x, y)],
}


def batches(x: Any, y: Any) -> list[tuple[Any, Any]]:
    """The data, batch by batch."""

    def part(begin: int) -> tuple[Any, Any]:
        end = begin + BATCH
        some = {k: v[begin:end] for k, v in x.items()} if isinstance(x, dict) else x[begin:end]
        return some, y[begin:end]

    return [part(begin) for begin in range(0, len(y), BATCH)]


def check(name: str, way: str | Callable[[Any, Any, Any], object], samples: int) -> None:
    """So many samples are counted, in steps of a batch, and the tokens of those that have them."""
    build, data = MODELS[name]
    net, x, tool = build(), data(samples), FlopsTool()
    net.compile("sgd", "mse", jit_compile=False)
    run = WAYS[way] if isinstance(way, str) else way
    with amanda.apply(tool):
        run(net, x, numbers(samples, 2))
    sizes = [min(BATCH, samples - begin) for begin in range(0, samples, BATCH)]
    series = list(tool.figures_of_steps().values())
    assert [step["samples"] for step in series] == sizes, (name, way, series)
    assert tool.result()["summary"]["batch"] == BATCH
    if data is tokens:
        assert [step["tokens"] for step in series] == [STEPS * size for size in sizes], (name, way)


def main() -> None:
    """Check the models in ``fit``, and all ways of Keras on some, on the backend of PyTorch."""
    for name in MODELS:
        # PyTorch refuses the gradients of stateful layers, whose states Keras changes in place.
        check(name, "fit" if name != "lstm, stateful" else "predict", 8)
    for way in WAYS:
        for name in "positions first", "lstm":
            check(name, way, 8)


if __name__ == "__main__":
    main()
