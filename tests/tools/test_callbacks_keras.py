"""The callback of Keras: what it prints and writes, and that a training is as without it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import amanda
from amanda.state import LIVE_SCOPES
from amanda_tools.keras import Callback

X = np.random.default_rng(0).random((20, 8), "float32")
STEP = 2 * 8 * (8 * 16 + 16 * 3)
"""Operations of a batch of eight, forward."""


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    parts = keras.layers.Dense(16, name="a"), keras.layers.Dropout(0.5), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((8,)), *parts], name="net")
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


def fit(model: keras.Model, *callbacks: Any) -> list[Any]:
    """The history of two epochs of two steps with validation, and the weights after them."""
    options: Any = {"validation_split": 0.2, "verbose": 0, "callbacks": callbacks}
    found = model.fit(X, X[:, :3], 8, 2, **options).history
    return [*found.values(), *(weights.tolist() for weights in model.get_weights())]


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
        assert "amanda: wrote flops.json, stats.json" in printed
        assert (printed.count("flops by module"), printed.count("; tools took ")) == (1, 2)
    assert "amanda_tools.keras.Callback" in (tmp_path / "report.html").read_text()
    assert all(b"net/a/kernel" in p.read_bytes() for p in tmp_path.glob("stats.tensorboard/*"))
    assert fit(vanilla) == fit(watched)
    assert not capsys.readouterr().out


def test_a_training_that_fails_leaves_no_scope(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it fails, or is interrupted: its results are delivered, and the callbacks of a
    training around it go on. Wrong options are refused before. Once the callbacks are gone, fit is
    Keras's own."""
    gc.collect()
    vanilla = keras.Model.fit
    with pytest.raises(ValueError, match="has no option 'dept'"):
        Callback("flops:dept=1")
    scopes, callbacks = [], [Callback("flops")]

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def train(*_: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            fit(build(), *callbacks, keras.callbacks.LambdaCallback(on_epoch_end=fail))
        scopes.append(len(LIVE_SCOPES))
        assert callbacks[0].tools["flops"].result()["summary"]["steps"] == 2  # type: ignore[attr-defined]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(build(), Callback("count"), keras.callbacks.LambdaCallback(on_epoch_end=train))
    assert (scopes, LIVE_SCOPES) == ([1], [])
    assert "flops by module" in capsys.readouterr().out
    assert keras.Model.fit is not vanilla
    callbacks.clear()
    gc.collect()
    assert keras.Model.fit is vanilla


def test_a_built_model_needs_no_input() -> None:
    """``amanda.summary`` and ``amanda.flops`` take its own input shape, with 1 for unknown sizes,
    and say so where it fails; zeros have the dtypes that it declares."""
    tokens, mask = keras.Input((5,), dtype="int32", name="tokens"), keras.Input((5,), name="mask")
    x = keras.layers.Embedding(9, 4)(tokens) * mask[..., None]
    model = keras.Model({"tokens": tokens, "mask": mask}, keras.layers.Dense(3, name="head")(x))
    assert amanda.flops(model).flops == 2 * 5 * 4 * 3
    assert amanda.summary(model).modules[0]["output"] == [1, 5, 3]
    assert amanda.flops(model, [(2, 5), (2, 5)]).macs == 2 * 5 * 4 * 3
    assert amanda.flops(keras.layers.Dense(3), (2, 4)).flops == 2 * 2 * 4 * 3
    images = keras.Sequential([keras.Input((None, None, 3)), keras.layers.Conv2D(2, 3)])
    with pytest.raises(ValueError, match=r"zeros of its input shape, unknown sizes 1: .*negative"):
        amanda.summary(images)
