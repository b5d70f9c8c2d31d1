"""The callback of Keras: what it prints and writes, and that a training is as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import amanda
from amanda.errors import UnknownNameError
from amanda.state import LIVE_SCOPES
from amanda_tools.keras import Callback

X = np.random.default_rng(0).random((20, 8), "float32")
STEP = 2 * 8 * (8 * 16 + 16 * 3)
"""Operations of a batch of eight, forward."""


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    parts = [layers.Dense(16, name="a"), layers.Dropout(0.5), layers.Dense(3, name="b")]
    model = keras.Sequential([keras.Input((8,)), *parts], name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


def fit(model: keras.Model, *callbacks: Any) -> list[Any]:
    """The history of two epochs of two steps with validation, and the weights after them."""
    history = model.fit(
        X, np.arange(20) % 3, 8, 2, verbose=0, validation_split=0.2, callbacks=callbacks
    )
    return [*history.history.values(), *(weights.tolist() for weights in model.get_weights())]


def test_a_training_is_the_same_with_callbacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a function that is compiled before the second training, too; each training has results of
    its own, printed and written as `amanda run` does, and the next one runs without tools."""
    vanilla, watched = build(), build()
    given = "flops,stats:tensors=gradients,tensorboard=true"
    callback = Callback(given, output=tmp_path, html=True)
    for _ in range(2):
        assert fit(vanilla) == fit(watched, callback, Callback("count"))
        flops = json.loads((tmp_path / "flops.json").read_text())["summary"]
        assert flops == callback.tools["flops"].result()["summary"]  # type: ignore[attr-defined]
        assert (flops["per_step"]["flops"], flops["steps"], flops["not_seen"]) == (STEP, 4, {})
        printed = capsys.readouterr().out
        assert "flops by module" in printed
        assert "amanda: wrote flops.json, stats.json" in printed
        assert printed.count("ops seen") == 2
    assert "amanda_tools.keras.Callback" in (tmp_path / "report.html").read_text()
    found = b"".join(file.read_bytes() for file in tmp_path.glob("stats.tensorboard/*"))
    assert b"net/a/kernel" in found
    assert fit(vanilla) == fit(watched)
    assert not capsys.readouterr().out


def test_a_training_that_fails_leaves_no_scope(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it fails, or is interrupted: its results are delivered, and the callbacks of a
    training around it go on."""
    scopes, callback = [], Callback("flops")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def train(*_: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            fit(build(), callback, keras.callbacks.LambdaCallback(on_epoch_end=fail))
        scopes.append(len(LIVE_SCOPES))
        assert callback.tools["flops"].result()["summary"]["steps"] == 2  # type: ignore[attr-defined]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(build(), Callback("count"), keras.callbacks.LambdaCallback(on_epoch_end=train))
    assert (scopes, LIVE_SCOPES) == ([1], [])
    assert "flops by module" in capsys.readouterr().out


def test_mistakes_are_refused_when_the_callback_is_made() -> None:
    """Before anything trains, with the words of `amanda run`."""
    with pytest.raises(UnknownNameError, match="no tool named 'flpos'; did you mean flops"):
        Callback("flpos")
    with pytest.raises(ValueError, match="tool flops has no option 'dept'"):
        Callback("flops:dept=1")
    with pytest.raises(ValueError, match="give a folder"):
        Callback("dump")


def test_a_built_model_needs_no_input() -> None:
    """``amanda.summary`` and ``amanda.flops`` take its own input shape, with 1 for unknown sizes,
    and say so where a model fails with it; shapes have the dtypes that it declares."""
    tokens, mask = keras.Input((5,), dtype="int32", name="tokens"), keras.Input((5,), name="mask")
    x = keras.layers.Embedding(9, 4)(tokens) * mask[..., None]
    model = keras.Model({"tokens": tokens, "mask": mask}, keras.layers.Dense(3, name="head")(x))
    assert amanda.flops(model).flops == 2 * 5 * 4 * 3
    assert amanda.summary(model).modules[0]["output"] == [1, 5, 3]
    assert amanda.flops(model, [(2, 5), (2, 5)]).macs == 2 * 5 * 4 * 3
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    assert amanda.flops(unbuilt, (2, 4)).flops == 2 * 2 * 4 * 3
    images = keras.Sequential([keras.Input((None, None, 3)), keras.layers.Conv2D(2, 3)])
    with pytest.raises(ValueError, match=r"zeros of its input shape, unknown sizes 1: .*negative"):
        amanda.summary(images)
