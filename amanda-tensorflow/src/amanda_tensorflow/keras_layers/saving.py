"""Warns where a program saves a model under a tool, without what the tool changes.

::

    install()
    ...                             # Keras is imported
    model.save(path)                # warns under a tool with export_model(), once for each tool
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.engine.frames import warn_of_lost_changes
from amanda.python.patching import named_as
from amanda_tensorflow.keras_layers.base_classes import BaseClass


def telling(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    """The patch of functions that save a model."""

    def save(*args: Any, **kwargs: Any) -> Any:
        warn_of_lost_changes(("keras", "tf_keras"))
        return vanilla(*args, **kwargs)

    return named_as(vanilla, save)


# Keras imports the module of tf.saved_model anew, whose patch export() then does not call (3.15).
_METHODS = [
    BaseClass("models", "Model", {"keras": name, "tf_keras": name}, telling)
    for name in ("save", "export")
]


def install() -> None:
    """Have the models of Keras warn from now on; harmless when called twice."""
    for method in _METHODS:
        method.install()
