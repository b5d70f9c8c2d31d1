"""Base class of the tools of this package: summaries are printed as tables with rich."""

from __future__ import annotations

from typing import TextIO, TypeVar

from amanda.tools.reporting import ReportingTool
from amanda_tools._output.private_imports import with_private_import

OptionsT = TypeVar("OptionsT")


class PrintingTool(ReportingTool[OptionsT]):
    """A reporting tool whose tables are printed with rich."""

    def print_summary(self, file: TextIO) -> None:
        """Print the tables; with colours and to the terminal's width if `file` is a terminal."""
        tables = list(self.tables())

        def print_them() -> None:
            from amanda_tools._bases.rich_tables import print_tables

            print_tables(tables, file)

        with_private_import("rich", print_them)
