"""The common form of tools that report: options, result, tables, files.

A tool on this base has one options class, an attrs or data class. Its fields
are the keyword arguments of the tool's constructor and the options of
``amanda run -t NAME:key=value`` alike::

    @attrs.frozen(kw_only=True)
    class BusyOptions:
        ops: Sequence[str] = ()


    class BusyTool(ReportingTool[BusyOptions]):
        '''Finds busy operators.'''

        name = "busy"
        Options = BusyOptions

Nothing asks a tool to use this base: ``amanda run`` takes the options from the
signature of any tool's constructor, and uses ``result()``, ``print_summary()``,
``write_files()``, ``tables()`` and ``charts()`` of a tool that has them.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TextIO, TypeVar

from amanda.errors import close_matches
from amanda.interface.tool import Tool
from amanda.results import Chart, Table

OptionsT = TypeVar("OptionsT")


def type_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """A list of op types, or of other names; a single one may be given as it is."""
    return (names,) if isinstance(names, str) else tuple(names)


class ReportingTool(Tool, Generic[OptionsT]):
    """Base of the tools that give a result.

    Attributes:
        name: the short name, as in the entry point.
        schema: version of what :meth:`op_rows` and :meth:`summary` give.
        Options: the class of the options.
        options: the options of this instance.

    Raises:
        TypeError: an option does not exist or is missing.
        ValueError: an option has a value that it cannot have.
    """

    name: ClassVar[str]
    schema: ClassVar[int] = 1
    Options: ClassVar[type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Options" in vars(cls):
            # What help(), editors and `amanda run` read.
            cls.__signature__ = _signature(cls.Options)  # type: ignore[attr-defined]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = _signature(self.Options).parameters
        for name, value in options.items():
            if name not in known:
                raise TypeError(unknown_option(self.name, name, known))
            _check_choice(self.name, known[name], value)
        try:
            self.options: OptionsT = self.Options(**options)
        except (TypeError, ValueError) as error:
            # The validators of attrs add what they were called with to their message.
            if len(error.args) == 1:
                raise
            raise type(error)(f"{self.name}: {error.args[0]}") from None

    def result(self) -> dict[str, Any]:
        """What the tool has found, as plain data: what ``DIR/<tool>.json`` holds."""
        rows = self.op_rows()
        return {
            "tool": self.name,
            "schema": self.schema,
            "namespaces": sorted({row["namespace"] for row in rows}),
            "summary": self.summary(),
            "ops": rows,
        }

    def op_rows(self) -> list[dict[str, Any]]:
        """One dict per operator, with at least ``id type module namespace``."""
        raise NotImplementedError(f"{type(self).__name__} must say what it found: op_rows()")

    def summary(self) -> dict[str, Any]:
        """The figures over all operators."""
        raise NotImplementedError(f"{type(self).__name__} must say what it found: summary()")

    def tables(self) -> Iterable[Table]:
        """The summary as tables for people."""
        return ()

    def charts(self) -> Iterable[Chart]:
        """Pictures for the page that ``amanda run --html`` writes."""
        return ()

    def print_summary(self, file: TextIO) -> None:
        """Print :meth:`tables` as plain text."""
        for table in self.tables():
            print(plain_text(table), file=file)

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write what does not go into the JSON file, as ``folder/stem.*``; returns the paths."""
        return ()


def _check_choice(tool: str, option: inspect.Parameter, value: Any) -> None:
    if typing.get_origin(option.annotation) is not Literal:
        return
    choices = typing.get_args(option.annotation)
    if value not in choices:
        raise ValueError(
            f"tool {tool}: {option.name}={value} is not one of {', '.join(map(str, choices))}"
        )


def _signature(options: type) -> inspect.Signature:
    """The signature of an options class, its annotations resolved where they can be."""
    found = inspect.signature(options)
    try:
        types = typing.get_type_hints(options)
    except NameError:
        # It names types that exist for type checkers only.
        return found
    parameters = [
        parameter.replace(annotation=types.get(parameter.name, parameter.annotation))
        for parameter in found.parameters.values()
    ]
    return found.replace(parameters=parameters, return_annotation=found.empty)


def unknown_option(tool: str, option: str, known: Iterable[str]) -> str:
    """The message for an option that a tool does not have, with the close matches."""
    names = list(known)
    guess = close_matches(option, names)
    has = f"it has {', '.join(names)}" if names else "it has none"
    return f"tool {tool} has no option {option!r}{guess} ({has})"


def plain_text(table: Table) -> str:
    """A table as lines of text; of one without rows the title."""
    if not table.rows:
        return table.title
    rows, more = table.head()
    cells = [[str(value) for value in row] for row in rows]
    columns = list(zip(table.columns, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(widths))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(table.columns), ["-" * width for width in widths], *cells]
    ]
    return "\n".join([table.title, *(f"  {line}" for line in lines), *([more] if more else [])])
