"""``amanda tools`` and ``amanda drivers``: lists of the installed tools and drivers."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import warnings
from collections.abc import Sequence

from amanda.cli import tool_options
from amanda.cli.results import complain
from amanda.interface.tool import Tool
from amanda.registry import drivers, plugins
from amanda.results import Table
from amanda.text import printable
from amanda.tools import available, load
from amanda.tools.reporting import plain_text

_ABOUT = {
    "tools": "List the installed tools, what they do and their options.",
    "drivers": "List the installed drivers, and why each is or is not used.",
}


def main(command: str, arguments: Sequence[str]) -> int:
    """Run one of the two commands; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"amanda {command}", description=_ABOUT[command])
    parser.parse_args(arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = tool_lines() if command == "tools" else driver_lines()
    for warning in caught:
        complain(f"warning: {warning.message}")
    print(printable("\n".join(lines), keep="\n"))
    return 0


def tool_lines() -> list[str]:
    """Describe each tool: name, distribution, first line of its docstring, options."""
    lines: list[str] = []
    for name, entry in available().items():
        head = f"{name}  ({entry.distribution} {entry.version})"
        try:
            # Its full name: for the short one, load() warns of other tools of that name.
            description = _describe(load(entry.full_name))
        except plugins.BROKEN as error:
            lines.append(f"{head}  cannot be loaded: {error}")
            continue
        lines.append(f"{head}  {description[0]}".rstrip())
        lines += [f"    {line}" for line in description[1:]]
        if entry.is_hidden:
            lines.append(f"    (the name {entry.name} means the tool of {entry.rivals[0]})")
    return lines or ["no tools are installed; try: pip install amanda-tools"]


def _describe(cls: type[Tool]) -> list[str]:
    """The first line of a tool's docstring, and a line for each option."""
    known, takes_any = tool_options.options_of(cls)
    more = ["any other option"] if takes_any else []
    return [_first_line(cls), *(option.describe() for option in known.values()), *more]


def driver_lines(title: str = "drivers") -> list[str]:
    """Describe the drivers in a table: name, framework, mode, priority, whether each is used.

    Args:
        title: the line above it; "" for none.
    """
    rows = [
        (
            e.cls.name,
            e.cls.framework,
            e.cls.mode,
            e.cls.priority,
            e.distribution,
            e.reason or "used",
        )
        for e in drivers.drivers()
    ]
    lines = plain_text(Table(title, _COLUMNS, rows)).splitlines() if rows else []
    shown = (lines if title else lines[1:]) or ["no drivers are installed"]
    return shown + missing_drivers()


def missing_drivers() -> list[str]:
    """A hint for each installed framework that no registered driver is for."""
    covered = {cls.framework for cls, _ in drivers.registered_drivers()}
    return [
        f"{framework} is installed, but no driver for it; "
        + ("; ".join(plugins.not_loaded(distribution)) or f"try: pip install {distribution}")
        for framework, distribution in plugins.KNOWN_FRAMEWORKS.items()
        # find_spec() looks for a top-level module without importing it.
        if framework not in covered and importlib.util.find_spec(framework) is not None
    ]


_COLUMNS = ("name", "framework", "mode", "priority", "distribution", "used, or why not")


def _first_line(cls: type[Tool]) -> str:
    """The first line of a tool's own docstring, not of an inherited one."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return text.partition("\n")[0]
