"""FLOPs of one step of a Keras transformer: the figure of a count by hand."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import amanda
from amanda_tools.flops import FlopsTool

BATCH, TOKENS, WIDTH, HEADS, INNER, CLASSES = 4, 8, 16, 2, 32, 3


def transformer() -> keras.Model:
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(20, WIDTH)(tokens)
    for _ in range(2):
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, flash_attention=False)
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        inner = keras.layers.Dense(INNER, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(WIDTH)(inner))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(x))


def forward() -> int:
    """Twice the multiply-accumulates of a batch."""
    projections = 4 * TOKENS * WIDTH * WIDTH
    scores_and_values = 2 * TOKENS * TOKENS * WIDTH
    dense = 2 * TOKENS * WIDTH * INNER
    return 2 * BATCH * (2 * (projections + scores_and_values + dense) + WIDTH * CLASSES)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_of_fit_has_the_figure_of_a_count_by_hand(steps: int) -> None:
    """Twice as much backward as forward: every factor has a gradient. Building is no part of it."""
    tool = FlopsTool()
    labels = keras.ops.arange(BATCH * steps) % CLASSES
    with amanda.apply(tool):
        keras.utils.set_random_seed(0)
        model = transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        tokens = np.random.default_rng(0).integers(0, 20, (BATCH * steps, TOKENS))
        model.fit(tokens, np.asarray(labels), batch_size=BATCH, verbose=0)
    summary = tool.result()["summary"]
    assert summary["steps"] == steps
    step = summary["per_step"]
    assert (step["flops"], step["flops_backward"]) == (forward(), 2 * forward())
    assert summary["flops"] == steps * step["flops"]
    assert summary["phases"]["setup"]["flops"] == 0
