"""An optional compiled extension, with which a driver notices operators faster.

An extension is a distribution of its own, so that the driver's stays pure Python. Its package has a
``VERSION`` and a function ``load()``, whose ``ImportError`` says what to do. The driver describes
what it needs of it, and does without where there is a reason against it::

    EXTENSION = Extension("amanda-torch", "amanda_torch_accel", interface=10, newest_python=(3, 14))
    reason = EXTENSION.refusal(LoadedDriver.untested_version())
    native = None if reason else EXTENSION.load()

Which of several ways a driver takes is up to an environment variable, read by :func:`chosen`.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import attrs

from amanda.errors import CoverageWarning
from amanda.interface.install_command import install_command
from amanda.python import _internals

_OLDEST_PYTHON = (3, 11)


@attrs.frozen
class Extension:
    """A driver's optional compiled extension, and the conditions under which it is used.

    Attributes:
        driver: the driver's distribution.
        package: the Python package that the extension's distribution installs.
        interface: the ``VERSION`` that the package has to have.
        newest_python: the newest CPython that it was tested with; the oldest is 3.11.
    """

    driver: str
    package: str
    interface: int
    newest_python: tuple[int, int]

    @property
    def distribution(self) -> str:
        """The distribution that installs it, by its name for pip."""
        return self.package.replace("_", "-")

    def refusal(self, untested: str = "") -> str:
        """The reason not to load the extension, as far as it is known before loading; "" for none.

        Args:
            untested: the framework with its version, if it was not tested with that.
        """
        return self._wrong_python() or self._wrong_machine(untested) or self._wrong_package()

    def load(self) -> Any:
        """The extension.

        Raises:
            ImportError: its package is not installed, or was built without it.
        """
        return importlib.import_module(self.package).load()

    def _wrong_python(self) -> str:
        version, implementation = sys.version_info[:2], platform.python_implementation()
        if implementation != "CPython":
            return f"{self.distribution} needs CPython, and this is {implementation}"
        if not _internals.has_gil():
            return f"{self.distribution} needs the GIL, and this is a free-threaded build of Python"
        if _internals.has_jit():
            return f"the JIT of this Python may copy what {self.distribution} replaces"
        if not _OLDEST_PYTHON <= version <= self.newest_python:
            return f"{self.distribution} was not tested with Python {version[0]}.{version[1]}"
        return ""

    def _wrong_machine(self, untested: str) -> str:
        if sys.platform != "linux":
            return f"{self.distribution} was not tested on {sys.platform}"
        return f"{self.distribution} was not tested with {untested}" if untested else ""

    def _wrong_package(self) -> str:
        try:
            package = importlib.import_module(self.package)
        except ImportError:
            command = install_command(self.distribution, "--no-build-isolation --no-binary :all: ")
            return f"{self.distribution} is not installed; try: {command}"
        if self.interface != package.VERSION:
            return (
                f"{self.distribution} and {self.driver} are of different releases; reinstall both"
            )
        try:
            package.load()
        except ImportError as error:
            return f"the extension of {self.distribution} cannot be loaded: {error}"
        return ""


def chosen(variable: str, names: Sequence[str]) -> str:
    """Return the one of `names` that an environment variable asks for; the first is the default.

    Another value counts as the default, with a :class:`~amanda.errors.CoverageWarning`.
    """
    default = names[0]
    name = os.environ.get(variable, "") or default
    if name in names:
        return name
    warnings.warn(
        f"{variable} is {name!r}, not one of {', '.join(names)}: {default} is used",
        CoverageWarning,
        stacklevel=3,
    )
    return default


def mistake(variable: str, names: Sequence[str]) -> str:
    """The message if an environment variable is set to none of `names`; otherwise ""."""
    name = os.environ.get(variable, "") if variable else ""
    return (
        f"{variable}={name} is not one of {', '.join(names)}" if name and name not in names else ""
    )
