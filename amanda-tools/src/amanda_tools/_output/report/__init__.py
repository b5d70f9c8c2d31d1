"""HTML pages of results: one file that loads nothing from outside.

::

    html = render(Document(title="my results", sections=[Section(name="flops", grids=[...])]))

Tables and the tree of the model are data that the browser draws as far as they are seen; libraries
that the page holds draw its charts and graph (``_output/vendor``), if it has any. A page allows
itself no connection, and no script but its own (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from amanda.results import Chart
from amanda_tools._output.charts import numbers_of
from amanda_tools._output.report.document import Document, Section
from amanda_tools._output.templating import environment, source, vendored

if TYPE_CHECKING:
    import jinja2

__all__ = ["Document", "Section", "render"]


def render(document: Document) -> str:
    """Return the page as HTML."""
    script = "\n;\n".join(_scripts(document))
    # The policy allows this one script by its hash: names of modules can never run as code.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _page().render(
        document=document, style=source("style.css"), script=script, digest=digest
    )


def _scripts(document: Document) -> Iterator[str]:
    """Yield the scripts that a page needs, libraries first."""
    charts = any(chart_data(chart) for section in document.sections for chart in section.charts)
    model = document.model
    if charts:
        yield vendored("chart.min.js")
    if model is not None and model.edges:
        yield vendored("dagre.min.js")
        yield vendored("cytoscape.min.js")
    yield source("tables.js")
    if charts or model is not None:
        yield source("model.js")
    if model is not None:
        yield source("tree.js")
        yield source("graph.js")
    if charts:
        yield source("charts.js")


def chart_data(chart: Chart) -> dict[str, Any] | None:
    """Return what the browser draws a chart from; None if it has no values."""
    values, run = _finite(chart), _finite(attrs.evolve(chart, values=chart.run))
    if not chart.labels or all(v is None for numbers in values.values() for v in numbers):
        return None
    is_text = chart.kind in ("bar", "hist", "spans")
    return {
        "title": chart.title,
        "kind": chart.kind,
        "labels": [str(label) if is_text else label for label in chart.labels],
        "values": list(values.items()),
        "names": [str(name) for name in chart.names],
        "unit": chart.unit,
        "axis": chart.axis,
        "log": chart.log,
        "modules": chart.modules,
        "run": list(run.items()),
        "starts": list(chart.starts),
    }


def _finite(chart: Chart) -> dict[str, list[float | None]]:
    # JSON has no infinities.
    return {
        name: [v if v is not None and math.isfinite(v) else None for v in numbers]
        for name, numbers in numbers_of(chart).items()
    }


@functools.cache
def _page() -> jinja2.Template:
    found = environment()
    found.filters["chart_data"] = chart_data
    return found.get_template("page.html")
