"""``amanda doctor``: what is installed, what works, and what to do about the rest."""

from __future__ import annotations

import argparse
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from amanda.cli.list_installed import driver_lines
from amanda.interface.driver import Driver
from amanda.registry import distributions, drivers, plugins

CHECKS = ("check_internals", "self_test")
"""Class methods of a driver that the doctor calls where there are such.

Each returns the problems that it found, one line each; none means that all is well.
"""

_CLASH = (
    "the distribution named 'amanda' is an unrelated project and overwrites files of "
    "amanda-core; try: pip uninstall amanda && pip install --force-reinstall amanda-core"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(
        prog="amanda doctor",
        description="Check the installation: versions, plugins, drivers and a self-test of each.",
    )
    parser.parse_args(arguments)
    problems: list[str] = []
    with warnings.catch_warnings():
        # Broken plugins are listed with the others.
        warnings.simplefilter("ignore")
        for title, part in _PARTS:
            print(title)
            for line in part(problems):
                print(f"  {line}", flush=True)
    print(f"{len(problems)} problem(s)" if problems else "all is well")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _versions(problems: list[str]) -> Iterator[str]:
    yield f"python {platform.python_version()} ({sys.executable}) on {platform.platform()}"
    found = distributions.amanda_versions()
    for name in sorted(found):
        yield f"{name} {found[name]}"
    if "amanda" in found:
        problems.append(_CLASH)
    for framework in plugins.KNOWN_FRAMEWORKS:
        yield f"{framework} {', '.join(distributions.providers(framework)) or 'is not installed'}"


def _plugin_lines(problems: list[str]) -> Iterator[str]:
    for record in plugins.registry().records:
        yield f"{record.title}: {record.error or 'loaded'}"
        if record.error and not plugins.is_disabled(record):
            problems.append(f"plugin {record.title} is not loaded: {record.error}")
    problems += plugins.registry().mistakes
    if not plugins.registry().records:
        yield "none is installed; try: pip install amanda-torch amanda-tools"
    headers, failures = plugins.report_headers()
    yield from headers
    problems += failures


def _driver_lines(problems: list[str]) -> Iterable[str]:
    return [line for text in driver_lines() for line in text.splitlines()]


def _checks(problems: list[str]) -> Iterator[str]:
    for entry in drivers.drivers():
        if reason := drivers.unusable(entry.cls):
            yield f"{entry.cls.name}: left out ({reason})"
            continue
        for name in CHECKS:
            check = getattr(entry.cls, name, None)
            if check is not None:
                yield _checked(entry.cls, name, check, problems)


def _checked(cls: type[Driver], name: str, check: Callable[[], Any], problems: list[str]) -> str:
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
    ("drivers", _driver_lines),
    ("checks", _checks),
)
