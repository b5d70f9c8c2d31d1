"""Base class of the tools of this package: CSV files, and a page of the results in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from amanda.files import plain_data
from amanda.results import RunReport, ToolReport
from amanda.tool import vanilla
from amanda.tools.reporting import ReportingTool
from amanda_tools._output.csv_files import write_rows

OptionsT = TypeVar("OptionsT")


class PrintingTool(ReportingTool[OptionsT]):
    """A reporting tool that writes its rows as CSV, and that notebooks show as a page."""

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

    def _repr_html_(self) -> str:
        """Return the results for notebooks: the page of ``amanda run --html``, in a frame.

        The frame has the page's own policy: it loads nothing and runs no script but the page's.
        """
        from amanda_tools._output.notebook import frame_of
        from amanda_tools._output.report import render
        from amanda_tools._output.report.run import document_of

        with vanilla():
            part = ToolReport(
                name=self.name,
                result=plain_data(self.result()),
                tables=list(self.tables()),
                charts=list(self.charts()),
            )
        return frame_of(render(document_of(RunReport(title=self.name, facts={}, tools=[part]))))
