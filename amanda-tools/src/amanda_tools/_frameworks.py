"""Frameworks that the program computes with and no driver instruments, Keras' backends among them.

No framework is imported: the modules that the program has imported are looked up, and Keras'
environment variable is read. Keras belongs to no driver, since it computes with any of several
frameworks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection
from typing import Any

DRIVERS = {"torch": "amanda-torch", "tensorflow": "amanda-tensorflow"}
"""The distributions with Amanda's own drivers, by the module of the framework."""

_OTHERS = {"jax": "JAX"}
"""Frameworks without a driver of Amanda's own, module to name; others may have published one."""

_REMEDY = "set " + " or ".join(f"KERAS_BACKEND={name}" for name in sorted(DRIVERS))


def explain_unseen(frameworks: Collection[str]) -> list[str]:
    """Name the frameworks that compute in this process and that no driver instruments.

    Args:
        frameworks: the modules that usable drivers instrument.

    Returns:
        One phrase each. Beside an imported module of `frameworks` another one may be unused, as
        TensorFlow's converters import JAX: then it is named only as a backend of Keras.
    """
    if backend := _unseen(_running_backend(), frameworks):
        return [explain_backend(backend)]
    if any(name in sys.modules for name in frameworks):
        return []
    unseen = [name for name in _OTHERS if name in sys.modules and name not in frameworks]
    return [f"all of {_OTHERS[name]}: no driver sees {_OTHERS[name]}" for name in unseen]


def configured_backend(frameworks: Collection[str]) -> str:
    """Return the backend that ``KERAS_BACKEND`` sets for an installed Keras, if no driver sees it.

    Args:
        frameworks: the modules that usable drivers instrument.

    Returns:
        The backend's module; "" if there is a driver or no Keras.
    """
    if importlib.util.find_spec("keras") is None:
        return ""
    return _unseen(os.environ.get("KERAS_BACKEND", ""), frameworks)


def explain_backend(backend: str) -> str:
    """Return the message that Keras computes with `backend` unseen, and the remedy."""
    name = _OTHERS.get(backend, backend)
    return f"all of Keras, which computes with {name}: no driver sees {name}; {_REMEDY}"


def keras_layer_class() -> Any:
    """Return the class of Keras' layers; None before Keras is imported."""
    return getattr(sys.modules.get("keras.layers"), "Layer", None)


def is_keras(module: Any) -> bool:
    """True if a module is a layer of Keras."""
    layer = keras_layer_class()
    return layer is not None and isinstance(module, layer)


def _running_backend() -> object:
    """Return the backend of the Keras that is imported; "" without one."""
    config = getattr(sys.modules.get("keras"), "config", None)
    backend = getattr(config, "backend", None)
    return backend() if callable(backend) else ""


def _unseen(backend: object, frameworks: Collection[str]) -> str:
    """Return `backend`, if it is the name of a framework without a driver; else ""."""
    if not isinstance(backend, str) or backend in DRIVERS or backend in frameworks:
        return ""
    return backend
