"""Tables and charts of tools show the operators of a model that Keras builds and trains."""

from __future__ import annotations

import keras
import numpy as np

from tests.tools.phase_support import check, run_all


def fit() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    model.fit(np.ones((4, 4), "float32"), np.arange(4) % 2, batch_size=2, verbose=0)


def test_tables_and_charts_show_operators_of_the_model() -> None:
    """What the path goes through in the loop of ``fit`` included."""
    found = run_all(fit, ["count", "path", "stats", "unmapped"])
    for name in found:
        check(found, name)
