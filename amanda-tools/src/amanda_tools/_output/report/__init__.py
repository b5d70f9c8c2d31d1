"""HTML pages of results: one file that loads nothing from outside.

::

    html = render(Document(title="my results", sections=[Section(name="flops", grids=[...])]))

Tables are data that the browser draws as far as they are seen; charts are HTML and SVG. A page
allows itself no connection, and no script but its own (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import TYPE_CHECKING

from amanda_tools._output.charts import AXES, COLOURS, lay_out
from amanda_tools._output.report.document import Document, Section
from amanda_tools._output.templating import environment, source

if TYPE_CHECKING:
    import jinja2

__all__ = ["Document", "Section", "render"]

_SCRIPTS = ("tables.js", "graphs.js")


def render(document: Document) -> str:
    """Return the page as HTML."""
    script = "\n".join(source(name) for name in _SCRIPTS)
    # The policy allows this one script by its hash: names of modules can never run as code.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _page().render(
        document=document,
        style=source("style.css"),
        script=script,
        digest=digest,
        axes=AXES,
        colours=COLOURS,
    )


@functools.cache
def _page() -> jinja2.Template:
    found = environment()
    found.filters["drawing"] = lay_out
    return found.get_template("page.html")
