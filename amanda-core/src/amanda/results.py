"""Results of tools as plain data: tables, charts and reports. They are drawn elsewhere.

``Table("count: 3 executions", ("type", "executions"), [("conv2d", 3)])`` is what ``tables()`` of a
tool yields; the command line prints it, and pages and notebooks show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import attrs

from amanda.errors import described

Kind = Literal["bar", "hist", "line", "points", "spans"]
"""The kinds of charts."""

MAX_ROWS = 10
"""The number of rows of a table that a summary prints; files have all rows."""

MAX_TREE_ROWS = 32
"""The rows of a tree that a summary prints."""


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_LISTED = 8
"""Numbers that a message lists."""


def listed(numbers: Iterable[int]) -> str:
    """Return the first numbers as text: ``0, 1, 5, ...``."""
    found = sorted(numbers)
    return ", ".join(map(str, found[:_LISTED])) + ", ..." * (len(found) > _LISTED)


@attrs.frozen
class Table:
    """A table of a summary.

    Attributes:
        title: one line.
        columns: the headings. A column of numbers is aligned to the right.
        rows: the rows, each with one value per column.
        limit: the rows that a summary prints; None for all.
        levels: of the rows of a tree; a summary prints as many levels as fit a screen.
        detail: True if only ``amanda run --full`` and pages show it.

    Raises:
        ValueError: a row has more or fewer values than there are columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    limit: int | None = MAX_ROWS
    detail: bool = False
    levels: Sequence[int] = ()

    def __attrs_post_init__(self) -> None:
        # Checked here, a mistake is an error of its tool; found while drawing, it would spoil the
        # page of all tools.
        count = len(self.columns)
        for row in self.rows:
            if len(row) != count:
                raise ValueError(
                    f"table {self.title!r} has {count} columns, and a row of {len(row)} values: "
                    f"{described(row)}"
                )

    def head(self) -> tuple[Sequence[Sequence[Any]], str]:
        """The first rows, and a line with the number of further rows or ""."""
        shown = self.rows[: self.limit]
        if self.levels:
            deepest = max(self.levels)
            while deepest > 1 and sum(level <= deepest for level in self.levels) > MAX_TREE_ROWS:
                deepest -= 1
            pairs = zip(self.rows, self.levels, strict=True)
            shown = [row for row, level in pairs if level <= deepest]
        hidden = len(self.rows) - len(shown)
        return shown, f"... {plural(hidden, 'more row')} with --full" if hidden else ""


@attrs.frozen(kw_only=True)
class Chart:
    """A chart as plain data; colours and sizes are chosen where it is drawn.

    Attributes:
        title: one line.
        kind: ``"bar"`` for horizontal bars, stacked if there are several series; ``"hist"`` for
            the vertical bars of a histogram; ``"line"`` and ``"points"`` for values over an x axis;
            ``"spans"`` for bars along a time line, one row for each distinct label.
        labels: the name of each bar or bin; for lines and points the x values.
        values: name of each series to its values, one per label, None for a gap.
        names: a longer name for each label, shown on hovering; empty for none.
        unit: unit of the values, such as ``"s"``, ``"B"`` or ``"FLOP"``; drawn with SI prefixes.
        axis: title of the axis of the labels; "" for none.
        log: True if the axis of the values is logarithmic; not for bars.
        modules: True if the labels of bars are paths of modules, which are summed up at one depth;
            a page lets the reader pick it.
        run: values in the form of ``values`` where those are of one step: the sums over the whole
            run, which the reader of a page can pick. Empty for none.
        starts: where each of the ``"spans"`` begins; its value is how long it is.

    Raises:
        ValueError: there is no such kind, or a series has values, but more or fewer than there are
            labels.
    """

    title: str
    kind: Kind
    labels: Sequence[Any]
    values: Mapping[str, Sequence[float | None]]
    names: Sequence[str] = ()
    unit: str = ""
    axis: str = ""
    log: bool = False
    modules: bool = False
    run: Mapping[str, Sequence[float | None]] = attrs.field(factory=dict)
    starts: Sequence[float] = ()

    def __attrs_post_init__(self) -> None:
        kinds = get_args(Kind)
        if self.kind not in kinds:
            raise ValueError(
                f"chart {self.title!r}: kind={self.kind!r} is not one of {', '.join(kinds)}"
            )
        series = [*self.values.items(), *self.run.items()]
        series += [("starts", self.starts)] if self.kind == "spans" else []
        for name, values in series:
            # An empty chart is allowed, so that tools need not check for data.
            if len(values) not in (0, len(self.labels)):
                raise ValueError(
                    f"chart {self.title!r} has {len(self.labels)} labels, and {len(values)} "
                    f"values of {name!r}"
                )


@attrs.frozen(kw_only=True)
class ToolReport:
    """The section of one tool on a page.

    Attributes:
        name: the tool's name in the run, with a number if the run has several of the same name.
        about: the first sentence of its docstring.
        result: return value of ``result()`` in types that JSON has; None without one.
        tables: its tables, empty if the tool has no ``tables()``.
        charts: its charts, empty if the tool has no ``charts()``.
        text: the printed summary of a tool without result and tables.
        files: the files that it has written, relative to the folder of the page.
        lost: a message for each part that could not be computed or written.
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
    """The contents of a page: a run and its tools.

    Attributes:
        title: one line.
        facts: lines about the run as a whole, by heading.
        tools: a section for each tool, in order.
        modules: a row for each module that was called: ``path`` (what the ids of its operators
            begin with), ``type``, and ``inputs`` and ``outputs``, mappings with ``shape`` and
            ``dtype``.
        graph: ``ops`` and ``edges`` of the run, in the form of the results of ``trace``; empty
            where no tool of the run's environment records them.
        runs: of a page of two runs, the results of the same tools in both, which it shows side by
            side, with names such as ``flops A`` and ``flops B``; the sections of `tools` are about
            both. Empty for the page of one run.
    """

    title: str
    facts: Mapping[str, str]
    tools: Sequence[ToolReport]
    modules: Sequence[Mapping[str, Any]] = ()
    graph: Mapping[str, Any] = attrs.field(factory=dict)
    runs: Sequence[Sequence[ToolReport]] = ()
