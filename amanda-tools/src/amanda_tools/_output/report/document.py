"""The parts of a page: a document of sections with figures, charts, tables and a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from amanda.results import Chart
from amanda_tools._output.report.columns import PageTable
from amanda_tools._output.report.graphs import GraphView


@attrs.frozen(kw_only=True)
class Section:
    """A part of a page, such as the results of one tool.

    Attributes:
        name: heading, and target of links.
        about: a sentence below the heading.
        notes: further sentences.
        facts: single figures by name.
        charts: charts, in order.
        grids: tables.
        graph: the operator graph.
        text: preformatted text.
        files: names of files beside the page.
        lost: messages about missing parts.
    """

    name: str
    about: str = ""
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = attrs.field(factory=dict)
    charts: Sequence[Chart] = ()
    grids: Sequence[PageTable] = ()
    graph: GraphView | None = None
    text: str = ""
    files: Sequence[str] = ()
    lost: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class Document:
    """A page.

    Attributes:
        title: heading.
        facts: facts about the whole, by name.
        sections: the parts.
    """

    title: str
    facts: Mapping[str, str] = attrs.field(factory=dict)
    sections: Sequence[Section] = ()
