"""Base class of the tools of this package: CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from amanda.tools.reporting import ReportingTool
from amanda_tools._output.csv_files import write_rows

OptionsT = TypeVar("OptionsT")


class PrintingTool(ReportingTool[OptionsT]):
    """A reporting tool that writes its rows as CSV."""

    group = "look"

    def csv_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the CSV file; those of the operators unless overridden."""
        return self.op_rows()

    def write_files(self, folder: Path, stem: str) -> Sequence[Path]:
        """Write ``<stem>.csv``, if the tool has an option ``csv`` that asks for it."""
        if not getattr(self.options, "csv", False):
            return []
        path = folder / f"{stem}.csv"
        write_rows(path, self.csv_rows())
        return [path]
