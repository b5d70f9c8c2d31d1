"""``amanda doctor``: checks the installation, and says what to do about each problem."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from amanda.cli.list_installed import driver_lines
from amanda.cli.messages import CommandParser
from amanda.interface.driver import INTERFACE_VERSION, Driver
from amanda.interface.install_command import install_command
from amanda.python.text import printable
from amanda.registry import distributions, drivers, plugins, proofs
from amanda.results import plural
from amanda.scope.apply import apply
from amanda.state import FAILED

Check = Callable[[], Any]
"""Returns the problems that it finds, one line each; raising counts as a problem, too."""

_CLASH = (
    "another project installs a package 'amanda', too, over the files of amanda-core; "
    "try: pip uninstall {} && {}"
)

_NO_DRIVER = "there is no error, but no driver is installed, so that nothing can be instrumented; "


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 if there is a problem, else 0."""
    parser = CommandParser(
        prog="amanda doctor",
        description="Check the installation: versions and plugins; attach each driver once, and "
        "run its own checks.",
    )
    parser.parse_args(arguments)
    problems: list[str] = []
    with warnings.catch_warnings():
        # Each warning about a plugin or a driver is a line of the lists below.
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(sys.stderr):  # what plugins print
            plugins.registry()
        for title, part in _PARTS:
            print(title)
            for line in part(problems):
                print(f"  {printable(line)}", flush=True)
    well = "all is well" if drivers.drivers() else _NO_DRIVER + plugins.suggest_driver()
    print(plural(len(problems), "problem") if problems else well)
    for problem in problems:
        print(f"  {printable(problem)}")
    return 1 if problems else 0


def _versions(problems: list[str]) -> Iterator[str]:
    yield f"python {platform.python_version()} ({sys.executable}) on {platform.platform()}"
    for name, version in sorted(distributions.amanda_versions().items()):
        yield f"{name} {version}"
    if others := " ".join(distributions.rivals()):
        again = install_command("amanda-core", "--force-reinstall --no-deps ")
        problems.append(_CLASH.format(others, again))
    for framework in drivers.known_frameworks():
        yield f"{framework} {', '.join(distributions.providers(framework)) or 'is not installed'}"
    classes = [cls for cls, _ in drivers.registered_drivers()]
    for package in dict.fromkeys(package for cls in classes for package in cls.packages):
        if versions := distributions.providers(package):
            yield f"{package} {', '.join(versions)}"


def _plugin_lines(problems: list[str]) -> Iterator[str]:
    for record in plugins.registry().records:
        yield f"{record.title}: {record.error or 'loaded'}"
        if record.error and not plugins.is_disabled(record):
            problems.append(f"plugin {record.title} is not loaded: {record.error}")
    problems += plugins.registry().mistakes
    if not plugins.registry().records:
        yield f"none is installed; {plugins.advise('amanda-tools')}; {plugins.suggest_driver()}"
    problems += plugins.report_problems(drivers.covered_frameworks())


def _checks(problems: list[str]) -> Iterator[str]:
    for entry in drivers.drivers():
        reason = drivers.explain_unusable(entry.cls)
        if not reason:
            yield from check_driver(entry.cls, problems)
            continue
        yield f"{entry.cls.name}: left out ({reason})"
        # A driver whose framework is not installed is not a problem.
        if entry.cls in FAILED or entry.cls.interface_version != INTERFACE_VERSION:
            problems.append(f"{entry.cls.name} is left out: {reason}")


def check_driver(cls: type[Driver], problems: list[str]) -> Iterator[str]:
    """Make all checks of a driver, and attach it once.

    Args:
        cls: a driver that can be used.
        problems: a line for each problem is appended.

    Yields:
        One line for each check: the outcome, or that the driver does not implement it.
    """
    # drivers.explain_unusable() has called it, and there is no reason.
    asked = "passed" if _is_implemented(cls, "reason_unusable") else "is not implemented"
    yield f"{cls.name}: reason_unusable {asked}"
    if wrong := drivers.explain_settings(cls):
        yield f"{cls.name}: {wrong}"
        if wrong not in problems:  # drivers of one framework have settings in common
            problems.append(wrong)
    # The first check, since importing the driver may need the symbols that it looks for.
    internals = _implementation(cls, "check_internals")
    yield _make_check(cls, "check_internals", internals, problems)
    untested = proofs.untested_version(cls)
    if untested:
        yield f"{cls.name}: was not tested with {untested}"
    yield from (f"{cls.name}: {remark}" for remark in _remarks(cls))
    yield _make_check(cls, "attach", lambda: _attach(cls), problems)
    yield _make_check(cls, "self_test", _self_test(cls), problems)


def _remarks(cls: type[Driver]) -> Sequence[str]:
    try:
        return _loaded(cls).remarks()
    except Exception:
        # An error here is raised in the checks, too, and reported there.
        return ()


def _implementation(cls: type[Driver], name: str) -> Check | None:
    """A check that a driver implements, of the class that a plugin registers or the one that runs.

    None if both inherit it from Driver.
    """
    owner = cls if _is_implemented(cls, name) else _loaded(cls)
    if not _is_implemented(owner, name):
        return None
    check: Check = getattr(owner, name)
    return check


def _is_implemented(cls: type[Driver], name: str) -> bool:
    return inspect.getattr_static(cls, name) is not inspect.getattr_static(Driver, name)


def _loaded(cls: type[Driver]) -> type[Driver]:
    try:
        return cls.loaded()
    except plugins.BROKEN:
        # Attaching the driver fails in the same way, and is reported.
        return cls


def _self_test(cls: type[Driver]) -> Check | None:
    """The self-test that a driver implements, or the one that its proofs are."""
    own = _implementation(cls, "self_test")
    if own is None and _implementation(cls, "proofs") is not None:
        own = cls.self_test
    return own and partial(_prove, own)


def _prove(self_test: Check) -> Sequence[str]:
    """Make a self-test with nothing switched off: a mechanism that the driver omits would pass."""
    with proofs.proving():
        found: Sequence[str] = self_test()
        return found


def _attach(cls: type[Driver]) -> Sequence[str]:
    """Attach a driver as a scope does, and detach it.

    Raises:
        Exception: its framework cannot be imported, or a step of the driver fails.
    """
    importlib.import_module(cls.framework)
    with apply(drivers=[cls]):
        return ()


def _make_check(cls: type[Driver], name: str, check: Check | None, problems: list[str]) -> str:
    """Make a check, and describe its outcome in a line."""
    if check is None:
        return f"{cls.name}: {name} is not implemented"
    start = time.perf_counter()
    try:
        found = check() or ()
        found = [found] if isinstance(found, str) else [str(problem) for problem in found]
    except plugins.BROKEN as error:
        found = [f"{type(error).__name__}: {error}"]
    problems += [f"{cls.name} {name}: {problem}" for problem in found]
    outcome = "; ".join(found) or "passed"
    return f"{cls.name}: {name} {outcome} ({time.perf_counter() - start:.1f} s)"


_PARTS: Sequence[tuple[str, Callable[[list[str]], Iterable[str]]]] = (
    ("versions", _versions),
    ("plugins", _plugin_lines),
    ("drivers", lambda problems: driver_lines(title="")),
    ("checks", _checks),
)
