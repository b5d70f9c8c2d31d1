"""Which operators are outside of a model, and what tools show of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import amanda
from amanda.tools.reporting import ReportingTool

OUTSIDE = "outside of the model"
"""What the titles of the tables with a line for each other phase contain."""

ACTING = ("inject", "prune", "quantize", "remat", "steer")
"""Tools that change what a program computes: each runs by itself."""

OF_PROCESS = ("flight", "memory")
"""Tools about the process, which show operators of all phases: it dies in one of the optimizer, and
holds what has built the model."""

MODEL = {"forward", "backward"}


def names() -> list[str]:
    """All tools of amanda-tools."""
    entries = amanda.tools.available().items()
    return [name for name, entry in entries if entry.distribution == "amanda-tools"]


def make(name: str) -> ReportingTool[Any]:
    """A tool without options, where it can be."""
    tool = amanda.tools.load(name)(**({"at": "*", "how": "scale"} if name == "steer" else {}))
    assert isinstance(tool, ReportingTool)
    return tool


def run_all(
    program: Callable[[], Any], chosen: Iterable[str] | None = None
) -> dict[str, ReportingTool[Any]]:
    """Run a program under all tools, or chosen ones: under those that only watch at once."""
    tools = {name: make(name) for name in chosen or names()}
    recording = make("diff")
    watching = [tool for name, tool in tools.items() if name not in (*ACTING, "diff")]
    with amanda.apply(*watching, recording):
        program()
    if "diff" in tools:
        tools["diff"] = amanda.tools.load("diff")(reference=recording)  # type: ignore[assignment]
    for name in tools.keys() & {"diff", *ACTING}:
        with amanda.apply(tools[name]):
            program()
    return tools


def check(tools: dict[str, ReportingTool[Any]], name: str) -> None:
    """Check the tables and charts of one of the tools."""
    outside = Outside(tools["count"].op_rows())
    assert {"setup", "optimizer"} <= outside.phases
    if name in OF_PROCESS:
        return
    assert outside.named_in(tools[name]) == set()
    rows = {row["phase"] for row in tools[name].op_rows()} - MODEL
    assert set(lines_of_other_phases(tools[name])) >= rows


class Outside:
    """The ids and types that only operators outside of the model have, from the rows of ``count``.

    Attributes:
        words: these ids and types.
        phases: the phases of these operators.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        rows = list(rows)
        inside = {word for row in rows if row["phase"] in MODEL for word in _words(row)}
        others = [row for row in rows if row["phase"] not in MODEL]
        self.words = {word for row in others for word in _words(row)} - inside
        self.phases = {row["phase"] for row in others}

    def named_in(self, tool: ReportingTool[Any]) -> set[str]:
        """Those that the tool's tables and charts name."""
        return self.words & set(_named(tool))


def _words(row: dict[str, Any]) -> set[str]:
    return {row["id"], row["type"]}


def _named(tool: ReportingTool[Any]) -> Iterator[str]:
    for table in tool.tables():
        for row in table.rows if OUTSIDE not in table.title else ():
            # A cell may name a tensor of an operator: its id, a space, and the tensor.
            yield from (part for cell in row[:3] for part in (str(cell), str(cell).split(" ")[0]))
    for chart in tool.charts():
        for label in (*chart.labels, *chart.names):
            yield str(label).split(" ")[0]


def lines_of_other_phases(tool: ReportingTool[Any]) -> list[str]:
    """The phases that have a line of their own."""
    return [str(row[0]) for t in tool.tables() if OUTSIDE in t.title for row in t.rows]
