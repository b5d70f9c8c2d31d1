"""The choice of drivers: which can be used, which are used, and why the others are not.

A scope asks which drivers to attach and attaches them::

    choice = drivers.select(requested)
    for cls in choice.ready:
        drivers.attach(cls, requested)

A driver that nobody has asked for by name never ends a run: whatever it raises in the steps of its
life cycle is a warning that names it and its distribution (:func:`attach`, :func:`attempt`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import attrs

from amanda.engine.dispatch import create_driver
from amanda.errors import NoDriverError, PluginWarning
from amanda.interface.driver import INTERFACE_VERSION, Driver
from amanda.registry import distributions, import_hook, plugins, proofs
from amanda.registry.plugins import BROKEN, EXHAUSTED
from amanda.state import ATTACHED, FAILED, LIVE_SCOPES, note_attached, note_detached

IMPORTS = "amanda_imports"
"""The group of entry points that are called when a framework has been imported: name of the module
to the function, which takes no arguments. Unlike those of the group ``amanda`` they are read by
``import amanda``, and none is loaded before its framework is there."""

_OPT_IN = "used only when asked for by name"

_LOOPBACK = "amanda.testing.loopback"

_ANSWERS: dict[type[Driver], str] = {}
"""Answers of drivers to ``reason_unusable``, kept while scopes are open."""


@attrs.frozen
class DriverEntry:
    """One registered driver.

    Attributes:
        cls: its class.
        distribution: the distribution that registers it.
        reason: why it is not used; "" if it is.
    """

    cls: type[Driver]
    distribution: str
    reason: str


@attrs.frozen
class DriverChoice:
    """The drivers that a scope uses.

    Attributes:
        ready: drivers to attach now.
        pending: frameworks whose drivers are attached once the framework is imported.
    """

    ready: tuple[type[Driver], ...]
    pending: tuple[str, ...]


def registered_drivers() -> list[tuple[type[Driver], str]]:
    """All registered driver classes with their distribution, without any check."""
    found = [(cls, r.distribution) for r in plugins.registry().loaded() for cls in r.drivers]
    # Registered by its import, not by an entry point: programs do not use it.
    if _LOOPBACK in sys.modules:
        found.append((sys.modules[_LOOPBACK].LoopbackDriver, "amanda-core"))
    return found


def drivers() -> list[DriverEntry]:
    """All registered drivers and, for each, why it would not be used."""
    entries = []
    used = _choose_by_priority([cls for cls, _ in registered_drivers()])
    for cls, distribution in registered_drivers():
        reason = explain_unusable(cls)
        if not reason and cls.opt_in:
            reason = _OPT_IN
        elif not reason and cls not in used:
            rival = next(other for other in used if _mode(other) == _mode(cls))
            reason = f"{rival.name} has a higher priority ({rival.priority} > {cls.priority})"
            if rival.priority == cls.priority:
                reason = f"{rival.name} was registered first, with the same priority"
        entries.append(DriverEntry(cls, distribution, reason))
    return entries


def select(requested: Sequence[str | type[Driver]] | None) -> DriverChoice:
    """Choose the drivers of a scope.

    Args:
        requested: driver names or classes; None for ``AMANDA_DRIVERS`` or the defaults.

    Raises:
        NoDriverError: nothing can be instrumented; the message says what to install.
        UnknownNameError: a requested driver does not exist.
    """
    chosen = _choose(requested)
    ready = tuple(cls for cls in chosen if cls.framework in sys.modules)
    explicit = is_explicit(requested)
    awaited = [c.framework for c in chosen if c not in ready]
    if not explicit:
        # Also the frameworks without a driver, for the warning when one of them is imported.
        awaited += [name for name in known_frameworks() if name not in sys.modules]
    pending = tuple(dict.fromkeys(awaited))
    uncovered = [] if explicit else _explain_uncovered(ready)
    if uncovered and not ready:
        raise NoDriverError("; ".join(uncovered))
    if not chosen:
        raise NoDriverError("drivers=[] selects no driver" if explicit else _nothing_usable())
    for reason in uncovered:
        warnings.warn(reason, PluginWarning, stacklevel=5)
    return DriverChoice(ready, pending)


def is_explicit(requested: Sequence[str | type[Driver]] | None) -> bool:
    """True if the user has chosen the drivers, so that no other one will do."""
    return requested is not None or bool(plugins.read_list("AMANDA_DRIVERS"))


def _nothing_usable() -> str:
    """The message for an environment in which nothing could be instrumented."""
    reasons = [
        f"{cls.name}: {reason}"
        for cls, _ in registered_drivers()
        if (reason := explain_unusable(cls))
    ]
    names = plugins.suggested_drivers().values()
    reasons += [reason for name in names for reason in plugins.not_loaded(name)]
    if reasons:
        return f"no installed driver can be used ({'; '.join(reasons)})"
    advice = plugins.suggest_driver()
    return f"no driver is installed, so that nothing would be instrumented; {advice}"


def select_for(
    framework: str, requested: Sequence[str | type[Driver]] | None
) -> list[type[Driver]]:
    """Choose the drivers of one framework, which has just been imported.

    Warns if no driver covers it.
    """
    found = [cls for cls in _choose(requested) if cls.framework == framework]
    if not found:
        for reason in _explain_uncovered([], only=framework):
            warnings.warn(reason, PluginWarning, stacklevel=2)
    return found


# -- life cycle ---------------------------------------------------------------


def load(classes: Sequence[type[Driver]]) -> None:
    """Import the modules of the drivers that a scope attaches.

    That may take seconds and wait for the imports of other threads, which may wait for what
    attaching needs: so it is done before. A driver that fails here fails again in :func:`attach`.
    """
    for cls in classes:
        with contextlib.suppress(*BROKEN):
            # First: the driver's modules import it, and another thread may be doing so.
            importlib.import_module(cls.framework)
            cls.loaded()


def attach(
    cls: type[Driver], requested: Sequence[str | type[Driver]] | None
) -> type[Driver] | None:
    """Attach a driver, or else the next one for its framework and mode.

    A driver that fails is a warning, and is not tried again in this process.

    Args:
        cls: the driver; nothing is done if it is attached already.
        requested: the drivers that the user has asked for, as in :func:`select`.

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
            _attach_new(cls)
            return cls
        except BROKEN as error:
            if _is_raised(error, requested):
                raise
            FAILED[cls] = f"it could not be attached: {type(error).__name__}: {error}"
        candidates = [rival for rival in _choose(None) if _mode(rival) == _mode(cls)]
        _warn_of_failure(cls, f"; {candidates[0].name} is used instead" if candidates else "")
    return None


def _attach_new(cls: type[Driver]) -> None:
    """Attach a new driver; nothing is left of one that fails."""
    driver = create_driver(cls)
    driver.switched_off = proofs.switched_off(cls)
    try:
        driver.attach()
        # Asked here, and not at the first operator: there it would end the program.
        if not isinstance(driver.namespace, str):
            raise TypeError(f"its namespace is {driver.namespace!r}, which is not a Namespace")
        # A driver that cannot drop its plans would run out-of-date ones.
        driver.invalidate()
        note_attached(cls, driver)
    except BaseException:
        note_detached(cls)
        with contextlib.suppress(*BROKEN):
            driver.detach()
        raise


def attempt(
    driver: Driver, step: str, requested: Sequence[str | type[Driver]] | None = None
) -> bool:
    """Call one step of a driver's life cycle; a failure does not end the run.

    It is a warning, and the driver is not attached again in this process.

    Args:
        driver: a driver that has been attached.
        step: the method, such as ``"detach"``. It takes no arguments.
        requested: the drivers that the user has asked for, as in :func:`select`.

    Returns:
        True if the method has returned.

    Raises:
        Exception: it fails, and the user has asked for the driver, or for strict plugins.
    """
    try:
        getattr(driver, step)()
    except BROKEN as error:
        if _is_raised(error, requested):
            raise
        cls = _declared_class(driver)
        FAILED[cls] = f"its {step}() has failed: {type(error).__name__}: {error}"
        _warn_of_failure(cls)
        return False
    return True


def _is_raised(error: BaseException, requested: Sequence[str | type[Driver]] | None) -> bool:
    """True if an exception of a driver is raised; else it is a warning, and the driver left out."""
    return isinstance(error, EXHAUSTED) or is_explicit(requested) or plugins.is_strict()


def _declared_class(driver: Driver) -> type[Driver]:
    """The class that a plugin registers: the driver's own class, or a base class of it."""
    registered = {cls for cls, _ in registered_drivers()}
    return next((cls for cls in type(driver).__mro__ if cls in registered), type(driver))


def _warn_of_failure(cls: type[Driver], then: str = "") -> None:
    """Warn of a driver in ``FAILED``."""
    origin = dict(registered_drivers()).get(cls, distributions.UNKNOWN)
    message = f"driver {cls.name} of {origin} is left out: {FAILED[cls]}{then}"
    warnings.warn(message, PluginWarning, stacklevel=5)


def watch_imports() -> None:
    """Call the functions of the group :data:`IMPORTS`, now or when their framework is imported.

    A driver notes there what it cannot find out later.
    """
    # Distributions that cannot be read are reported where the plugins are loaded.
    points, _ = distributions.entry_points(IMPORTS)
    frameworks = {point.name: None for point in points}
    if waiting := [name for name in frameworks if name not in sys.modules]:
        import_hook.Watch(framework_imported).add(waiting)
    for name in frameworks:
        if name in sys.modules:
            framework_imported(name)


def framework_imported(framework: str) -> None:
    """Call the functions of the group :data:`IMPORTS` for a framework that has been imported.

    One that fails is a warning: the import is the user's. Those of disabled plugins are left out.
    """
    disabled = set(plugins.read_list("AMANDA_DISABLE_PLUGINS"))
    for point in distributions.entry_points(IMPORTS)[0]:
        name, _ = distributions.origin(point.dist)
        if point.name != framework or disabled & {name, point.name}:
            continue
        try:
            point.load()()
        except BROKEN as error:
            warnings.warn(
                f"{name} failed when {framework} was imported, with "
                f"{type(error).__name__}: {error}",
                PluginWarning,
                stacklevel=2,
            )


# -- what belongs to drivers ---------------------------------------------------


def known_frameworks() -> dict[str, str]:
    """The frameworks that have a driver, usable or not, or for which a plugin suggests one: name of
    the module to name of the distribution with the driver."""
    registered = {cls.framework: distribution for cls, distribution in registered_drivers()}
    return {**plugins.suggested_drivers(), **registered}


def covered_frameworks() -> set[str]:
    """The modules of the frameworks that usable drivers instrument."""
    return {cls.framework for cls, _ in registered_drivers() if not explain_unusable(cls)}


def packages_of(cls: type[Driver]) -> set[str]:
    """The top-level modules that a driver's own code is in."""
    modules = (cls.__module__, cls.target)
    return {module.partition(":")[0].partition(".")[0] for module in modules} - {""}


def packages_of_drivers() -> frozenset[str]:
    """The top-level modules of all registered drivers and their frameworks: no user's program."""
    return _packages_of(*[cls for cls, _ in registered_drivers()])


@functools.lru_cache(maxsize=16)
def _packages_of(*classes: type[Driver]) -> frozenset[str]:
    # Computed once: tools ask at each new operator.
    packages = [{*packages_of(cls), cls.framework, *cls.packages} for cls in classes]
    return frozenset().union(*packages)


# -- choice -------------------------------------------------------------------


def explain_unusable(cls: type[Driver]) -> str:
    """Why a driver cannot be used; "" if it can.

    A check of the driver that raises is a warning, and is not asked again in this process.
    """
    if cls.interface_version != INTERFACE_VERSION:
        newer = cls.interface_version > INTERFACE_VERSION
        update = "update amanda-core" if newer else "update the package that provides it"
        return (
            f"it was written for driver interface {cls.interface_version}, and this "
            f"amanda-core has {INTERFACE_VERSION}: {update}"
        )
    if cls in FAILED:
        return FAILED[cls]
    if not LIVE_SCOPES:
        _ANSWERS.clear()
    elif cls in _ANSWERS:
        return _ANSWERS[cls]
    answer = _ask(cls, "reason_unusable", "its check")
    if cls not in FAILED:
        # Scopes within each other ask often, and drivers read files for it.
        _ANSWERS[cls] = answer
    return answer or FAILED.get(cls, "")


def explain_settings(cls: type[Driver]) -> str:
    """The driver's :meth:`Driver.reason_against_settings`; "" also if that fails."""
    name = "reason_against_settings"
    return "" if cls in FAILED else _ask(cls, name, name)


def _ask(cls: type[Driver], name: str, what: str) -> str:
    """Call a method of a driver class that gives a reason.

    One that raises is a warning, in which `what` stands for it, and gives "".
    """
    try:
        return getattr(cls, name)() or ""
    except EXHAUSTED:
        raise
    except BROKEN as error:
        FAILED[cls] = f"{what} failed with {type(error).__name__}: {error}"
        _warn_of_failure(cls)
        return ""


def _choose(requested: Sequence[str | type[Driver]] | None) -> list[type[Driver]]:
    """The classes of the requested drivers, or the default ones, imported or not."""
    wanted: Sequence[str | type[Driver]] = (
        requested if requested is not None else plugins.read_list("AMANDA_DRIVERS")
    )
    if requested is None and not wanted:
        return _choose_by_priority([cls for cls, _ in registered_drivers() if not cls.opt_in])
    chosen = [_find(item) if isinstance(item, str) else _checked(item) for item in wanted]
    for cls in chosen:
        if reason := explain_unusable(cls):
            raise NoDriverError(f"driver {cls.name} cannot be used: {reason}")
    return list(dict.fromkeys(chosen))


def _checked(cls: Any) -> type[Driver]:
    """The class of a driver that the user has given.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(cls, type) or not issubclass(cls, Driver):
        raise TypeError(
            f"drivers=[{cls!r}]: names or classes of drivers are needed (amanda drivers lists them)"
        )
    return cls


def _find(name: str) -> type[Driver]:
    """The driver of a name, or of a full one, ``<distribution>/<name>``."""
    available = registered_drivers()
    for cls, distribution in available:
        if name in (cls.name, f"{distribution}/{cls.name}"):
            return cls
    known = (cls.name for cls, _ in available)
    raise plugins.unknown_name("driver", name, known, "amanda drivers lists them all")


def _choose_by_priority(classes: Sequence[type[Driver]]) -> list[type[Driver]]:
    """The usable driver of highest priority for each framework and mode."""
    best: dict[tuple[str, str], type[Driver]] = {}
    for cls in classes:
        if cls.opt_in or explain_unusable(cls):
            continue
        rival = best.get(_mode(cls))
        if rival is None or cls.priority > rival.priority:
            best[_mode(cls)] = cls
    return list(best.values())


def _mode(cls: type[Driver]) -> tuple[str, str]:
    """The framework and the execution mode, for which one driver is used."""
    return cls.framework, cls.mode


def _explain_uncovered(ready: Sequence[type[Driver]], only: str = "") -> list[str]:
    """One message for each imported framework, or for one, that no ready driver covers."""
    covered = {cls.framework for cls in ready}
    messages = []
    for framework, distribution in known_frameworks().items():
        if framework in covered or framework not in sys.modules or only not in ("", framework):
            continue
        reasons = [
            f"{cls.name}: {explain_unusable(cls) or _OPT_IN}"
            for cls, _ in registered_drivers()
            if cls.framework == framework
        ]
        why = (
            "; ".join(reasons + plugins.not_loaded(distribution))
            or f"no driver is installed; {plugins.advise(distribution)}"
        )
        messages.append(f"{framework} is imported but cannot be instrumented ({why})")
    return messages
