"""The installed distributions: their entry points and versions.

The plugins of a group, each with the distribution that publishes it::

    points, unreadable = distributions.entry_points("amanda")
    for point in points:
        name, version = distributions.origin(point.dist)

Everything is read through the package ``importlib-metadata``, so that all versions of Python behave
alike: of a field that a distribution lacks, for example, the standard library's module says None in
Python 3.11 and warns in 3.12. Importing the package also puts its finder of distributions in the
place of the standard library's (its ``disable_stdlib_finder()``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import importlib_metadata as metadata

UNKNOWN = "?"
"""The name or version of a distribution whose metadata lack it."""


def entry_points(group: str) -> tuple[list[metadata.EntryPoint], list[str]]:
    """The entry points of a group, of each distribution that can be read.

    Returns:
        The entry points, and a message for each distribution whose ``entry_points.txt`` is
        malformed, whatever groups it has.
    """
    try:
        return list(metadata.entry_points(group=group)), []
    except Exception:
        # One malformed file, of any distribution in the environment, hides all entry points.
        return _readable_entry_points(group)


def _readable_entry_points(group: str) -> tuple[list[metadata.EntryPoint], list[str]]:
    points: dict[str, list[metadata.EntryPoint]] = {}
    unreadable: list[str] = []
    for distribution in metadata.distributions():
        name, version = origin(distribution)
        if name in points:
            # One that is found earlier on sys.path hides the later ones of its name.
            continue
        points[name] = []
        try:
            points[name] = list(distribution.entry_points.select(group=group))
        except Exception as error:
            unreadable.append(
                f"the entry points of {name} {version} cannot be read: "
                f"{type(error).__name__}: {error}"
            )
    return [point for found in points.values() for point in found], unreadable


def origin(distribution: Any) -> tuple[str, str]:
    """The name and the version of a distribution, :data:`UNKNOWN` if its metadata lack one."""
    return _field(distribution, "name"), _field(distribution, "version")


def _field(distribution: Any, name: str) -> str:
    try:
        return str(getattr(distribution, name, None) or UNKNOWN)
    except Exception:
        # An uninstallation that was interrupted leaves folders without metadata behind.
        return UNKNOWN


def amanda_versions() -> Mapping[str, str]:
    """The installed distributions whose name begins with "amanda", and their versions."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, version = origin(distribution)
        if name.startswith("amanda"):
            found.setdefault(name, version)
    return found


def rivals() -> list[str]:
    """The distributions other than amanda-core that have files in the package ``amanda``."""
    return sorted({*metadata.packages_distributions().get("amanda", [])} - {"amanda-core"})


def version(name: str) -> str:
    """The version of an installed distribution; :data:`UNKNOWN` if there is none of that name."""
    try:
        return metadata.version(name)
    except Exception:
        return UNKNOWN


def providers(module: str) -> list[str]:
    """The distributions that provide a top-level module, as ``2.21.0 (tensorflow-cpu)``.

    The module is not imported.
    """
    names = metadata.packages_distributions().get(module, [])
    return sorted({f"{version(name)} ({name})" for name in names})
