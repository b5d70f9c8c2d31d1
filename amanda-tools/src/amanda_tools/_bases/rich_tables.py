"""Tables as rich prints them. To be imported by ``with_private_import`` only."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Number
from typing import TextIO

import rich.console
import rich.table
from rich.text import Text

from amanda.python.text import printable
from amanda.results import Table

_WIDTH_OF_FILES = 120


class QuietConsole(rich.console.Console):
    """A console that leaves closed pipes to the caller."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError again; rich's own method ends the program with status 1."""
        raise BrokenPipeError


def print_tables(tables: Iterable[Table], file: TextIO) -> None:
    """Print tables; with colours and to the terminal's width if `file` is a terminal."""
    # Rich would take 80 columns for files.
    width = None if file.isatty() else _WIDTH_OF_FILES
    console = QuietConsole(file=file, width=width, highlight=False)
    for table in tables:
        # Titles are not part of the table, which may be narrower than they are.
        console.print(Text(printable(table.title), style="bold"), soft_wrap=True)
        if table.rows:
            console.print(to_rich(table))
        if more := table.head()[1]:
            console.print(Text(more), soft_wrap=True)


def to_rich(table: Table) -> rich.table.Table:
    """Convert a table to rich's form, without its title."""
    rows, _ = table.head()
    # Text, not str: ids such as "[0]" are not markup.
    result = rich.table.Table()
    for position, column in enumerate(table.columns):
        numeric = bool(rows) and all(isinstance(row[position], Number) for row in rows)
        title = Text(printable(column))
        result.add_column(title, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(printable(str(value))) for value in row))
    return result
