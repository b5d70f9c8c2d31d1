"""Discovery of plugins: loads them, checks what they register, and finds tools and rules by name.

:func:`registry` loads the plugins at its first call; :func:`find_tool`, :func:`mapping_rules` and
the others read from it. This module alone uses pluggy.

A plugin that cannot be loaded, or registers something malformed, is a warning that names its
distribution; with ``AMANDA_PLUGINS=strict`` it is an error. The distributions and entry points that
``AMANDA_DISABLE_PLUGINS`` lists (separated by commas) are not loaded.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import attrs
import pluggy

from amanda.errors import PluginError, PluginWarning, UnknownNameError, close_matches, described
from amanda.interface.driver import Driver
from amanda.interface.install_command import install_command
from amanda.registry import distributions, hookspecs

OURS = ("amanda-core", "amanda-tools")
"""Distributions whose tools keep their short names if other distributions use the same names."""

BROKEN = (Exception, SystemExit)
"""Exceptions of plugins and drivers that are caught and reported. SystemExit is one of them: a
module may end with ``sys.exit()``."""

EXHAUSTED = (RecursionError, MemoryError)
"""Exceptions that are caused by the program's stack or memory, not by the plugin or driver in which
they occur: they are raised, so that the program may try again."""

_DISABLED = "disabled by AMANDA_DISABLE_PLUGINS"
_TOOL_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_TARGET = re.compile(r"[\w.]+:\w+")
_ATTRIBUTES = {"name": str, "framework": str, "mode": str, "priority": int}


@attrs.define
class PluginRecord:
    """One entry point of the group ``amanda``, loaded or not.

    Attributes:
        name: name of the entry point.
        distribution: name of the distribution that publishes it.
        version: version of that distribution.
        error: why it is not loaded; "" if it is.
        plugin: the loaded object, usually a module; None if it is not loaded.
        drivers: the driver classes that it registers.
        tools: the tools that it registers, short name to ``module:Class``.
        rules: the mapping rules that it registers, namespace prefix to rules.
        suggestions: the drivers that it suggests, module of a framework to distribution.
    """

    name: str
    distribution: str
    version: str
    error: str = ""
    plugin: Any = None
    drivers: tuple[type[Driver], ...] = ()
    tools: dict[str, str] = attrs.field(factory=dict)
    rules: dict[str, tuple[Any, ...]] = attrs.field(factory=dict)
    suggestions: dict[str, str] = attrs.field(factory=dict)

    @property
    def title(self) -> str:
        """Entry point, distribution and version, for messages."""
        return f"{self.name} ({self.distribution} {self.version})"


@attrs.frozen
class ToolEntry:
    """A registered tool.

    Attributes:
        name: its short name.
        target: ``module:Class``.
        distribution, version: the distribution that registers it.
        rivals: other distributions with a tool of this short name. One of all has the short name,
            the others are called ``<distribution>/<name>``.
        is_hidden: True if a rival has the short name.
    """

    name: str
    target: str
    distribution: str
    version: str = ""
    rivals: tuple[str, ...] = ()
    is_hidden: bool = False

    @property
    def full_name(self) -> str:
        """The unambiguous name, ``<distribution>/<name>``."""
        return f"{self.distribution}/{self.name}"


class Registry:
    """The plugins of the process, and everything that they have registered.

    Attributes:
        manager: pluggy's manager of the loaded plugins.
        records: a record for each entry point, loaded or not.
        mistakes: messages about anything else that is wrong, also given as warnings.
    """

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.records: list[PluginRecord] = []
        self.mistakes: list[str] = []

    def load(self) -> None:
        """Load every entry point of the group that is not disabled."""
        disabled = set(read_list("AMANDA_DISABLE_PLUGINS"))
        points, unreadable = distributions.entry_points(hookspecs.PROJECT)
        self._warn(unreadable)
        for point in points:
            record = PluginRecord(point.name, *distributions.origin(point.dist))
            self.records.append(record)
            if disabled & {record.name, record.distribution}:
                record.error = _DISABLED
                continue
            self._load(record, point.load)

    def _load(self, record: PluginRecord, load: Callable[[], Any]) -> None:
        try:
            record.plugin = load()
            self._register(record)
        except EXHAUSTED:
            raise
        except BROKEN as error:
            self._failed(record, error)
        except KeyboardInterrupt as error:
            # It may have taken long: the message names the plugin.
            error.add_note(
                f"interrupted while plugin {record.title} was loaded; "
                f"AMANDA_DISABLE_PLUGINS={record.distribution} leaves it out"
            )
            raise

    def _warn(self, messages: Sequence[str]) -> None:
        """Warn of mistakes that end nothing, and keep them for ``amanda doctor``."""
        self.mistakes += messages
        for message in messages:
            warnings.warn(message, PluginWarning, stacklevel=4)

    def _register(self, record: PluginRecord) -> None:
        if self.manager.is_registered(record.plugin):
            first = str(self.manager.get_name(record.plugin)).partition(":")[2]
            raise ValueError(f"it names the same object as the entry point {first!r}")
        self.manager.register(record.plugin, name=f"{record.distribution}:{record.name}")
        if not self.manager.get_hookcallers(record.plugin):
            named = described(record.plugin)
            self._warn([f"plugin {record.title}: the entry point names {named}, which has no hook"])
        self.manager.check_pending()
        # Checked here, so that a malformed answer is not an error in the middle of a run.
        record.drivers = _check_drivers(self.call(record, "amanda_register_drivers"))
        record.tools = _check_tools(self.call(record, "amanda_register_tools"))
        record.rules = _check_rules(self.call(record, "amanda_register_mapping_rules"))
        record.suggestions = _check_suggestions(self.call(record, "amanda_suggest_drivers"))

    def _failed(self, record: PluginRecord, error: BaseException) -> None:
        name = f"{record.distribution}:{record.name}"
        # pluggy keeps a plugin whose hooks have failed after its registration.
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        record.plugin, record.drivers = None, ()
        record.tools, record.rules, record.suggestions = {}, {}, {}
        record.error = f"{type(error).__name__}: {error}"
        message = (
            f"amanda plugin {record.name!r} ({record.distribution} {record.version}) "
            f"is not loaded: {record.error}"
        )
        if is_strict():
            raise PluginError(message) from error
        warnings.warn(message, PluginWarning, stacklevel=2)

    def call(self, record: PluginRecord, hook: str, **arguments: Any) -> Any:
        """Call one hook of one plugin; None if it does not implement the hook.

        Args:
            arguments: those of the hook; an implementation may leave some of them out.
        """
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            if implementation.plugin is record.plugin:
                return implementation.function(*(arguments[n] for n in implementation.argnames))
        return None

    def loaded(self) -> Iterable[PluginRecord]:
        """The records of the plugins that are loaded."""
        return (record for record in self.records if record.plugin is not None)


def _check_drivers(answer: Any) -> tuple[type[Driver], ...]:
    """Check the answer to ``amanda_register_drivers``.

    Raises:
        TypeError: it is not a list of driver classes, or an attribute of a driver is missing.
    """
    hook = "amanda_register_drivers()"
    if not isinstance(answer, (list, tuple, type(None))):
        raise TypeError(f"{hook} gave {described(answer)}, not a list of drivers")
    for cls in answer or ():
        if not (isinstance(cls, type) and issubclass(cls, Driver)):
            raise TypeError(
                f"{hook} gave {described(cls)}, which is not a subclass of amanda.Driver"
            )
        for name, kind in {**_ATTRIBUTES, "interface_version": int}.items():
            if not isinstance(getattr(cls, name, None), kind):
                raise TypeError(f"driver {cls.__name__} has no {name} of type {kind.__name__}")
    return tuple(answer or ())


def _check_tools(answer: Any) -> dict[str, str]:
    """Check the answer to ``amanda_register_tools``.

    Raises:
        TypeError: it is not a dictionary of names and ``module:Class``.
    """
    hook = "amanda_register_tools()"
    tools = _as_dict(answer, hook, "tools")
    for name, target in tools.items():
        if not (isinstance(name, str) and _TOOL_NAME.fullmatch(name)):
            raise TypeError(f"{hook} gave {name!r}, which is not a valid tool name")
        if not (isinstance(target, str) and _TARGET.fullmatch(target)):
            raise TypeError(f"{hook} gave {target!r} for {name!r}, which is not 'module:Class'")
    return tools


def _check_rules(answer: Any) -> dict[str, tuple[Any, ...]]:
    """Check the answer to ``amanda_register_mapping_rules``.

    Raises:
        TypeError: it is not a dictionary of namespace prefixes and lists of rules.
    """
    hook = "amanda_register_mapping_rules()"
    rules = _as_dict(answer, hook, "rules")
    for prefix, group in rules.items():
        if not isinstance(prefix, str) or not isinstance(group, (list, tuple)):
            raise TypeError(f"{hook} gave {described(group)} for {prefix!r}, not a list of rules")
        for rule in group:
            if not _is_rule(rule):
                raise TypeError(
                    f"{hook} gave {described(rule)} for {prefix!r}, which is neither a function "
                    "of a context nor a pair (before, after)"
                )
    return {prefix: tuple(group) for prefix, group in rules.items()}


def _is_rule(rule: Any) -> bool:
    """True for a function, and for a pair of functions of which one may be None."""
    parts = rule if isinstance(rule, (list, tuple)) else (rule,)
    functions = [part for part in parts if part is not None]
    return bool(functions) and len(parts) <= 2 and all(map(callable, functions))


def _check_suggestions(answer: Any) -> dict[str, str]:
    """Check the answer to ``amanda_suggest_drivers``.

    Raises:
        TypeError: it is not a dictionary of modules and distributions.
    """
    hook = "amanda_suggest_drivers()"
    suggestions = _as_dict(answer, hook, "distributions")
    for framework, distribution in suggestions.items():
        if not (isinstance(framework, str) and isinstance(distribution, str)):
            raise TypeError(f"{hook} gave {framework!r}: {distribution!r}, which are not two names")
    return suggestions


def _as_dict(answer: Any, hook: str, kind: str) -> dict[Any, Any]:
    if not isinstance(answer, (Mapping, type(None))):
        raise TypeError(f"{hook} gave {described(answer)}, not a dict of {kind}")
    return dict(answer or {})


@functools.cache
def registry() -> Registry:
    """The plugins of this process, loaded at the first call."""
    loaded = Registry()
    loaded.load()
    return loaded


def tools() -> dict[str, ToolEntry]:
    """All registered tools by name.

    If several tools have one short name, it means the one of Amanda's distributions, or else of the
    alphabetically first distribution; the others are found as ``<distribution>/<name>``.
    """
    groups: dict[str, list[ToolEntry]] = {}
    for record in registry().loaded():
        for name, target in record.tools.items():
            entry = ToolEntry(name, target, record.distribution, record.version)
            groups.setdefault(name, []).append(entry)
    found: dict[str, ToolEntry] = {}
    for name, group in groups.items():
        # False sorts before True: our distributions come first.
        group.sort(key=lambda entry: (entry.distribution not in OURS, entry.distribution))
        for i, entry in enumerate(group):
            rivals = tuple(e.distribution for e in group if e is not entry)
            entry = attrs.evolve(entry, rivals=rivals, is_hidden=i > 0)
            found[entry.full_name if entry.is_hidden else name] = entry
    return found


def find_tool(name: str) -> ToolEntry | None:
    """Find a tool by its short name or its full name, ``<distribution>/<name>``; None without one.

    Warns if several distributions have a tool of the short name.
    """
    entries = tools()
    if entry := entries.get(name):
        if entry.rivals and not entry.is_hidden:
            others = " and ".join(f"{rival}/{name}" for rival in entry.rivals)
            warnings.warn(
                f"several packages have a tool {name!r}: the one of {entry.distribution} is used; "
                f"the full name chooses another one, {others}",
                PluginWarning,
                stacklevel=3,
            )
        return entry
    return next((entry for entry in entries.values() if entry.full_name == name), None)


def mapping_rules() -> list[tuple[str, Any]]:
    """All registered mapping rules as (namespace prefix, rule), in the order of the plugins."""
    return [
        (prefix, rule)
        for record in registry().loaded()
        for prefix, group in record.rules.items()
        for rule in group
    ]


def suggested_drivers() -> dict[str, str]:
    """The drivers that plugins suggest, module of a framework to distribution."""
    suggested: dict[str, str] = {}
    for record in registry().loaded():
        suggested |= record.suggestions
    return suggested


def suggest_driver() -> str:
    """Return the advice to a user without any driver: what to install."""
    names = suggested_drivers().values() or ("amanda-torch", "amanda-tensorflow")
    return f"try: {' or '.join(map(install_command, names))}"


def report_problems(frameworks: Collection[str]) -> list[str]:
    """Call ``amanda_report_problems`` of each plugin; a plugin that fails is a problem, too."""
    lines, failures = _lines_of("amanda_report_problems", frameworks=frameworks)
    return lines + failures


def explain_unseen(frameworks: Collection[str]) -> list[str]:
    """Call ``amanda_explain_unseen`` of each plugin; one that fails explains nothing."""
    return _lines_of("amanda_explain_unseen", frameworks=frameworks)[0]


def page_tools() -> list[str]:
    """Call ``amanda_suggest_page_tools`` of each plugin; one that fails names none."""
    return _lines_of("amanda_suggest_page_tools")[0]


def _lines_of(hook: str, **arguments: Any) -> tuple[list[str], list[str]]:
    """Call a hook that returns one line or several, of each plugin.

    Returns:
        The lines, and a message for each plugin that fails.
    """
    lines: list[str] = []
    failures: list[str] = []
    for record in registry().loaded():
        try:
            answer = registry().call(record, hook, **arguments) or ()
            lines += [answer] if isinstance(answer, str) else map(str, answer)
        except BROKEN as error:
            failures.append(f"plugin {record.title} cannot report: {type(error).__name__}: {error}")
    return lines, failures


def report_renderer() -> Callable[..., str | None] | None:
    """The hook that draws the page of a run; None if no plugin implements it."""
    hook = registry().manager.hook.amanda_render_report
    return hook if hook.get_hookimpls() else None


def table_store(what: str) -> hookspecs.TableStore:
    """The functions that write and read tables.

    Args:
        what: what needs them, for the message.

    Raises:
        AmandaError: no plugin has them, or something is not installed.
    """
    store: hookspecs.TableStore | None = registry().manager.hook.amanda_open_tables()
    if store is None:
        raise PluginError(f"{what}: no plugin has tables of results; {advise('amanda-tools')}")
    return store


def cluster(address: str) -> hookspecs.Cluster:
    """The cluster of ``RAY_ADDRESS``.

    Raises:
        AmandaError: no plugin can reach it.
    """
    found: hookspecs.Cluster | None = registry().manager.hook.amanda_open_cluster(address=address)
    if found is None:
        raise PluginError(f"RAY_ADDRESS={address}: no plugin uses Ray; {advise('amanda-tools')}")
    return found


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str) -> UnknownNameError:
    """The error for a tool or driver that no plugin registers, with the close matches."""
    left_out = [
        f"{r.distribution} is {_DISABLED}" if is_disabled(r) else f"{r.distribution} is not loaded"
        for r in registry().records
        if r.error
    ]
    guess = close_matches(name, sorted(known))
    return UnknownNameError(f"no {kind} named {name!r}{guess} ({'; '.join([*left_out, hint])})")


def is_disabled(record: PluginRecord) -> bool:
    """True if ``AMANDA_DISABLE_PLUGINS`` lists a plugin."""
    return record.error == _DISABLED


def not_loaded(distribution: str) -> list[str]:
    """Why plugins of a distribution are not loaded, a message for each."""
    return [
        f"{distribution}: {record.error}"
        for record in registry().records
        if record.error and record.distribution == distribution
    ]


def advise(distribution: str) -> str:
    """Return why the plugins of a distribution are not loaded, or the command that installs it."""
    return "; ".join(not_loaded(distribution)) or f"try: {install_command(distribution)}"


def is_strict() -> bool:
    """True if ``AMANDA_PLUGINS=strict`` makes errors of the warnings about plugins and drivers."""
    return os.environ.get("AMANDA_PLUGINS") == "strict"


def read_list(variable: str) -> Sequence[str]:
    """The items of an environment variable, separated by commas."""
    text = os.environ.get(variable, "")
    return cast(Sequence[str], [part.strip() for part in text.split(",") if part.strip()])
