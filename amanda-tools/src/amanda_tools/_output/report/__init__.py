"""Pages to look at in a browser: one file that needs nothing from outside.

Tables come as data and are drawn by the browser as far as one sees them; charts are SVG.
A page allows itself no connection and no script but its own (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from amanda_tools._output.report import charts
from amanda_tools._output.report.document import Document, Section

if TYPE_CHECKING:
    import jinja2

__all__ = ["Document", "Section", "rendered"]

_SCRIPTS = ("tables.js", "graphs.js")


def rendered(document: Document) -> str:
    """The page in HTML."""
    script = "\n".join(_source(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html")
        .render(
            document=document,
            style=_source("style.css"),
            script=script,
            digest=digest,
            axes={
                "width": charts.WIDTH,
                "height": charts.HEIGHT,
                "left": charts.LEFT,
                "right": charts.RIGHT,
                "bottom": charts.BOTTOM,
            },
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawing"] = charts.drawing_of
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "default": str,
    }  # fmt: skip
    return environment


@functools.cache
def _source(name: str) -> str:
    return (resources.files(__name__) / "templates" / name).read_text(encoding="utf-8")
