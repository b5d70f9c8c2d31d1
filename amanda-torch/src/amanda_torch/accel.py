"""amanda-torch-accel, the optional extension in C++: whether it is used, and its module.

Where it is missing or refused, Python code does the same::

    if not refusal():
        native = load()
"""

from __future__ import annotations

import functools
import importlib
import platform
import sys
import sysconfig
from typing import Any

from amanda.interface.install_command import install_command
from amanda_torch import _internals
from amanda_torch.driver import LoadedDriver

_NAME, _PACKAGE = "amanda-torch-accel", "amanda_torch_accel"

_INTERFACE = 21
"""The ``VERSION`` that the package must have."""

_PYTHONS = (3, 11), (3, 14)
"""The oldest and the newest CPython that the extension was tested with."""


def refusal() -> str:
    """The reason not to load the extension, in one line; "" for none."""
    if untested := _untested_python() or LoadedDriver.untested_version():
        return f"{_NAME} was not tested with {untested}"
    try:
        package = importlib.import_module(_PACKAGE)
    except ImportError:
        command = install_command(_NAME, "--no-build-isolation --no-binary :all: ")
        return f"{_NAME} is not installed; try: {command}"
    if package.VERSION != _INTERFACE:
        return f"{_NAME} and amanda-torch are of different releases; reinstall both"
    try:
        package.load()
    except ImportError as error:
        return f"the extension of {_NAME} cannot be loaded: {error}"
    return ""


def _untested_python() -> str:
    """The name of this Python; "" for a tested one: on Linux, with the GIL, without a JIT."""
    name, (oldest, newest) = platform.python_implementation(), _PYTHONS
    is_tested = name == "CPython" and oldest <= sys.version_info[:2] <= newest
    about = " without the GIL" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    about += " with its JIT" if _internals.has_jit() else ""
    if is_tested and not about and sys.platform == "linux":
        return ""
    return f"this {name} {platform.python_version()}{about} on {sys.platform}"


@functools.cache
def load() -> Any:
    """The extension.

    Raises:
        ImportError: it is not installed, or was built for another Python or PyTorch.
    """
    return importlib.import_module(_PACKAGE).load()
