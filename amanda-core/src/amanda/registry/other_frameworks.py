"""Frameworks that no driver sees, and Keras where it computes with one of them.

No framework is imported: what the program has imported is looked up, and what Keras is told by its
environment variable and its file of settings is read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from amanda.errors import FileError
from amanda.files import read_json

OTHERS = {"jax": "JAX"}
"""Frameworks for which there is no driver: name of the module to name of the framework."""

_SEEN = ("tensorflow", "torch")
"""Backends of Keras 3 that have drivers."""

_REMEDY = f"set KERAS_BACKEND={' or KERAS_BACKEND='.join(_SEEN)}"


def unseen_backend() -> str:
    """The backend of the Keras that is imported, if no driver sees it; else ""."""
    config = getattr(sys.modules.get("keras"), "config", None)
    backend = getattr(config, "backend", None)
    found = backend() if callable(backend) else ""
    return found if isinstance(found, str) and found not in _SEEN else ""


def configured_backend() -> str:
    """The backend that Keras would use if it were imported now, if no driver sees it; else ""."""
    found: object = os.environ.get("KERAS_BACKEND")
    if not found:
        home = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
        try:
            found = read_json(Path(home, "keras.json")).get("backend", "")
        except (FileError, AttributeError):
            found = ""
    return found if isinstance(found, str) and found not in _SEEN else ""


def explain_backend(backend: str) -> str:
    """The message that Keras is not seen on this backend, and what to do."""
    name = OTHERS.get(backend, backend)
    return f"all of Keras, which computes with {name}: no driver sees {name}; {_REMEDY}"


def explain_others(sees_ops: bool) -> list[str]:
    """A message for each framework that the program has imported and no driver sees.

    Args:
        sees_ops: whether operators were seen: then another framework that is imported as well may
            be unused, as TensorFlow's converters import JAX.
    """
    backend = unseen_backend()
    if backend:
        return [explain_backend(backend)]
    found = [name for module, name in OTHERS.items() if module in sys.modules]
    return [] if sees_ops else [f"all of {name}: no driver sees {name}" for name in found]
