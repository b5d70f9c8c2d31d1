"""The parts of a page: what ran, the model, and sections with figures, charts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from amanda.results import Chart
from amanda_tools._output.report.columns import PageTable
from amanda_tools._output.report.model_tree import ModelView


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
    text: str = ""
    files: Sequence[str] = ()
    lost: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class Document:
    """A page.

    Attributes:
        title: title of the window, and heading if there is no other.
        heading: heading.
        lead: facts about what ran, by name: model, input, device.
        figures: the main figures, by name.
        facts: further facts about the whole, by name.
        model: the model, with figures of all tools.
        operators: the table of all operators; None without one.
        sections: the parts.
    """

    title: str
    heading: str = ""
    lead: Mapping[str, str] = attrs.field(factory=dict)
    figures: Mapping[str, str] = attrs.field(factory=dict)
    facts: Mapping[str, str] = attrs.field(factory=dict)
    model: ModelView | None = None
    operators: PageTable | None = None
    sections: Sequence[Section] = ()
