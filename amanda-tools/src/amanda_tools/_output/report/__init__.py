"""HTML pages of results: one file that loads nothing from outside.

::

    html = render(Document(title="my results", sections=[Section(name="flops", grids=[...])]))

A page holds its tables and the tree of the model as data, of which the browser draws the visible
part. Charts and graphs are drawn by libraries that the page holds, too (``_output/vendor``). The
page's Content-Security-Policy allows no connection, and no script but its own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import attrs

from amanda.python.text import printable
from amanda.results import Chart
from amanda_tools._output.report.document import Document, Section

if TYPE_CHECKING:
    import jinja2

__all__ = ["Document", "Section", "render"]


def render(document: Document) -> str:
    """Return the HTML text of a page."""
    script = "\n;\n".join(_scripts(document))
    # The policy allows this one script by its hash: names of modules can never run as code.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _page().render(
        document=document, style=_source("style.css"), script=script, digest=digest
    )


def _scripts(document: Document) -> Iterator[str]:
    """Yield the scripts that a page needs, libraries first."""
    charts = any(chart_data(chart) for section in document.sections for chart in section.charts)
    model = document.model
    if charts:
        yield _vendored("chart.min.js")
    if model is not None and model.edges:
        yield _vendored("dagre.min.js")
        yield _vendored("cytoscape.min.js")
    yield _source("tables.js")
    if charts or model is not None:
        yield _source("model.js")
    if model is not None:
        yield _source("tree.js")
        yield _source("graph.js")
    if charts:
        yield _source("charts.js")


def chart_data(chart: Chart) -> dict[str, Any] | None:
    """Return the data from which the browser draws a chart; None if it has no values."""
    values = _finite(chart.values)
    if not chart.labels or all(v is None for _, numbers in values for v in numbers):
        return None
    is_text = chart.kind in ("bar", "hist", "spans")
    return {
        **attrs.asdict(chart, recurse=False),
        "labels": [str(label) if is_text else label for label in chart.labels],
        "values": values,
        "names": [str(name) for name in chart.names],
        "run": _finite(chart.run),
        "starts": list(chart.starts),
    }


def _finite(series: Mapping[str, Sequence[Any]]) -> list[tuple[str, list[float | None]]]:
    """Return the names and values of series; None for values that are not finite numbers."""
    return [(str(name), [_finite_or_none(v) for v in values]) for name, values in series.items()]


def _finite_or_none(value: Any) -> float | None:
    # JSON has no infinities.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


@functools.cache
def _source(name: str) -> str:
    """Return the text of a file in ``templates/``."""
    return (resources.files("amanda_tools._output") / "templates" / name).read_text("utf-8")


@functools.cache
def _vendored(name: str) -> str:
    """Return the text of a library in ``vendor/``, with its licence before it.

    VERSIONS.txt there has its version and origin.
    """
    folder = resources.files("amanda_tools._output") / "vendor"
    licence = (folder / f"{name.partition('.')[0]}.LICENSE").read_text("utf-8")
    return f"/*!\n{licence}*/\n{(folder / name).read_text('utf-8')}"


@functools.cache
def _page() -> jinja2.Template:
    """Return the page's template, which escapes all values and refuses undefined names."""
    # Imported here: loading the tools, as `amanda tools` does, must not cost this import.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "default": str,
    }  # fmt: skip
    environment.filters["chart_data"] = chart_data
    return environment.get_template("page.html")


def _printable_text(value: Any) -> Any:
    """Replace control characters of a text by their escapes; texts marked as safe stay."""
    return printable(value, keep="\n\t") if type(value) is str else value
