"""Warns where a program saves a model under a tool, without what the tool changes.

::

    install()
    ...                             # Keras is imported
    model.save(path)                # warns under a tool with export_model(), once for each tool
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from amanda.errors import CoverageWarning
from amanda.python.patching import named_as
from amanda.state import STATE
from amanda_tensorflow.keras_layers.base_classes import BaseClass

_TOLD = weakref.WeakSet[Any]()


def telling(vanilla: Callable[..., Any]) -> Callable[..., Any]:
    """The patch of functions that save a model."""

    def save(*args: Any, **kwargs: Any) -> Any:
        tools = [tool for scope in STATE.scopes for tool in scope.tools]
        new = [tool for tool in tools if hasattr(tool, "export_model") and tool not in _TOLD]
        if new:
            _TOLD.update(new)
            names = ", ".join(type(tool).__name__ for tool in new)
            warnings.warn(
                f"the model is saved without the changes of {names}; "
                "tool.export_model(model, example_inputs, path) writes it with them",
                CoverageWarning,
                stacklevel=2,
            )
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
