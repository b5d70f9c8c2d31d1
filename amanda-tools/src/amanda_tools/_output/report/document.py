"""What a page consists of, whoever it is about: the run of some tools, or a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from amanda.results import Chart
from amanda_tools._output.report.columns import Grid
from amanda_tools._output.report.graphs import GraphView


@attrs.frozen(kw_only=True)
class Section:
    """A part of a page, such as what one tool has found.

    Attributes:
        name: its heading, and where links lead to.
        about: a sentence below it.
        notes: further sentences.
        facts: single figures by name.
        charts: pictures, drawn in this order.
        grids: tables.
        graph: the operator graph.
        text: what stands there as it is.
        files: names of files beside the page.
        lost: messages about what is missing.
    """

    name: str
    about: str = ""
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = attrs.field(factory=dict)
    charts: Sequence[Chart] = ()
    grids: Sequence[Grid] = ()
    graph: GraphView | None = None
    text: str = ""
    files: Sequence[str] = ()
    lost: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class Document:
    """A page.

    Attributes:
        title: its heading.
        facts: what is known of the whole, by heading.
        sections: its parts.
    """

    title: str
    facts: Mapping[str, str] = attrs.field(factory=dict)
    sections: Sequence[Section] = ()
