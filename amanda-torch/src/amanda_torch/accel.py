"""amanda-torch-accel, the optional extension in C++: whether it is used, and its module.

Where it is missing or refused, Python code does the same::

    if not refusal():
        native = load()
"""

from __future__ import annotations

import functools
from typing import Any

from amanda.interface.compiled_extension import Extension
from amanda_torch.driver import LoadedDriver

EXTENSION = Extension("amanda-torch", "amanda_torch_accel", interface=21, newest_python=(3, 14))


def refusal() -> str:
    """The reason not to load the extension, in one line; "" for none."""
    return EXTENSION.refusal(LoadedDriver.untested_version())


@functools.cache
def load() -> Any:
    """The extension.

    Raises:
        ImportError: it is not installed, or was built for another Python or PyTorch.
    """
    return EXTENSION.load()
