"""Environment variables that choose one of several ways of a driver, each by its name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from amanda.errors import CoverageWarning


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
