"""The contract's model, of Keras: imported where a test needs it, as Keras takes seconds."""

from __future__ import annotations

from typing import Any

import keras

from amanda.testing.framework import Framework, Values


class Linear(keras.layers.Layer):  # type: ignore[misc]
    """One product with a constant weight."""

    def __init__(self, framework: Framework, weight: Values, name: str) -> None:
        super().__init__(name=name, dtype="float64")
        self.framework = framework
        self.weight = weight

    def call(self, x: Any) -> Any:
        return self.framework.linear(x, self.framework.tensor(self.weight))


class Model(keras.layers.Layer):  # type: ignore[misc]
    """``first`` and ``second``, several times over."""

    def __init__(self, framework: Framework, weight: Values, calls: int) -> None:
        super().__init__(name="Model", dtype="float64")
        self.first = Linear(framework, weight, "first")
        self.second = Linear(framework, weight, "second")
        self.calls = calls

    def call(self, x: Any) -> Any:
        for _ in range(self.calls):
            x = self.second(self.first(x))
        return x
