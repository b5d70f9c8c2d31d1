"""Summaries of tools as rich tables."""

from __future__ import annotations

from numbers import Number
from typing import TextIO, TypeVar

import rich.console
import rich.table
from rich.text import Text

from amanda.results import Table
from amanda.tools.reporting import ReportingTool

OptionsT = TypeVar("OptionsT")

_WIDTH_OF_FILES = 120


class QuietConsole(rich.console.Console):
    """A console that leaves it to the caller what happens when the reader has left."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich's own would end the program with status 1."""
        raise BrokenPipeError


class PrintingTool(ReportingTool[OptionsT]):
    """A tool that reports, and prints its tables with rich."""

    def print_summary(self, file: TextIO) -> None:
        """Print the tables, with colours and to the width of a terminal if `file` is one."""
        width = None if file.isatty() else _WIDTH_OF_FILES
        console = QuietConsole(file=file, width=width, highlight=False)
        for table in self.tables():
            # Outside of the table, which may be narrower than they are.
            console.print(Text(table.title, style="bold"), soft_wrap=True)
            if table.rows:
                console.print(rendered(table))
            if more := table.head()[1]:
                console.print(Text(more), soft_wrap=True)


def rendered(table: Table) -> rich.table.Table:
    """A table in rich's form, without its title."""
    rows, _ = table.head()
    # Text, not str: ids and types are no markup, "[0]" has to stay.
    result = rich.table.Table()
    for position, column in enumerate(table.columns):
        numeric = bool(rows) and all(isinstance(row[position], Number) for row in rows)
        result.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(str(value)) for value in row))
    return result
