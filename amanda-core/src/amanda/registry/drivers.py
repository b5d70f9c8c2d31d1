"""The choice of drivers: which can be used, which are, and why the others are not."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence

import attrs

from amanda.engine.dispatch import create_driver
from amanda.errors import NoDriverError, PluginWarning
from amanda.interface.driver import INTERFACE_VERSION, Driver
from amanda.registry import import_hook, plugins
from amanda.registry.plugins import BROKEN
from amanda.state import ATTACHED, FAILED

ANNOUNCED = ("tensorflow",)
"""Frameworks whose import the drivers are told of (``Driver.framework_imported``). Plugins
are loaded for it, which is therefore not done for frameworks whose drivers have no use for it."""

_LOOPBACK = "amanda.testing.loopback"


@attrs.frozen
class DriverEntry:
    """One registered driver, where it comes from and why it is not used ("" if it is)."""

    cls: type[Driver]
    distribution: str
    reason: str


@attrs.frozen
class Selection:
    """Drivers to attach now, and frameworks to wait for."""

    ready: tuple[type[Driver], ...]
    pending: tuple[str, ...]


def registered_drivers() -> list[tuple[type[Driver], str]]:
    """All registered driver classes with their distribution, without any check."""
    found = [(cls, r.distribution) for r in plugins.registry().loaded() for cls in r.drivers]
    if _LOOPBACK in sys.modules:
        found.append((sys.modules[_LOOPBACK].LoopbackDriver, "amanda-core"))
    return found


def drivers() -> list[DriverEntry]:
    """All registered drivers and, for each, why it would not be used."""
    entries = []
    winners = _winners([cls for cls, _ in registered_drivers()])
    for cls, distribution in registered_drivers():
        reason = unusable(cls)
        if not reason and cls.opt_in:
            reason = "used only when asked for by name"
        elif not reason and cls not in winners:
            winner = next(w for w in winners if _slot(w) == _slot(cls))
            reason = f"{winner.name} has a higher priority ({winner.priority} > {cls.priority})"
            if winner.priority == cls.priority:
                reason = f"{winner.name} was registered first, with the same priority"
        entries.append(DriverEntry(cls, distribution, reason))
    return entries


def select(requested: Sequence[str | type[Driver]] | None) -> Selection:
    """The drivers that a scope uses.

    Args:
        requested: driver names or classes; None for ``AMANDA_DRIVERS`` or the defaults.

    Raises:
        NoDriverError: nothing can be instrumented; the message says what to install.
        UnknownNameError: a requested driver does not exist.
    """
    chosen = _chosen(requested)
    ready = tuple(cls for cls in chosen if cls.framework in sys.modules)
    explicit = is_explicit(requested)
    awaited = [c.framework for c in chosen if c not in ready]
    if not explicit:
        # Also those that nothing covers, to say so when they are imported.
        awaited += [name for name in plugins.KNOWN_FRAMEWORKS if name not in sys.modules]
    pending = tuple(dict.fromkeys(awaited))
    uncovered = [] if explicit else _uncovered(ready)
    if uncovered and not ready:
        raise NoDriverError("; ".join(uncovered))
    if not chosen:
        raise NoDriverError("drivers=[] selects no driver" if explicit else _nothing_usable())
    for reason in uncovered:
        warnings.warn(reason, PluginWarning, stacklevel=4)
    return Selection(ready, pending)


def is_explicit(requested: Sequence[str | type[Driver]] | None) -> bool:
    """Whether the user has chosen the drivers, so that no other one will do."""
    return requested is not None or bool(plugins.listed("AMANDA_DRIVERS"))


def _nothing_usable() -> str:
    """The message for an environment in which nothing could be instrumented."""
    known = plugins.KNOWN_FRAMEWORKS.values()
    reasons = [f"{cls.name}: {unusable(cls)}" for cls, _ in registered_drivers() if unusable(cls)]
    reasons += [reason for name in known for reason in plugins.not_loaded(name)]
    if reasons:
        return f"no installed driver can be used ({'; '.join(reasons)})"
    commands = " or ".join(f"pip install {name}" for name in known)
    return f"no driver is installed, so that nothing would be instrumented; try: {commands}"


def drivers_for(
    framework: str, requested: Sequence[str | type[Driver]] | None
) -> list[type[Driver]]:
    """The chosen drivers of one framework, which has just been imported.

    Warns if it is a known one that nothing covers.
    """
    found = [cls for cls in _chosen(requested) if cls.framework == framework]
    if not found:
        for reason in _uncovered([], only=framework):
            warnings.warn(reason, PluginWarning, stacklevel=2)
    return found


def attached(
    cls: type[Driver], requested: Sequence[str | type[Driver]] | None
) -> type[Driver] | None:
    """See that a driver is attached: `cls`, or else the next one for its framework and mode.

    One that fails is a warning, and is not tried again in this process.

    Returns:
        The class under which the driver is in ``ATTACHED``; None if all fail.

    Raises:
        Exception: the driver fails, and the user has asked for it, or for strict plugins.
    """
    candidates = [cls]
    while candidates:
        cls = candidates[0]
        if cls in ATTACHED:
            return cls
        try:
            ATTACHED[cls] = _attached(cls)
            return cls
        except BROKEN as error:
            if is_explicit(requested) or plugins.is_strict():
                raise
            FAILED[cls] = f"it could not be attached: {type(error).__name__}: {error}"
        candidates = [rival for rival in _chosen(None) if _slot(rival) == _slot(cls)]
        then = f"; {candidates[0].name} is used instead" if candidates else ""
        origin = dict(registered_drivers()).get(cls, "?")
        message = f"driver {cls.name} of {origin} is left out: {FAILED[cls]}{then}"
        warnings.warn(message, PluginWarning, stacklevel=4)
    return None


def _attached(cls: type[Driver]) -> Driver:
    """A new driver that is attached; nothing is left of one that fails."""
    driver = create_driver(cls)
    try:
        driver.attach()
    except BaseException:
        with contextlib.suppress(*BROKEN):
            driver.detach()
        raise
    return driver


def watch_imports() -> None:
    """Call :func:`framework_imported` for each announced framework, now or when it comes."""
    waiting = [name for name in ANNOUNCED if name not in sys.modules]
    if waiting:
        import_hook.Watch(waiting, framework_imported)
    for name in ANNOUNCED:
        if name in sys.modules:
            framework_imported(name)


def framework_imported(framework: str) -> None:
    """Tell the usable drivers of a framework that it has been imported.

    A driver that fails here is a warning: the import is the user's.
    """
    for cls, distribution in registered_drivers():
        if cls.framework != framework or unusable(cls):
            continue
        try:
            cls.framework_imported()
        except BROKEN as error:
            warnings.warn(
                f"driver {cls.name} of {distribution} failed when {framework} was imported, with "
                f"{type(error).__name__}: {error}",
                PluginWarning,
                stacklevel=2,
            )


def unusable(cls: type[Driver]) -> str:
    """Why a driver cannot be used; "" if it can."""
    if cls.interface_version != INTERFACE_VERSION:
        newer = cls.interface_version > INTERFACE_VERSION
        update = "update amanda-core" if newer else "update the package that provides it"
        return (
            f"it was written for driver interface {cls.interface_version}, and this "
            f"amanda-core has {INTERFACE_VERSION}: {update}"
        )
    if cls in FAILED:
        return FAILED[cls]
    try:
        return cls.reason_unusable() or ""
    except BROKEN as error:
        return f"its check failed with {type(error).__name__}: {error}"


def _chosen(requested: Sequence[str | type[Driver]] | None) -> list[type[Driver]]:
    wanted: Sequence[str | type[Driver]] = (
        requested if requested is not None else plugins.listed("AMANDA_DRIVERS")
    )
    if requested is None and not wanted:
        return _winners([cls for cls, _ in registered_drivers() if not cls.opt_in])
    chosen = [_named(item) if isinstance(item, str) else item for item in wanted]
    for cls in chosen:
        if reason := unusable(cls):
            raise NoDriverError(f"driver {cls.name} cannot be used: {reason}")
    return list(dict.fromkeys(chosen))


def _named(name: str) -> type[Driver]:
    """The driver of a name, or of a full one, ``<distribution>/<name>``."""
    available = registered_drivers()
    for cls, distribution in available:
        if name in (cls.name, f"{distribution}/{cls.name}"):
            return cls
    known = (cls.name for cls, _ in available)
    raise plugins.unknown("driver", name, known, "amanda drivers lists them all")


def _winners(classes: Sequence[type[Driver]]) -> list[type[Driver]]:
    """Of the usable drivers of each framework and mode, the one of highest priority."""
    best: dict[tuple[str, str], type[Driver]] = {}
    for cls in classes:
        if cls.opt_in or unusable(cls):
            continue
        rival = best.get(_slot(cls))
        if rival is None or cls.priority > rival.priority:
            best[_slot(cls)] = cls
    return list(best.values())


def _slot(cls: type[Driver]) -> tuple[str, str]:
    return cls.framework, cls.mode


def _uncovered(ready: Sequence[type[Driver]], only: str = "") -> list[str]:
    """One message per imported known framework (or of one) that no ready driver covers."""
    covered = {cls.framework for cls in ready}
    messages = []
    for framework, distribution in plugins.KNOWN_FRAMEWORKS.items():
        if framework in covered or framework not in sys.modules or only not in ("", framework):
            continue
        reasons = [
            f"{cls.name}: {unusable(cls)}"
            for cls, _ in registered_drivers()
            if cls.framework == framework and unusable(cls)
        ]
        why = (
            "; ".join(reasons + plugins.not_loaded(distribution))
            or f"no driver is installed; try: pip install {distribution}"
        )
        messages.append(f"{framework} is imported but cannot be instrumented ({why})")
    return messages
