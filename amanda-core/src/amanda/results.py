"""Results of tools as data: tables, charts and reports, without a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

MAX_ROWS = 20
"""Rows of a table that a summary prints; the files have all of them."""


@attrs.frozen
class Table:
    """A part of a summary.

    Attributes:
        title: one line.
        columns: their headings; a column whose values are numbers is set to the right.
        rows: one value per column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def head(self) -> tuple[Sequence[Sequence[Any]], str]:
        """The rows that a summary prints, and a line about those it leaves out."""
        hidden = len(self.rows) - MAX_ROWS
        return self.rows[:MAX_ROWS], f"... and {hidden} more rows" if hidden > 0 else ""


@attrs.frozen(kw_only=True)
class Chart:
    """A picture of a result as plain data; who draws it decides what it looks like.

    Attributes:
        title: one line.
        kind: ``"bar"`` for named bars, those of several series stacked; ``"hist"`` for the
            upright bars of a histogram; ``"line"`` and ``"points"`` for values along an axis.
        labels: the name of each bar or bin; of lines and points their numbers on the x axis.
        values: the values of each series by its name, one per label, None for a gap.
        names: what each label stands for, where hovering is to tell more than the label.
        unit: of the values, such as ``"s"``, ``"B"`` or ``"FLOP"``; drawn with prefixes.
        axis: what the labels are, where that has to be said.
        log: whether powers of ten of the values are equally far apart; not for bars.
    """

    title: str
    kind: Literal["bar", "hist", "line", "points"]
    labels: Sequence[Any]
    values: Mapping[str, Sequence[float | None]]
    names: Sequence[str] = ()
    unit: str = ""
    axis: str = ""
    log: bool = False


@attrs.frozen(kw_only=True)
class ToolReport:
    """What one tool gives to a page.

    Attributes:
        name: the tool's, with a number if the run has several of it.
        about: the first sentence of its documentation.
        result: what ``result()`` gave, as JSON would hold it; None if there is none.
        tables: the summary as tables, empty of a tool that has no ``tables()``.
        charts: what ``charts()`` gave.
        text: what a tool without any of these prints.
        files: the files that it wrote, as paths from the page's folder.
        lost: what could not be computed or written, one message each.
    """

    name: str
    about: str = ""
    result: Any = None
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    text: str = ""
    files: Sequence[str] = ()
    lost: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class RunReport:
    """What a page is about: a run and its tools.

    Attributes:
        title: one line.
        facts: what is known of the run as a whole, by heading.
        tools: its tools, in order.
    """

    title: str
    facts: Mapping[str, str]
    tools: Sequence[ToolReport]
