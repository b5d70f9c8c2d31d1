"""``amanda tools`` and ``amanda drivers``: lists of the installed tools and drivers."""

from __future__ import annotations

import importlib.util
import inspect
import re
import textwrap
from collections.abc import Sequence

from amanda.cli import tool_options
from amanda.cli.messages import CommandParser, complain, loading_plugins
from amanda.errors import AmandaError
from amanda.interface.tool import Tool
from amanda.python.text import printable
from amanda.registry import drivers, plugins
from amanda.results import Table
from amanda.tools import available, load
from amanda.tools.reporting import plain_text

_ABOUT = {
    "tools": "List the installed tools in groups; or describe some of them, with their options.",
    "drivers": "List the installed drivers, and why each is or is not used.",
}

_MORE = "options, files, an example:  amanda tools NAME"


def main(command: str, arguments: Sequence[str]) -> int:
    """Run one of the two commands; returns the exit status."""
    parser = CommandParser(prog=f"amanda {command}", description=_ABOUT[command])
    if command == "tools":
        parser.add_argument("name", nargs="*", help="describe this tool; several may be given")
    given = parser.parse_args(arguments)
    lines: list[str] = []
    try:
        with loading_plugins():
            if command == "drivers":
                lines = driver_lines()
            elif given.name:
                names = [name for text in given.name for name in text.split(",")]
                lines = "\n\n".join("\n".join(describe(name)) for name in names).splitlines()
            else:
                lines = tool_lines()
    except AmandaError as error:
        complain(f"error: {error}")
        return 2
    print(printable("\n".join(lines), keep="\n"))
    return 0


def tool_lines() -> list[str]:
    """List the tools in groups, each with the first line of its docstring; the default one last."""
    groups: dict[str, list[str]] = {}
    entries = available()
    width = max(map(len, entries), default=0)
    for name, entry in entries.items():
        group, about = _about(entry)
        groups.setdefault(group, []).append(f"  {name:{width}}  {about}".rstrip())
    ordered = sorted(groups, key=Tool.group.__eq__)
    lines = [line for group in ordered for line in (f"{group}:", *groups[group])]
    return [*lines, _MORE] if lines else [f"no tool is installed; {plugins.advise('amanda-tools')}"]


def _about(entry: plugins.ToolEntry) -> tuple[str, str]:
    """The group of a tool, and what it does, in one line, or why it cannot be loaded."""
    group = Tool.group
    try:
        # Its full name: for the short one, load() warns of other tools of that name.
        cls = load(entry.full_name)
        group, about = str(cls.group), inspect.cleandoc(_docstring(cls)).partition("\n")[0]
    except plugins.BROKEN as error:
        about = f"cannot be loaded: {error}"
    hidden = f" ({entry.name} means the tool of {entry.rivals[0]})" if entry.is_hidden else ""
    return group, about + hidden


def describe(name: str) -> list[str]:
    """Describe one tool: what it does, its options, the files that it writes, an example.

    Args:
        name: as :func:`amanda.tools.load` takes it.

    Raises:
        AmandaError: there is no such tool, or it cannot be loaded.
    """
    cls = load(name)
    entry = plugins.find_tool(name)
    head = f"{entry.name}  ({entry.distribution} {entry.version})" if entry else name
    text = _prose(_docstring(cls))
    lines = [head, "", *(text.splitlines() or ["It has no docstring."])]
    known, takes_any = tool_options.options_of(cls)
    lines += ["", "options:" if known or takes_any else "It has no options."]
    for option in known.values():
        lines += [f"  {option.head()}", *_wrapped(option.text)]
    if takes_any:
        lines.append("  any other option")
    if files := _files(cls, name.rpartition(":")[2]):
        lines += ["", "files, in the folder of -o:", *files]
    if "amanda run" not in text:
        needed = ",".join(f"{o.name}=..." for o in known.values() if o.is_required)
        tool = f"{name}:{needed}" if needed else name
        lines += ["", "example:", f"  amanda run -t {tool} -o out -- train.py"]
    return lines


def _prose(docstring: str | None) -> str:
    """The part of a docstring that does not concern callers in Python, without markup."""
    return _MARKUP.sub(r"\1", tool_options.prose(docstring))


def _wrapped(text: str, indent: str = " " * 6) -> list[str]:
    """A paragraph below a heading."""
    return textwrap.wrap(_prose(text), 92, initial_indent=indent, subsequent_indent=indent)


def _files(cls: type[Tool], name: str) -> list[str]:
    """The files of a tool, as the docstring of the method that writes them has it."""
    text = _prose(inspect.getdoc(getattr(cls, "write_files", None)))
    text = " ".join(text.split()).removeprefix("Write ").replace("<stem>", name)
    more = _wrapped(text, "  ") if f"{name}." in text else []
    return [*([f"  {name}.json, the result"] if hasattr(cls, "result") else []), *more]


def driver_lines(title: str = "drivers") -> list[str]:
    """Describe the drivers in a table: name, framework, mode, priority, whether each is used.

    Args:
        title: the line above it; "" for none.
    """
    rows = [
        (c.name, c.framework, c.mode, c.priority, e.distribution, e.reason or "used")
        for e in drivers.drivers()
        for c in (e.cls,)
    ]
    lines = plain_text(Table(title, _COLUMNS, rows), full=True).splitlines() if rows else []
    shown = (lines if title else lines[1:]) or ["no drivers are installed"]
    return shown + missing_drivers()


def missing_drivers() -> list[str]:
    """A hint for each installed framework that no registered driver is for."""
    covered = {cls.framework for cls, _ in drivers.registered_drivers()}
    return [
        f"{framework} is installed, but no driver for it; {plugins.advise(distribution)}"
        for framework, distribution in plugins.suggested_drivers().items()
        # find_spec() looks for a top-level module without importing it.
        if framework not in covered and importlib.util.find_spec(framework) is not None
    ]


_MARKUP = re.compile(r"(?::\w+:`~?|``)([^`]*)``?")

_COLUMNS = ("name", "framework", "mode", "priority", "distribution", "used, or why not")


def _docstring(cls: type[Tool]) -> str:
    """A class's own docstring; "" if that is none, or no text."""
    found = vars(cls).get("__doc__")
    return found if isinstance(found, str) else ""
