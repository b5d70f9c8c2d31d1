"""Discovery of plugins, and the choice of drivers and tools.

The only user of pluggy and of entry points. A plugin that fails to load is a
warning, never a stop, unless ``AMANDA_PLUGINS=strict``; the distributions or
entry points named in ``AMANDA_DISABLE_PLUGINS`` (comma-separated) are left out.
What these variables say and nothing knows is a warning.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, cast

import attrs
import pluggy

from amanda import _import_hook, hookspecs
from amanda.driver import INTERFACE_VERSION, Driver
from amanda.errors import NoDriverError, PluginError, PluginWarning, UnknownNameError

KNOWN_FRAMEWORKS = {"torch": "amanda-torch", "tensorflow": "amanda-tensorflow"}
"""Frameworks for which a driver package is published: module to distribution."""

ANNOUNCED = ("tensorflow",)
"""Frameworks whose import the drivers are told of (``Driver.framework_imported``). Plugins
are loaded for it, which is therefore not done for frameworks whose drivers have no use for it."""

_DISABLED = "disabled by AMANDA_DISABLE_PLUGINS"
_LOOPBACK = "amanda.testing.loopback"


@attrs.define
class PluginRecord:
    """One entry point of the group ``amanda``, loaded or not.

    Attributes:
        name: of the entry point.
        distribution: name of the package that publishes it.
        version: of that package.
        error: why it is not loaded; "" if it is.
    """

    name: str
    distribution: str
    version: str
    error: str = ""
    plugin: Any = None


@attrs.frozen
class ToolEntry:
    """Where a tool comes from: its short name, ``module:Class`` and distribution."""

    name: str
    target: str
    distribution: str


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


class Registry:
    """Everything that plugins have registered."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.records: list[PluginRecord] = []
        self.mistakes: list[str] = []

    def load(self) -> None:
        """Load every entry point of the group that is not disabled."""
        disabled = set(_listed("AMANDA_DISABLE_PLUGINS"))
        for point in metadata.entry_points(group=hookspecs.PROJECT):
            dist = point.dist
            record = PluginRecord(
                point.name, dist.name if dist else "?", dist.version if dist else "?"
            )
            self.records.append(record)
            if disabled & {record.name, record.distribution}:
                record.error = _DISABLED
                continue
            try:
                record.plugin = point.load()
                self._register(record)
            except Exception as error:
                self._failed(record, error)
        self._check_variables(disabled)

    def _check_variables(self, disabled: set[str]) -> None:
        known = {name for record in self.records for name in (record.name, record.distribution)}
        self.mistakes = [
            f"AMANDA_DISABLE_PLUGINS: {_guessed('plugin', name, known)} (amanda doctor lists them)"
            for name in sorted(disabled - known)
        ]
        mode = os.environ.get("AMANDA_PLUGINS", "")
        if mode not in ("", "strict"):
            self.mistakes.append(f"AMANDA_PLUGINS={mode} means nothing: its one value is strict")
        for mistake in self.mistakes:
            warnings.warn(mistake, PluginWarning, stacklevel=3)

    def _register(self, record: PluginRecord) -> None:
        self.manager.register(record.plugin, name=f"{record.distribution}:{record.name}")
        self.manager.check_pending()
        # A hook that raises must be found here, not in the middle of a run.
        for hook in ("drivers", "tools", "mapping_rules"):
            self.call(record, f"amanda_register_{hook}")

    def _failed(self, record: PluginRecord, error: Exception) -> None:
        name = f"{record.distribution}:{record.name}"
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        record.plugin = None
        record.error = f"{type(error).__name__}: {error}"
        message = (
            f"amanda plugin {record.name!r} ({record.distribution} {record.version}) "
            f"is not loaded: {record.error}"
        )
        if os.environ.get("AMANDA_PLUGINS") == "strict":
            raise PluginError(message) from error
        warnings.warn(message, PluginWarning, stacklevel=2)

    def call(self, record: PluginRecord, hook: str) -> Any:
        """What one plugin answers to one hook; None if it does not implement it."""
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            if implementation.plugin is record.plugin:
                return implementation.function()
        return None

    def loaded(self) -> Iterable[PluginRecord]:
        """The records of the plugins that are loaded."""
        return (record for record in self.records if record.plugin is not None)


@functools.cache
def registry() -> Registry:
    """The process's plugins, loaded at the first call."""
    loaded = Registry()
    loaded.load()
    return loaded


def tools() -> dict[str, ToolEntry]:
    """All registered tools by short name; of two of one name the first is kept."""
    found: dict[str, ToolEntry] = {}
    for record in registry().loaded():
        registered = registry().call(record, "amanda_register_tools") or {}
        for name, target in registered.items():
            entry = ToolEntry(name, target, record.distribution)
            if name in found:
                warnings.warn(
                    f"tool {name!r} of {record.distribution} is hidden by that of "
                    f"{found[name].distribution}",
                    PluginWarning,
                    stacklevel=2,
                )
            found.setdefault(name, entry)
    return found


def mapping_rules() -> list[tuple[str, Any]]:
    """All shared mapping rules as (namespace prefix, rule), in plugin order."""
    rules: list[tuple[str, Any]] = []
    for record in registry().loaded():
        registered = registry().call(record, "amanda_register_mapping_rules") or {}
        rules += [(prefix, rule) for prefix, group in registered.items() for rule in group]
    return rules


def report_headers() -> list[str]:
    """One line per plugin that reports something about itself."""
    lines = (registry().call(r, "amanda_report_header") for r in registry().loaded())
    return [line for line in lines if line]


def registered_drivers() -> list[tuple[type[Driver], str]]:
    """All registered driver classes with their distribution, without any check."""
    found: list[tuple[type[Driver], str]] = []
    for record in registry().loaded():
        classes = registry().call(record, "amanda_register_drivers") or ()
        found += [(cls, record.distribution) for cls in classes]
    if _LOOPBACK in sys.modules:
        found.append((sys.modules[_LOOPBACK].LoopbackDriver, "amanda-core"))
    return found


def drivers() -> list[DriverEntry]:
    """All registered drivers and, for each, why it would not be used."""
    entries = []
    winners = _winners([cls for cls, _ in registered_drivers()])
    for cls, distribution in registered_drivers():
        reason = _unusable(cls)
        if not reason and cls.opt_in:
            reason = "used only when asked for by name"
        elif not reason and cls not in winners:
            winner = next(w for w in winners if _slot(w) == _slot(cls))
            reason = f"{winner.name} has a higher priority ({winner.priority} > {cls.priority})"
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
    explicit = requested is not None or bool(_listed("AMANDA_DRIVERS"))
    awaited = [c.framework for c in chosen if c not in ready]
    if not explicit:
        # Also those that nothing covers, to say so when they are imported.
        awaited += [name for name in KNOWN_FRAMEWORKS if name not in sys.modules]
    pending = tuple(dict.fromkeys(awaited))
    uncovered = [] if explicit else _uncovered(ready)
    if uncovered and not ready:
        raise NoDriverError("; ".join(uncovered))
    if not chosen:
        raise NoDriverError("drivers=[] selects no driver" if explicit else _nothing_usable())
    for reason in uncovered:
        warnings.warn(reason, PluginWarning, stacklevel=4)
    return Selection(ready, pending)


def _nothing_usable() -> str:
    """The message for an environment in which nothing could be instrumented."""
    reasons = [f"{cls.name}: {_unusable(cls)}" for cls, _ in registered_drivers() if _unusable(cls)]
    reasons += [reason for name in KNOWN_FRAMEWORKS.values() for reason in not_loaded(name)]
    if reasons:
        return f"no installed driver can be used ({'; '.join(reasons)})"
    commands = " or ".join(f"pip install {name}" for name in KNOWN_FRAMEWORKS.values())
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


def watch_imports() -> None:
    """Call :func:`framework_imported` for each announced framework, now or when it comes."""
    waiting = [name for name in ANNOUNCED if name not in sys.modules]
    if waiting:
        _import_hook.Watch(waiting, framework_imported)
    for name in ANNOUNCED:
        if name in sys.modules:
            framework_imported(name)


def framework_imported(framework: str) -> None:
    """Tell the usable drivers of a framework that it has been imported.

    A driver that fails here is a warning: the import is the user's.
    """
    for cls, distribution in registered_drivers():
        if cls.framework != framework or _unusable(cls):
            continue
        try:
            cls.framework_imported()
        except Exception as error:
            warnings.warn(
                f"driver {cls.name} of {distribution} failed when {framework} was imported, with "
                f"{type(error).__name__}: {error}",
                PluginWarning,
                stacklevel=2,
            )


def unknown(kind: str, name: str, known: Iterable[str], hint: str) -> UnknownNameError:
    """The error for a name that nobody provides, with the close matches."""
    disabled = [f"{r.distribution} is {_DISABLED}" for r in registry().records if is_disabled(r)]
    return UnknownNameError(f"{_guessed(kind, name, known)} ({'; '.join([*disabled, hint])})")


def _guessed(kind: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"no {kind} named {name!r}{guess}"


def is_disabled(record: PluginRecord) -> bool:
    """Whether ``AMANDA_DISABLE_PLUGINS`` leaves a plugin out."""
    return record.error == _DISABLED


def not_loaded(distribution: str) -> list[str]:
    """Why plugins of an installed distribution are not there, one reason each."""
    return [
        f"{distribution}: {record.error}"
        for record in registry().records
        if record.error and record.distribution == distribution
    ]


def _chosen(requested: Sequence[str | type[Driver]] | None) -> list[type[Driver]]:
    available = [cls for cls, _ in registered_drivers()]
    wanted: Sequence[str | type[Driver]] = (
        requested if requested is not None else _listed("AMANDA_DRIVERS")
    )
    if requested is None and not wanted:
        return _winners([cls for cls in available if not cls.opt_in])
    chosen = [_named(item, available) if isinstance(item, str) else item for item in wanted]
    for cls in chosen:
        reason = _unusable(cls)
        if reason:
            raise NoDriverError(f"driver {cls.name} cannot be used: {reason}")
    return list(dict.fromkeys(chosen))


def _named(name: str, available: Sequence[type[Driver]]) -> type[Driver]:
    for cls in available:
        if cls.name == name:
            return cls
    raise unknown("driver", name, (c.name for c in available), "amanda drivers lists them all")


def _winners(classes: Sequence[type[Driver]]) -> list[type[Driver]]:
    """Of the usable drivers of each framework and mode, the one of highest priority."""
    best: dict[tuple[str, str], type[Driver]] = {}
    for cls in classes:
        if cls.opt_in or _unusable(cls):
            continue
        rival = best.get(_slot(cls))
        if rival is None or cls.priority > rival.priority:
            best[_slot(cls)] = cls
    return list(best.values())


def _slot(cls: type[Driver]) -> tuple[str, str]:
    return cls.framework, cls.mode


def _unusable(cls: type[Driver]) -> str:
    if cls.interface_version != INTERFACE_VERSION:
        return (
            f"it was written for driver interface {cls.interface_version}, and this "
            f"amanda-core has {INTERFACE_VERSION}"
        )
    try:
        return cls.reason_unusable()
    except Exception as error:
        return f"its check failed with {type(error).__name__}: {error}"


def _uncovered(ready: Sequence[type[Driver]], only: str = "") -> list[str]:
    """One message per imported known framework (or of one) that no ready driver covers."""
    covered = {cls.framework for cls in ready}
    messages = []
    for framework, distribution in KNOWN_FRAMEWORKS.items():
        if framework in covered or framework not in sys.modules or only not in ("", framework):
            continue
        reasons = [
            f"{cls.name}: {_unusable(cls)}"
            for cls, _ in registered_drivers()
            if cls.framework == framework and _unusable(cls)
        ]
        why = (
            "; ".join(reasons + not_loaded(distribution))
            or f"no driver is installed; try: pip install {distribution}"
        )
        messages.append(f"{framework} is imported but cannot be instrumented ({why})")
    return messages


def _listed(variable: str) -> Sequence[str]:
    text = os.environ.get(variable, "")
    return cast(Sequence[str], [part.strip() for part in text.split(",") if part.strip()])


def distribution_versions() -> Mapping[str, str]:
    """Installed distributions whose name begins with "amanda", and their versions."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: version for name, version in found.items() if name and name.startswith("amanda")}
